"""The scripts of examples/integrations and the snippets of their README run; adapters without their
libraries: none is imported by bedouin, and a missing one is named."""

import re
import subprocess
import sys
import warnings
from pathlib import Path
from runpy import run_path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "integrations"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.filterwarnings("default")


def load(name: str) -> Any:
    return run_path(str(FOLDER / f"{name}.py"))["main"]


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_scripts_learn(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    name = f"train_{library}"
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 48
    losses = load(name)(steps=40, batch_size=32, d_model=48)
    assert len(losses) == 40 and sum(losses[-5:]) < sum(losses[:5]) - 0.5


def test_a_model_of_transformers_is_trained_saved_and_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", minversion="5.16")
    assert len((FOLDER / "train_transformers.py").read_text().splitlines()) <= 48
    losses = load("train_transformers")(tmp_path, steps=30, batch_size=4, length=32)
    assert len(losses) == 30 and sum(losses[-5:]) < sum(losses[:5]) - 2.5
    assert "    def " in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: str(BLOCKS.index(block)))
def test_snippets_run(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = re.match(r"# needs: (.*)\n", block)
    if "mamba_ssm" in block and not torch.cuda.is_available():
        # an extension that mamba-ssm imports and is built without on a CPU
        monkeypatch.setitem(sys.modules, "selective_scan_cuda", ModuleType("selective_scan_cuda"))
    for name in needs[1].split(", ") if needs else ():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip(name)
    exec(block, {})


SCRIPT = """
import sys

blocked = "accelerate fla huggingface_hub lightning mamba_ssm peft transformers".split()
sys.modules.update(dict.fromkeys(blocked))
import bedouin, torch

assert not [name for name in sys.modules if name.startswith("bedouin.integrations")]
from bedouin.integrations.fla import BedouinLayer
from bedouin.integrations.mamba_ssm import BedouinMixer

x = torch.randn(1, 3, 8)
assert BedouinMixer(8)(x).shape == BedouinLayer(8)(x)[0].shape == x.shape
try:
    import bedouin.integrations.hf
except ImportError as error:
    print(error)
"""


def test_libraries_are_needed_by_their_adapters_alone() -> None:
    command = [sys.executable, "-P", "-c", SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    needed = 'needs transformers 5.16 or newer: pip install "transformers>=5.16,<6"'
    assert run.stdout.strip() == f"bedouin.integrations.hf {needed}"
