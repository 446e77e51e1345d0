"""The option of a layer's convolution under the names of other libraries."""

from collections.abc import Mapping
from typing import Any

from bedouin.parameters import convolved_error


def convolution_options(name: str, width: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The option d_conv of a layer with these other options, from the one called `name`.

    Raises ValueError for a width unless projection is "input": with "inner", a convolution was
    `Convolved` around the layer up to version 0.1.0.
    """
    projection = options.get("projection", "inner")
    if width is not None and projection == "inner":
        expected = f'{name} needs projection="input"'
        raise convolved_error(expected, f"{name}={width!r} and projection={projection!r}")
    return {"d_conv": width}
