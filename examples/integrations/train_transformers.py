"""Train, save, reload, generate: python examples/integrations/train_transformers.py --folder model

Then `lm_eval --model hf --model_args pretrained=model,trust_remote_code=True --tasks ...`.
"""

from pathlib import Path

import torch
import tyro
from transformers import (
    AutoModelForCausalLM,
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from bedouin.integrations.hf import BedouinConfig, BedouinForCausalLM


def main(folder: Path, steps: int = 200, batch_size: int = 16, length: int = 128) -> list[float]:
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer()  # of bytes, without a download
    ids = tokenizer(Path(torch.__file__).read_text(), add_special_tokens=False).input_ids
    rows = [{"input_ids": ids[i : i + length]} for i in range(0, len(ids) - length, length)]
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    config = BedouinConfig.preset("60m", vocab_size=len(tokenizer), **small, **special)
    options = {"max_steps": steps, "learning_rate": 1e-2, "per_device_train_batch_size": batch_size}
    trainer = Trainer(
        BedouinForCausalLM(config),
        TrainingArguments(folder, logging_steps=1, save_strategy="no", report_to="none", **options),
        DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=rows[:-8],
        eval_dataset=rows[-8:],
    )
    trainer.train()
    print(f"loss of rows that were held out: {trainer.evaluate()['eval_loss']:.2f}")
    trainer.save_model(folder)
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    begin = tokenizer("    def ", return_tensors="pt", add_special_tokens=False)
    print(tokenizer.decode(model.generate(**begin, max_new_tokens=60)[0]))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
