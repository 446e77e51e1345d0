"""Docstrings of the public names, the pages that `make docs` builds from them, and the names that
the README formats as code, which can be imported, called or given as arguments."""

import ast
import builtins
import inspect
import re
import sys
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from runpy import run_path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

import bedouin
from bedouin import Bedouin, FixedPointRNN, TrackingDeltaNet, baselines, solvers, testing

ROOT = Path(__file__).parents[1]


# docs/reference.py, whose folder is in no import path
reference = SimpleNamespace(**run_path(str(ROOT / "docs" / "reference.py")))
NAMES: list[tuple[str, str]] = reference.public_names()


FOUND = {(module, name): getattr(sys.modules[module], name) for module, name in NAMES}
# classes and functions: numbers and aliases of types have no docstrings
DESCRIBED = [pair for pair, v in FOUND.items() if inspect.isclass(v) or inspect.isroutine(v)]


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


README = (ROOT / "README.md").read_text(encoding="utf-8")
SPANS = sorted(set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))))
TARGETS = re.findall(
    r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
)


def objects() -> dict[str, Any]:
    """What the README speaks of: the exported names, a layer that has been called, its inputs."""
    modules = bedouin, solvers, testing, baselines
    exported = {name: getattr(of, name) for of in modules for name in of.__all__}
    layer, x = bedouin.Bedouin(8), torch.randn(1, 3, 8)
    layer(x)
    return {**exported, "layer": layer, "stats": layer.stats, "x": x, "sample": x}


OBJECTS = objects()
# read, since some adapters import packages that need not be installed
ADAPTERS = {
    node.name: {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    for path in (ROOT / "src" / "bedouin" / "integrations").rglob("*.py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.ClassDef)
}


def words_of(value: Any) -> set[str]:
    """The names of a value's attributes and parameters, and the texts that these may be."""
    found = {name for name in dir(value) if not name.startswith("_")}
    is_error = isinstance(value, type) and issubclass(value, Exception)  # without a signature
    if callable(value) and not is_error:
        parameters = inspect.signature(value).parameters
        found |= parameters.keys()
        kinds = (parameter.annotation for parameter in parameters.values())
        found |= {text for kind in kinds for text in get_args(kind) if isinstance(text, str)}
    return found


WORDS = {
    *OBJECTS,
    *ADAPTERS,
    *dir(builtins),
    *bedouin.Bedouin.fed_names,
    *bedouin.WYForm._fields,
    *dir(torch.func),
    *(word for value in OBJECTS.values() for word in words_of(value)),
    *(word for value in (torch.compile, bedouin.ChannelMixer.forward) for word in words_of(value)),
}


def exists(path: str) -> bool:
    """Whether a dotted name is one of a module or of an object."""
    first, _, rest = path.partition(".")
    if first in ADAPTERS:
        return rest in ADAPTERS[first]
    try:
        if first in OBJECTS:
            attrgetter(rest)(OBJECTS[first])
        else:
            resolve_name(path)
    except (AttributeError, ImportError):
        return False
    return True


def unknown(span: str) -> list[str]:
    """The parts of a span of code that name nothing."""
    if span.startswith("make "):
        return [] if span.removeprefix("make ") in TARGETS else [span]
    if span.endswith(".py"):
        return [] if {*ROOT.glob(span), *ROOT.glob(f"solvers/{span}")} else [span]
    paths = re.findall(r"\b[^\W\d]\w*(?:\.\w+)*", span)
    return [p for p in paths if not (exists(p) if "." in p else p in WORDS)]


@pytest.mark.parametrize("span", SPANS)
def test_a_name_formatted_as_code_exists(span: str) -> None:
    assert unknown(span) == []
