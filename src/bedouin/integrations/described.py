"""Solvers, adjoints, caps, mixers and initializations as entries of a file of JSON, and back.

describe("solver", Picard(1e-4))  # {"type": "Picard", "rtol": 1e-4, ...}
"""

import inspect
from typing import Any

from bedouin import solvers
from bedouin.layers import mixers, options
from bedouin.layers.mixers import ChannelMixer
from bedouin.layers.options import Initialization
from bedouin.solvers import Adjoint, Cap, Solver

Described = Adjoint | Cap | ChannelMixer | Initialization | Solver
"""What is described by the name of its type and the arguments of its constructor, which are all
attributes of the same names."""

_TYPES: dict[str, type] = {
    name: kind
    for module in (mixers, options, solvers)
    for name, kind in vars(module).items()
    if inspect.isclass(kind) and issubclass(kind, Described) and not inspect.isabstract(kind)
}


def describe(name: str, value: Any) -> Any:
    """An object as {"type": ..., and all options}, a tuple as a list; any other value as it is.

    A dict is checked, and completed by the options that it leaves out. Raises TypeError for a type
    that is not one of this library's, and what the type raises for its options.
    """
    value = restore(name, value)
    if not isinstance(value, Described):
        return list(value) if isinstance(value, tuple) else value
    kind = type(value)
    # exactly: a subclass of another library could not be found by its name
    if _TYPES.get(kind.__name__) is not kind:
        raise TypeError(
            f"{name} must be one of {', '.join(_TYPES)} to be saved, got {kind.__qualname__}: set "
            f"{name} of the layers once the model is made"
        )
    names = inspect.signature(kind).parameters
    found = {option: describe(f"{name}.{option}", getattr(value, option)) for option in names}
    return {"type": kind.__name__, **found}


def restore(name: str, value: Any) -> Any:
    """The inverse of `describe`, for which options that a dict leaves out have their defaults.

    Raises as `describe`.
    """
    if not isinstance(value, dict):
        return value
    given = {option: restore(f"{name}.{option}", v) for option, v in value.items()}
    kind = given.pop("type", None)
    if not isinstance(kind, str) or kind not in _TYPES:
        raise TypeError(
            f"{name} must be an object or a dict whose 'type' is one of {', '.join(_TYPES)}, got "
            f"{value!r}"
        )
    return _TYPES[kind](**given)
