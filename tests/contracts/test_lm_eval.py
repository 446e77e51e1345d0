"""EleutherAI's lm_eval, from the command line, on a folder that a model and a tokenizer are in."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import ByT5Tokenizer

from bedouin.integrations.hf import BedouinConfig, BedouinForCausalLM

pytestmark = pytest.mark.filterwarnings("default")

TEXTS = ["a state is kept", "and another one, which is longer"]
TASK = """
task: texts
dataset_path: json
dataset_kwargs: {data_files: texts.json}
output_type: loglikelihood_rolling
test_split: train
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


def test_bits_per_byte_are_those_of_the_model(tmp_path: Path) -> None:
    tokenizer, nats = ByT5Tokenizer(), 0.0  # its tokens are bytes, and one that ends a text
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 2}
    hybrid = {"attn_layers": [1], "attn": {"num_heads": 2}, "initializer_range": 0.5}
    model = BedouinForCausalLM(BedouinConfig(**sizes, **hybrid)).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.json").write_text("\n".join(json.dumps({"text": v}) for v in TEXTS))
    (tmp_path / "task.yaml").write_text(TASK)
    command = [sys.executable, "-P", "-m", "lm_eval", "--model", "hf", "--tasks", "texts"]
    command += ["--model_args", "pretrained=model,trust_remote_code=True", "--device", "cpu"]
    command += ["--include_path", ".", "--output_path", "results.json"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run(
        command, cwd=tmp_path, env=os.environ | offline, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.glob("results*.json")
    found = json.loads(path.read_text())["results"]["texts"]["bits_per_byte,none"]
    for text in TEXTS:
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer.encode(text)]])
        nats -= model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids.mT[1:]).sum().item()
    assert found == pytest.approx(nats / sum(map(len, TEXTS)) / math.log(2), rel=1e-5)
