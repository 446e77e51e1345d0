"""Solvers, adjoints, caps, mixers and initializations as entries of a file of JSON, and back.

describe("solver", Picard(1e-4))  # {"type": "Picard", "rtol": 1e-4, ...}

A class of a user is saved by the name of its module, which is imported before a file is read.
"""

import inspect
from typing import Any, get_args

from bedouin.layers.mixers import ChannelMixer
from bedouin.layers.options import Initialization
from bedouin.solvers import Adjoint, Cap, Solver

Described = Adjoint | Cap | ChannelMixer | Initialization | Solver
"""What is described by its type and the arguments of its constructor, which are all attributes of
the same names."""


def describe(name: str, value: Any) -> Any:
    """An object as {"type": ..., and all options}, a tuple as a list; any other value as it is.

    A dict is checked and completed. Raises TypeError for a type that a file cannot name or an
    option that is no attribute, and what the type raises for its options.
    """
    value = restore(name, value)
    if not isinstance(value, Described):
        return list(value) if isinstance(value, tuple) else value
    kind, options = type(value), inspect.signature(type(value)).parameters
    if _types().get(_name(kind)) is not kind:
        raise TypeError(
            f"{name} must be one of {', '.join(_types())} to be saved, got {kind.__qualname__}: "
            f"define that class at the top level of a module, or set {name} of the layers once the "
            "model is made"
        )
    for option in options:
        if not hasattr(value, option):
            raise TypeError(
                f"{name} must have its options as attributes to be saved, got {kind.__qualname__} "
                f"without {option}: write self.{option} = {option} in its __init__"
            )
    found = {option: describe(f"{name}.{option}", getattr(value, option)) for option in options}
    return {"type": _name(kind), **found}


def restore(name: str, value: Any) -> Any:
    """The inverse of `describe`. Raises TypeError for a type that no imported module defines, and
    what the type raises."""
    if not isinstance(value, dict):
        return value
    options = {option: restore(f"{name}.{option}", v) for option, v in value.items()}
    kind, types = options.pop("type", None), _types()
    if not isinstance(kind, str) or kind not in types:
        raise TypeError(
            f"{name} must be an object or a dict whose 'type' is one of {', '.join(types)}, got "
            f"{value!r}: import the module of another class before its file is read"
        )
    return types[kind](**options)


def _types() -> dict[str, type]:
    """The classes that a file can name: those at the top level of the modules imported so far."""
    found, kinds = {}, list(get_args(Described))
    for kind in kinds:
        kinds += kind.__subclasses__()
        if not inspect.isabstract(kind) and "<locals>" not in kind.__qualname__:
            found[_name(kind)] = kind
    return found


def _name(kind: type) -> str:
    """The name of a class in a file: alone for this library's, else behind its module's."""
    own = kind.__module__.partition(".")[0] == "bedouin"
    return kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"
