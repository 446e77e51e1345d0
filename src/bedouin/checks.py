"""Checks of arguments; a message has the argument's name, what is expected and what was given.

Letters: b batch, t time, m d_model.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bedouin.kernels.backend import autocast_dtype
from bedouin.kernels.checks import check_count as check_count
from bedouin.kernels.checks import check_number as check_number
from bedouin.kernels.checks import known_options as known_options
from bedouin.kernels.checks import one_of as one_of
from bedouin.kernels.checks import positive_int as positive_int

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a bool; strings and numbers have truth values, too."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_dtype(dtype: object) -> None:
    """Raise TypeError unless `dtype` is None or one of `DTYPES`, which parameters may have."""
    if dtype is not None and dtype not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        raise TypeError(f"dtype must be None or one of {names}, got {dtype!r}")


def check_layer_idx(value: object) -> int | None:
    """`value`; TypeError unless it is None or an int."""
    if isinstance(value, bool) or not isinstance(value, int | None):
        raise TypeError(f"layer_idx must be None or an int, got {value!r}")
    return value


def check_batch_size(value: object) -> None:
    """Raise ValueError unless `value` is an int, or a symbolic one, of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < 0:
        raise ValueError(f"batch_size must be an int >= 0, got {value!r}")


def check_tensor(name: str, value: object, shape: str) -> None:
    """Raise TypeError unless `value` is a dense tensor; `shape` is for the message."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_nested:
            return
        kind, remedy = "sparse", f"use {name}.to_dense()"
        if value.is_nested:
            kind = "nested"
            remedy = "pad it with torch.nested.to_padded_tensor and give mask, or join its parts "
            remedy += "and give cu_seqlens"
        raise TypeError(
            f"{name} must be a dense tensor {shape}, got a {kind} tensor of layout {value.layout}: "
            f"{remedy}"
        )
    if isinstance(value, PackedSequence):
        remedy = ": pad it with torch.nn.utils.rnn.pad_packed_sequence(..., batch_first=True)"
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        remedy = ": join its tensors with torch.stack, or sequences of different lengths with "
        remedy += "torch.nn.utils.rnn.pad_sequence(..., batch_first=True)"
    else:
        remedy = "" if value is None else ": convert it with torch.as_tensor"
    raise TypeError(f"{name} must be a tensor {shape}, got {type(value).__name__}{remedy}")


def check_layer_input(x: Tensor, rank: int, d_model: int, weight: Tensor) -> None:
    """Raise TypeError or ValueError unless x (b, t, m) or, of rank 2, (b, m) fits the layer."""
    shape = "(b, t, m)" if rank == 3 else "(b, m)"
    check_tensor("x", x, shape)
    if hasattr(weight, "full_tensor") and not hasattr(x, "full_tensor"):
        raise ValueError(
            "the layer's parameters must be gathered before it computes, got shards: FSDP gathers "
            "them in calls of the module it was applied to, and in other methods after "
            "torch.distributed.fsdp.register_fsdp_forward_method(module, 'step')"
        )
    if x.dim() != rank or x.shape[-1] != d_model:
        raise ValueError(
            f"x must have shape {shape} with m = d_model = {d_model}, got {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"x must have a floating dtype, got {x.dtype}: embed tokens first")
    if x.device != weight.device:
        raise ValueError(f"x must be on the layer's device {weight.device}, got {x.device}")
    if x.dtype != weight.dtype and not (autocast_dtype(x) and autocast_dtype(weight)):
        wide = torch.float64 in (x.dtype, weight.dtype)
        remedy = " (torch.autocast casts no float64)" if wide else ", or use torch.autocast"
        raise TypeError(
            f"x must have the layer's dtype {weight.dtype}, got {x.dtype}: convert one of "
            f"them{remedy}"
        )


def check_takes_mask(mixer: nn.Module) -> None:
    """Raise TypeError for a layer whose `forward` has no argument `mask`."""
    # others may replace `forward` on the object; a graph that depends on the memory is recompiled
    if "forward" in vars(mixer) or torch.compiler.is_compiling():
        takes = _has_mask.__wrapped__(mixer.forward)
    else:
        takes = _has_mask(type(mixer).forward)
    if not takes:
        raise TypeError(
            f"mixer {type(mixer).__name__} takes no mask, which padding and documents need: use a "
            "layer that does, such as bedouin.Bedouin, or one document a row of the same length"
        )


@functools.cache
def _has_mask(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return "mask" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def find_method(mixer: object, name: str) -> Callable[..., Any]:
    """The method of a mixing layer. Raises TypeError if it has none of this name."""
    method: Callable[..., Any] | None = getattr(mixer, name, None)
    if method is None or not callable(method):
        raise TypeError(
            f"mixer {type(mixer).__name__} has no {name}(), which this needs: use a layer that "
            "has it, such as bedouin.Bedouin, merge an adapter around the whole layer, or call it "
            "on whole sequences without states"
        )
    return method
