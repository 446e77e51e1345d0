"""Tests against the real packages, which `make contracts` installs in an environment of its own."""

from importlib.util import find_spec

PACKAGES = {
    "test_peft.py": "peft",
    "test_onnx.py": "onnxruntime",
    "test_hf_distributed.py": "transformers",
    "test_lm_eval.py": "lm_eval",
    "test_tools.py": "opacus",
}

collect_ignore = [name for name, package in PACKAGES.items() if find_spec(package) is None]
