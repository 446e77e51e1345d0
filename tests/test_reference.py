"""Docstrings of the public names, and the pages that `make docs` builds from them."""

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bedouin import Bedouin, FixedPointRNN, TrackingDeltaNet

ROOT = Path(__file__).parents[1]


def load_script() -> ModuleType:
    """docs/reference.py, whose folder is in no import path."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load_script()
NAMES: list[tuple[str, str]] = reference.public_names()


def is_described(module: str, name: str) -> bool:
    """Whether it is a class or a function: numbers and aliases of types have no docstrings."""
    found = getattr(sys.modules[module], name)
    return inspect.isclass(found) or inspect.isroutine(found)


DESCRIBED = [pair for pair in NAMES if is_described(*pair)]


def test_the_public_names_are_those_of_the_library() -> None:
    shown = {module for module, _ in NAMES}
    assert {"bedouin", "bedouin.solvers", "bedouin.kernels.scan"} <= shown
    assert ("bedouin", "Bedouin") in NAMES and ("bedouin.solvers", "Picard") in NAMES


@pytest.mark.parametrize(("module", "name"), DESCRIBED, ids=map(".".join, DESCRIBED))
def test_every_public_name_has_a_docstring(module: str, name: str) -> None:
    text = getattr(sys.modules[module], name).__doc__ or ""
    assert text.strip() and not text.startswith(f"{name}("), "that of a dataclass is its signature"


@pytest.mark.parametrize("layer", [Bedouin, FixedPointRNN, TrackingDeltaNet])
def test_the_docstring_of_a_layer_groups_every_option_once(layer: Any) -> None:
    text = inspect.getdoc(layer) or ""
    groups = "|".join(reference.OPTION_GROUPS)
    described: list[str] = []
    for group in re.findall(rf"^(?:{groups}):\n((?:    .+\n)+)", text, re.MULTILINE):
        for names in re.findall(r"^    ([a-z]\w*(?:, \w+)*): ", group, re.MULTILINE):
            described += names.split(", ")
    options = list(inspect.signature(layer).parameters)
    assert sorted(described) == sorted(options)
    # help(layer) begins with what it computes and how it is called, not with options
    assert "layer = " in "\n".join(text.splitlines()[:5])


def test_the_pages_have_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason='make docs needs pdoc: pip install ".[docs]"')
    reference.build(tmp_path)
    pages = {
        module: (tmp_path / f"{module.replace('.', '/')}.html").read_text(encoding="utf-8")
        for module, _ in NAMES
    }
    missing = [pair for pair in DESCRIBED if f'id="{pair[1]}"' not in pages[pair[0]]]
    assert not missing
    first = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'href="bedouin/solvers.html"' in first and "Replace <code>Mamba(d_model)" in first
    figures = re.findall(r'<img src="([^"]+)"', first)
    assert figures and all((tmp_path / figure).is_file() for figure in figures)
    assert "Size:" in pages["bedouin"] and "<strong>d_state:</strong>" in pages["bedouin"]
