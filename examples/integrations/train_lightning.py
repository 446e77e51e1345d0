"""Train on the A5 word problem with Lightning: python examples/integrations/train_lightning.py"""

import lightning
import torch
import tyro
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from bedouin import Bedouin, SequenceModel, param_groups
from bedouin.tasks import Group, WordProblem


class WordModel(lightning.LightningModule):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.model = SequenceModel(60, d_model, [Bedouin(d_model)])
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        finite = torch.nn.utils.get_total_norm(p.grad for p in self.parameters()).isfinite()
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]  # skips the step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(param_groups(self.model, weight_decay=0.01), lr=1e-3, fused=True)


def main(steps: int = 300, batch_size: int = 64, d_model: int = 64) -> list[float]:
    lightning.seed_everything(0)
    task = WordProblem(Group.from_name("A5"), length=6)
    rows = task.sample(steps * batch_size, torch.Generator().manual_seed(0))
    model, options = WordModel(d_model), {"logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_epochs=1, gradient_clip_val=1.0, **options)
    data = list(zip(*rows, strict=True))
    trainer.fit(model, DataLoader(data, batch_size))  # type: ignore[arg-type]
    return model.losses


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
