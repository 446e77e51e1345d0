"""Checks of the arguments of a model's constructor."""

from collections.abc import Callable, Sequence

from torch import nn

from bedouin.checks import positive_int


def make_mixers(
    mixers: Sequence[nn.Module] | Callable[[int], nn.Module],
    num_layers: int | None,
    d_model: int,
) -> list[nn.Module]:
    """The mixers as a list. Raises TypeError or ValueError for invalid arguments, among them mixers
    with another d_model."""
    if isinstance(mixers, nn.Module) and not isinstance(mixers, nn.ModuleList):
        raise TypeError(
            f"mixers must be a sequence of modules or a function that makes one, got the module "
            f"{type(mixers).__name__}: wrap it in a list"
        )
    if isinstance(mixers, Sequence | nn.ModuleList):
        made = _check_listed(list(mixers), num_layers)
    elif callable(mixers):
        made = _call_for_each_layer(mixers, num_layers)
    else:
        raise TypeError(
            "mixers must be a sequence of modules or a function that makes one, got "
            f"{type(mixers).__name__}"
        )
    for mixer in made:
        if not isinstance(mixer, nn.Module):
            raise TypeError(f"mixers must be nn.Modules, got {type(mixer).__name__}")
        width = getattr(mixer, "d_model", d_model)
        if isinstance(width, int) and width != d_model:
            raise ValueError(
                f"mixers must have the model's d_model={d_model}, got "
                f"{type(mixer).__name__} with d_model={width}"
            )
    return made


def _check_listed(mixers: list[nn.Module], num_layers: int | None) -> list[nn.Module]:
    if not mixers:
        raise ValueError("mixers must contain at least one layer, got none")
    if num_layers is not None:
        raise ValueError(
            f"num_layers must be None if mixers is a sequence, got {num_layers} and {len(mixers)} "
            "mixers: leave it out"
        )
    return mixers


def _call_for_each_layer(
    make: Callable[[int], nn.Module], num_layers: int | None
) -> list[nn.Module]:
    if num_layers is None:
        raise ValueError("num_layers must be at least 1 if mixers is a function, got None")
    return [make(index) for index in range(positive_int("num_layers", num_layers))]


def check_tied(tied: bool, vocab_size: int, output_size: int) -> None:
    """Raise ValueError for a shared head whose classes are not the input ids."""
    if tied and vocab_size != output_size:
        raise ValueError(
            f"tie_embeddings needs output_size = vocab_size = {vocab_size}, got {output_size}"
        )
