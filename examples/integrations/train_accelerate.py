"""Train on the A5 word problem with accelerate: mixed precision, any number of processes.

python examples/integrations/train_accelerate.py --steps 300
accelerate launch --num-processes 2 examples/integrations/train_accelerate.py   # on GPUs
torchrun --nproc-per-node 2 examples/integrations/train_accelerate.py           # also on CPUs
"""

import os

import torch
import tyro
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from bedouin import Bedouin, SequenceModel, param_groups
from bedouin.tasks import Group, WordProblem


def main(steps: int = 300, batch_size: int = 64, d_model: int = 64) -> list[float]:
    """Return the loss of every step of this process."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    if "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        raise SystemExit("accelerate launch starts one process on a CPU: use torchrun")
    torch.manual_seed(0)
    task = WordProblem(Group.from_name("A5"), length=6)
    model = SequenceModel(60, d_model, [Bedouin(d_model)])
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.01), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for step in range(steps):
        tokens, labels = (v.to(accelerator.device) for v in task.sample(batch_size, generator))
        loss = cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        if norm.isfinite():  # otherwise the step would end the training
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0:
            accelerator.print(f"step {step}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
