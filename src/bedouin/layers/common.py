"""What layers share: marks for optimizers, saved options, initial values, noise, and the interface
of layers with an explicit recurrence.

Letters: b batch, t time, m d_model.
"""

import json
import math
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from bedouin.checks import check_batch_size, check_dtype, check_layer_input, positive_int
from bedouin.graphed import Graphed
from bedouin.kernels.checks import check_number
from bedouin.kernels.launch import accumulator
from bedouin.packing import Packing, find_packing
from bedouin.solvers.reporting import stacklevel
from bedouin.state import RecurrentState, SequenceCall, StateShapes, check_state, zero_state
from bedouin.wrapped import read_parameter

StateT = TypeVar("StateT", bound=RecurrentState)

# What to do about an option that has been removed.
REMOVED = (
    "version 0.2.0 of bedouin is the last one that has it: use TrackingDeltaNet, or commit 6d080c6 "
    "of the repository for a model that was saved with it"
)
TEXT_BLOCK = 512  # the text of a module's options is filled up with spaces to a multiple of this


def positive_number(name: str, value: float) -> float:
    """`value` as a float; TypeError or ValueError unless it is finite and > 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number > 0, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be finite and > 0, got {value!r}")
    return float(value)


def expanded(name: str, factor: float, base: str, size: int) -> int:
    """factor * size, rounded down; ValueError that names the option `name` if it is less than 1."""
    # the product of numbers such as 0.57 and 100 may be just below a whole number
    width = int(positive_number(name, factor) * size * (1 + 1e-9))
    if width < 1:
        raise ValueError(f"{name} * {base} must be at least 1, got {factor} * {size}")
    return width


def head_size(m: int, num_heads: int) -> int:
    """m / num_heads, for the d_model m; ValueError unless that is an integer."""
    if m % num_heads:
        raise ValueError(f"num_heads must divide d_model = {m}, got {num_heads}: choose a divisor")
    return m // num_heads


def at_least_float32(tensor: Tensor) -> Tensor:
    """`tensor`, of any shape, in the dtype of the solve, at least float32."""
    return tensor.to(accumulator(tensor.dtype))


def inverse_softplus(value: Tensor) -> Tensor:  # any shape -> as `value`
    """The x with softplus(x) = `value`, for positive values."""
    return value + torch.log(-torch.expm1(-value))


@torch.no_grad()
def reset_dt_bias(bias: Tensor) -> None:
    """Fill `bias` so that softplus(bias) is log-uniform in [1e-3, 0.1], as Mamba does."""
    low, high = math.log(1e-3), math.log(0.1)
    bias.copy_(inverse_softplus(torch.exp(torch.rand_like(bias) * (high - low) + low)))


# -- marks: the attributes `_no_weight_decay` and `_no_reinit` of parameters, which optimizers and
# initializers that follow Mamba read. Copies, `to_empty`, `load_state_dict(assign=True)` and
# sharding replace parameters by new ones without them. The functions below are methods of layers,
# which have `_mark_parameters` to set them again.


def mark(module: nn.Module, mark: str, *names: str) -> None:
    """Set "_no_weight_decay" or "_no_reinit" on the parameters of these names that exist."""
    # plain look-ups, because setting the first parameter of a layer calls this, too
    for name in names:
        if module._parameters.get(name) is not None:
            setattr(module._parameters[name], mark, True)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameters with and without weight decay, as the first argument of an optimizer.

        optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-3)

    Not decayed are parameters marked `_no_weight_decay` (A_log, omega and D of a layer), biases,
    and the parameters of norms: modules whose class is called ...Norm. Every parameter that
    requires a gradient is in one of the two groups once, also if modules share it. As for any
    optimizer, call it once the model is on its device and sharded, and before its first forward.

    Raises TypeError for a model that is not a module, ValueError for a weight_decay below 0.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    check_number("weight_decay", weight_decay, 0, 1e3, open_low=False)
    # one that is shared is exempt if it is so in one of its places
    exempt_ids = set()
    for module in model.modules():
        # by name, as norms are written anew in many libraries; FSDP and parametrizations derive
        # classes with a name in front of, or behind, that of the base
        is_norm = any(kind.__name__.endswith("Norm") for kind in type(module).__mro__)
        for name, v in module.named_parameters(recurse=False, remove_duplicate=False):
            is_bias = name.startswith("bias") or name.endswith("bias")
            if is_bias or is_norm or getattr(v, "_no_weight_decay", False):
                exempt_ids.add(id(v))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    exempt = [parameter for parameter in trained if id(parameter) in exempt_ids]
    decayed = [parameter for parameter in trained if id(parameter) not in exempt_ids]
    return [
        {"params": decayed, "weight_decay": float(weight_decay)},
        {"params": exempt, "weight_decay": 0.0},
    ]


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """nn.Module's __setattr__; AttributeError for an option that only the constructor reads."""
    layer: Any = module
    if name in vars(layer).get("_options", ()) and name not in layer.settable_options:
        owner = type(layer).__name__
        raise AttributeError(
            f"{name} of a {owner} is read by its constructor alone, got {value!r:.80}: make a "
            f"new layer, {owner}(..., {name}=...), and load the parameters that fit; these may "
            f"be set: {', '.join(layer.settable_options) or 'none'}"
        )
    nn.Module.__setattr__(module, name, value)
    if isinstance(value, nn.Parameter) and hasattr(layer, "_mark_parameters"):
        layer._mark_parameters()


def set_state(module: Any, state: dict[str, Any]) -> None:
    """nn.Module's __setstate__."""
    nn.Module.__setstate__(module, state)
    module._mark_parameters()


def apply_to_parameters(module: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """nn.Module's _apply."""
    nn.Module._apply(module, fn, recurse)
    module._mark_parameters()
    return module


# -- saved options: those on which the numbers of a module depend but the shapes of its parameters
# do not. Loading the parameters of a module with other options would be silent otherwise.


def number_options(module: Any) -> dict[str, Any]:
    """The attributes in `saved_options`, whose values JSON can hold."""
    return {name: getattr(module, name) for name in module.saved_options}


def save_options(module: Any) -> Tensor:  # (1 + a multiple of TEXT_BLOCK,) int64
    """The extra state: the number of training calls, and the options as characters of a JSON text.
    It is a tensor because safetensors holds nothing else, and of a size that differs between few
    layers because torch.distributed.checkpoint loads one only into its own size. All dtypes to
    which a tool may convert it represent the characters exactly."""
    text = json.dumps(module.number_options(), separators=(",", ":"))
    text += " " * (-len(text) % TEXT_BLOCK)
    # on the CPU also where a context makes tensors on another device
    return torch.tensor([module.num_calls, *text.encode("ascii")], device="cpu")


def load_options(module: Any, state: Tensor) -> None:  # as of save_options, or (), the calls alone
    """Take the number of calls, and issue a UserWarning that names the options in which the module
    that was saved and this one differ. Versions up to 0.2 saved no options."""
    num_calls, *text = state.flatten().tolist()
    module.num_calls = int(num_calls)
    if not text:
        return
    owner, present = type_name(module), json.loads(json.dumps(module.number_options()))
    try:
        saved = json.loads(bytes(map(round, text)))
    except ValueError:  # such as an average of different options
        message = (
            f"the options with which the parameters of this {owner} were saved cannot be read from "
            "its extra state: make sure that they are its own"
        )
    else:
        # an option that one of them does not know is none of another version
        names = [name for name in present if saved.get(name, present[name]) != present[name]]
        if not names:
            return
        was, now = (", ".join(f"{name}={of[name]!r}" for name in names) for of in (saved, present))
        message = (
            f"the parameters of this {owner} were saved with {was}, but it has {now}, so that its "
            "outputs may differ from those of what was saved: make it with the saved options"
        )
    warnings.warn(message, stacklevel=stacklevel(sys._getframe()))


def load_parameters(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any, **named: Any
) -> None:
    """nn.Module's _load_from_state_dict, but a missing extra state is no error, and leaves the
    number of calls as it is: tools that save parameters alone, as averages of weights, lack it."""
    nn.Module._load_from_state_dict(module, state_dict, prefix, *others, **named)
    key, missing_keys = f"{prefix}_extra_state", others[2]
    if key in missing_keys:
        missing_keys.remove(key)


def type_name(module: nn.Module) -> str:
    """The name of the first class that is not torch's or `abc`'s, which FSDP and others derive."""
    kinds = type(module).__mro__
    derived = "torch", "abc"
    return next(k.__name__ for k in kinds if k.__module__.partition(".")[0] not in derived)


class _OfThread(threading.local):  # whether `feedback_noise` is off
    def __init__(self) -> None:
        # not of the class: guards of torch.compile expect it among the attributes of the object
        self.is_off = False


_of_thread = _OfThread()


@contextmanager
def without_noise() -> Iterator[None]:
    """Calls inside, single tokens and the prompt of a generation, compute without noise."""
    before = _of_thread.is_off
    _of_thread.is_off = True
    try:
        yield
    finally:
        _of_thread.is_off = before


def draws_noise(layer: Any) -> bool:
    """Whether this call of a layer with `feedback_noise` draws it."""
    return bool(layer.training and layer.feedback_noise and not _of_thread.is_off)


class RecurrentLayer(nn.Module, ABC, Generic[StateT]):
    """A mixing layer (b, t, m) -> (b, t, m) with a recurrent state, no solver and no statistics. A
    subclass names the type of its state, the sizes of its tensors, and computes outputs and the
    state after the last token. One with `saved_options` has an extra state."""

    settable_options: ClassVar[tuple[str, ...]] = ("backend", "layer_idx")  # may be set later, too
    saved_options: ClassVar[tuple[str, ...]] = ()  # attributes in the extra state
    num_calls = 0  # explicit layers do not count their calls
    state_type: ClassVar[type[RecurrentState]]
    captures_step: ClassVar[bool] = False  # whether a `Decoder` captures `step` as a CUDA graph
    none_for_zeros: ClassVar[tuple[str, ...]] = ()
    """The tensors of a state in whose place `_run` takes None for zeros, before the first token."""
    shown_options: ClassVar[tuple[str, ...]] = ()  # attributes in its text, after d_model
    out_proj: nn.Linear  # the last module, whose weight has the layer's dtype and device

    __setattr__, __setstate__, _apply = set_attribute, set_state, apply_to_parameters
    _load_from_state_dict, number_options = load_parameters, number_options

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.saved_options:
            # nn.Module asks the class whether it has an extra state
            cls.get_extra_state, cls.set_extra_state = save_options, load_options  # type: ignore[method-assign,assignment]

    def __init__(self, d_model: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        check_dtype(dtype)
        self.d_model = positive_int("d_model", d_model)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for module in self.children():
            cast(Any, module).reset_parameters()

    def _mark_parameters(self) -> None:
        """Call `mark` for the parameters that have marks."""

    def extra_repr(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.shown_options)
        return ", ".join([str(self.d_model), *shown])

    @abstractmethod
    def _state_sizes(self) -> StateShapes:
        """The sizes of the state's tensors, in the order of its fields."""

    @abstractmethod
    def _run(
        self, x: Tensor, state: StateT, lengths: Tensor | None
    ) -> tuple[Tensor, StateT]:  # (b, t, m), neither empty, (b,) -> (b, t, m)
        """The outputs, finite in padding, and the state after the last token, whose tensors
        autograd may have saved. lengths: the tokens of each sample before padding (x = 0)."""

    def forward(
        self,
        x: Tensor,  # (b, t, m)
        state: StateT | None = None,
        return_state: bool = False,
        *,
        mask: Tensor | None = None,  # (b, t)
        cu_seqlens: Tensor | None = None,  # (documents + 1,)
        seq_idx: Tensor | None = None,  # (b, t)
    ) -> Any:
        """(b, t, m) -> (b, t, m), or with `return_state` the pair (output, state). Chunks, states,
        mask, cu_seqlens, seq_idx and errors are as in `Bedouin`."""
        self.check_input(x, 3)
        return self._call(x, state, return_state, find_packing(x, mask, cu_seqlens, seq_idx))

    def _call(self, x: Tensor, state: StateT | None, return_state: bool, packing: Packing) -> Any:
        """`forward` with checked inputs."""
        rows, is_packed = packing.num_states, packing.lengths is not None
        if state is not None:
            before = self.checked_state(state, rows)
        else:
            before = self._zeros(rows, () if is_packed or not x.numel() else self.none_for_zeros)
        if is_packed:
            before = packing.before(before, self.init_state(1))
        u = packing.take(x)
        # padding follows the tokens, so that it changes only the state
        lengths = packing.padded_lengths() if return_state else None
        if u.numel():
            output, after = self._run_loaded(u, before, lengths)
        else:
            # a graph to every parameter, since data-parallel training waits for gradients of them
            # all: a token is run, and none of its outputs is taken
            token = u.new_zeros(1, 1, u.shape[-1])
            output, _ = self._run_loaded(token, self.init_state(1), None)
            output = u[..., : self.d_model].to(output.dtype) + output.flatten()[:0].sum()
            after = before.clone()
        output = packing.put(output, x.shape)
        if not return_state:
            return output
        # copies of what autograd may have saved, since a state may be written in place
        after = packing.after(after)._each(lambda v: v.clone() if v.requires_grad else v)
        return output, after

    if TYPE_CHECKING:
        __call__: SequenceCall[StateT]  # torch's is a Callable[..., Any]

    def step(self, x_t: Tensor, state: StateT) -> tuple[Tensor, StateT]:  # (b, m) -> (b, m)
        """One token. Raises as `forward` does."""
        self.check_input(x_t, 2)
        return self._step(x_t, state)

    def _step(self, x_t: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """`step` with a checked input (b, input_size)."""
        if state is None:
            raise TypeError("state must not be None: make one with init_state(batch_size)")
        with without_noise():
            packing = Packing((x_t.shape[0], 1))
            output, after = self._call(x_t.unsqueeze(1), state, True, packing)
        return output.squeeze(1), after

    def init_state(self, batch_size: int) -> StateT:
        """The state before any token: zeros on the layer's device."""
        check_batch_size(batch_size)
        return self._zeros(batch_size, ())

    def _zeros(self, b: int, missing: tuple[str, ...]) -> StateT:
        kind = cast(type[StateT], self.state_type)
        return zero_state(kind, self._state_sizes(), b, self._like, missing)

    def graphed(self, sample: Tensor) -> Graphed:  # sample: (b, t, m)
        """As `Bedouin.graphed`."""
        return Graphed(self, sample)

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the state: at least float32."""
        return accumulator(self._weight.dtype)

    @property
    def _weight(self) -> Tensor:
        """A parameter with the layer's dtype and device."""
        return read_parameter(self.out_proj, "weight")

    @property
    def _like(self) -> Tensor:  # (0,), with the dtype and device of the state
        return torch.empty(0, dtype=self.state_dtype, device=self._weight.device)

    def _run_loaded(
        self, x: Tensor, state: StateT, lengths: Tensor | None
    ) -> tuple[Tensor, StateT]:  # (b, t, m), (b,) -> (b, t, m)
        """`_run` with the parameters of the layer and its parts, also where accelerate offloads."""
        layers = [v for v in (self, *self.children()) if isinstance(v, RecurrentLayer)]
        hooked = [(v, vars(v)["_hf_hook"]) for v in layers if "_hf_hook" in vars(v)]
        for layer, hook in hooked:
            hook.pre_forward(layer)
        found = self._run(x, state, lengths)
        for layer, hook in hooked:
            hook.post_forward(layer, ())
        return found

    def check_input(self, x: Tensor, rank: int) -> None:
        """Raise unless x is (b, t, m) for rank 3 or (b, m) for rank 2, in the layer's dtype."""
        check_layer_input(x, rank, self.d_model, self._weight)

    def checked_state(self, state: Any, b: int) -> StateT:
        """`state` with a batch axis, at least in `state_dtype`; an error where it does not fit."""
        kind = cast(type[StateT], self.state_type)
        return check_state(state, kind, self._state_sizes(), b, self._like)
