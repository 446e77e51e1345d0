"""Adapters without their libraries: none is imported by bedouin, and a missing one is named."""

import subprocess
import sys

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
