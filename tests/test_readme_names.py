"""The names that the README formats as code can be imported, called or given as arguments."""

import ast
import builtins
import inspect
import re
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args

import pytest
import torch

import bedouin
from bedouin import baselines, solvers, testing

ROOT = Path(__file__).parents[1]
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
