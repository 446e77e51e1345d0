"""`Convolved`: a mixing layer after a short causal convolution.

Letters: b batch, t time, m d_model, w width of the convolution; l sequences in a call with padding
or documents (bedouin.packing).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.checks import (
    check_batch_size,
    check_bool,
    check_dtype,
    check_layer_input,
    check_takes_mask,
    check_tensor,
    find_method,
    known_options,
    output_tensor,
    positive_int,
)
from bedouin.graphed import Graphed
from bedouin.kernels.launch import accumulator
from bedouin.packing import Packing, find_packing
from bedouin.short_convolution import ShortConvolution
from bedouin.solvers.solve import SolveOptions
from bedouin.state import BedouinState, Join, RecurrentState, SequenceCall, check_field, check_kind
from bedouin.wrapped import is_untouched, read_parameter


class _ConvolvedFields(NamedTuple):
    conv: Tensor
    inner: Any  # NamedTuple of the inner layer


class ConvolvedState(RecurrentState, _ConvolvedFields):
    """The recurrent state of a `Convolved` layer between two tokens.

    conv: (b, w - 1, m), the last inputs of the convolution, at least float32; inner: the state of
    the layer behind it, such as a BedouinState. `tensors` has conv and then those of `inner`.
    """

    __slots__ = ()
    axes = (2,)

    def to(self, *args: Any, **options: Any) -> Self:
        return self._of((self.conv.to(*args, **options), self.inner.to(*args, **options)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.conv, *self.inner.tensors

    @classmethod
    def _join_fields(cls, states: Sequence[Self], batched: bool, join: Join) -> Self:
        inner = [state.inner for state in states]
        joined = type(inner[0])._joined(inner, batched, join)
        return cls._of((join([state.conv for state in states]), joined))

    def _each(self, convert: Callable[[Tensor], Tensor]) -> Self:
        return self._of((convert(self.conv), self.inner._each(convert)))


class StateParts(NamedTuple):
    """The tensors of a layer's state with at most one convolution, which other libraries' caches
    keep one by one."""

    ssm: Tensor  # (b, d, n)
    y: Tensor  # (b, d)
    window: Tensor | None  # (b, w - 1, channels convolved)

    @staticmethod
    def of(state: BedouinState | ConvolvedState) -> "StateParts":
        """The window is that of the convolution before the layer, or of the one inside of it."""
        if isinstance(state, ConvolvedState):
            return StateParts(state.inner.ssm, state.inner.y, state.conv)
        return StateParts(state.ssm, state.y, state.conv)

    def state(self, *, before: bool) -> BedouinState | ConvolvedState:
        """The state; `before`: whether the convolution is before the layer."""
        if before and self.window is not None:
            return ConvolvedState(self.window, BedouinState(self.ssm, self.y))
        return BedouinState(*self)

    def where(
        self,
        mask: Tensor,  # (b,) or (b, 1) bool
        other: "StateParts",
    ) -> "StateParts":
        """These parts where the mask is True, elsewhere those of `other`."""

        def choose(ours: Tensor, theirs: Tensor) -> Tensor:
            return torch.where(mask.view(-1, *(1,) * (ours.dim() - 1)), ours, theirs)

        window = self.window
        if window is not None and other.window is not None:
            window = choose(window, other.window)
        return StateParts(choose(self.ssm, other.ssm), choose(self.y, other.y), window)


def layer_with_convolution(
    make: Callable[..., nn.Module], options: dict[str, Any], d_conv: int | None, bias: bool
) -> nn.Module:
    """`make(**options)` with a short convolution of width `d_conv`; None: without one.

    A layer with projection="input" gets the option d_conv, another one is put into `Convolved`, to
    which alone `bias` applies.
    """
    if d_conv is None:
        return make(**options)
    if options.get("projection") == "input":
        return make(d_conv=d_conv, **options)
    return Convolved(make(**options), d_conv, bias=bias)


class Convolved(nn.Module):
    """A mixing layer on SiLU of a short causal convolution of its input, (b, t, m) -> (b, t, m).

        layer = Convolved(Bedouin(64), d_conv=4)

    Each channel is convolved by itself over the last d_conv tokens, as Mamba (arXiv 2312.00752) and
    most of its successors do before their recurrence:

        output = layer(SiLU(conv(x))),   conv(x)_t = bias + sum_i weight[:, i] * x_{t - w + 1 + i}

    Calls, states, padding and documents are those of the layer; the convolution begins anew where a
    document does, and skips padding. The state is a `ConvolvedState`. Options of the layer are set
    on `layer`: convolved.layer.solver = Jacobi().

    Args:
        layer: a Bedouin, a FixedPointRNN, a baseline or another causal mixing layer with an
            attribute d_model. States need its `init_state` and `step`, padding an argument `mask`.
        d_conv: w, the number of tokens that an output of the convolution depends on.
        bias: whether the convolution has a bias.
        device, dtype: of the convolution; None: those of the layer's parameters.

    Raises TypeError for a layer that is no module or has no d_model, such as `Bidirectional`, and
    for options of the wrong type, ValueError for d_conv < 1.
    """

    @known_options
    def __init__(
        self,
        layer: nn.Module,
        d_conv: int = 4,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer must be a module, got {type(layer).__name__}")
        d_model = getattr(layer, "d_model", None)
        if not isinstance(d_model, int):
            raise TypeError(
                "layer must be a causal mixing layer with an int d_model, such as bedouin.Bedouin, "
                f"got {type(layer).__name__}: put Convolved around the layers inside of it"
            )
        positive_int("d_conv", d_conv)
        check_bool("bias", bias)
        check_dtype(dtype)
        like = next((p for p in layer.parameters() if p.is_floating_point()), None)
        if like is not None:
            device = like.device if device is None else device
            dtype = like.dtype if dtype is None else dtype
        self.d_model = d_model
        self.conv = ShortConvolution(d_model, d_conv, bias=bias, device=device, dtype=dtype)
        self.layer: Any = layer

    def reset_parameters(self) -> None:
        """Draw all parameters anew. Raises TypeError if the layer cannot."""
        find_method(self.layer, "reset_parameters")()
        self.conv.reset_parameters()

    @property
    def stats(self) -> Any:
        """The `stats` of the layer's last call, such as SolveStats; None if it has none."""
        return getattr(self.layer, "stats", None)

    @property
    def layer_idx(self) -> int | None:
        """That of the layer; None if it has none."""
        return getattr(self.layer, "layer_idx", None)

    @property
    def solve_options(self) -> SolveOptions:
        """Those of the layer; AttributeError if it is not defined by a fixed point."""
        found: SolveOptions = self.layer.solve_options
        return found

    @solve_options.setter
    def solve_options(self, options: SolveOptions) -> None:
        self.layer.solve_options = options

    def forward(
        self,
        x: Tensor,  # (b, t, m)
        state: ConvolvedState | None = None,
        return_state: bool = False,
        *,
        mask: Tensor | None = None,  # (b, t)
        cu_seqlens: Tensor | None = None,  # (documents + 1,)
        seq_idx: Tensor | None = None,  # (b, t)
        one_token: bool = False,
    ) -> Any:
        """(b, t, m) -> (b, t, m), or with `return_state` the pair (output, ConvolvedState).

        A sequence in chunks, each with the state after the previous one, gives the same output as a
        single call, up to rounding. mask, cu_seqlens and seq_idx say which tokens of x are padding,
        or where documents begin, as in `Bedouin`; the layer is called with a mask for them. With
        one_token the call is a `step` of a layer with hooks, which torch runs in calls alone.

        Raises TypeError for integer or foreign dtypes and for what the layer does not take,
        ValueError for wrong shapes, devices and states, and the errors of the layer.
        """
        if one_token:
            given: Any = state  # None is refused
            return self._one_token(x, given)
        self.check_input(x, rank=3)
        packing = find_packing(x, mask, cu_seqlens, seq_idx)
        before = self._incoming(state, x, packing)
        options: dict[str, Any] = {}
        if before is not None:
            options["state"] = before.inner
        if return_state:
            find_method(self.layer, "init_state")
            options["return_state"] = True
        if packing is None:
            u, lengths = x, None
        else:
            check_takes_mask(self.layer)
            options["mask"] = packing.real
            # padding follows the tokens, so that it changes only the window after them
            u, lengths = packing.take(x), packing.lengths if return_state else None
        window = self.init_window(u.shape[0]) if before is None else before.conv
        convolved, window = self.convolve(u, window, lengths)
        found = self.layer(convolved, **options)
        output = output_tensor(found)
        if packing is not None:
            output = packing.put(output, x.shape)
        if not return_state:
            return output
        after = ConvolvedState(window, found[1])
        return output, after if packing is None else packing.after(after)

    if TYPE_CHECKING:
        __call__: SequenceCall[ConvolvedState]  # torch's is a Callable[..., Any]

    def step(
        self,
        x_t: Tensor,  # (b, m)
        state: ConvolvedState,
    ) -> tuple[Tensor, ConvolvedState]:  # (b, m)
        """One token, by the `step` of the layer. Raises as `forward` does.

        A `Decoder` takes fewer launches on a GPU: its CUDA graph contains the convolution.
        """
        if is_untouched(self):
            return self._one_token(x_t, state)
        # hooks run in calls alone
        output, after = self(x_t, state, one_token=True)
        return output, after

    def _one_token(
        self,
        x_t: Tensor,  # (b, m)
        state: ConvolvedState,
    ) -> tuple[Tensor, ConvolvedState]:  # (b, m)
        self.check_input(x_t, rank=2)
        step = find_method(self.layer, "step")
        if state is None:
            raise TypeError("state must not be None: make one with init_state(batch_size)")
        before = self.checked_state(state, x_t.shape[0])
        convolved, window = self.convolve(x_t.unsqueeze(1), before.conv)
        output, inner = step(convolved.squeeze(1), before.inner)
        return output, ConvolvedState(window, inner)

    def init_state(self, batch_size: int) -> ConvolvedState:
        """The state before the first token: a window of zeros, and the layer's own."""
        check_batch_size(batch_size)
        inner = find_method(self.layer, "init_state")(batch_size)
        if not isinstance(inner, RecurrentState):
            raise TypeError(
                "layer must have states that can be joined, such as BedouinState, got "
                f"{type(inner).__name__} from {type(self.layer).__name__}: call it without states"
            )
        return ConvolvedState(self.init_window(batch_size), inner)

    def graphed(self, sample: Tensor) -> Graphed:  # sample: (b, t, m)
        """`Bedouin.graphed` of convolution and layer together, with the same errors; TypeError for
        a layer that is not defined by a fixed point."""
        find_method(self.layer, "graphed")
        return Graphed(self, sample)

    def convolve(
        self,
        x: Tensor,  # (b, t, m)
        window: Tensor,  # (b, w - 1, m)
        lengths: Tensor | None = None,  # (b,)
    ) -> tuple[Tensor, Tensor]:  # (b, t, m), (b, w - 1, m)
        """SiLU(conv(x)), and the window after the last token; lengths as in `ShortConvolution`."""
        if not x.numel():
            return x, window
        y, window = self.conv(x, window, lengths)
        return F.silu(y), window

    def init_window(self, batch_size: int) -> Tensor:
        """The window before the first token (b, w - 1, m): zeros in at least float32."""
        return self._like.new_zeros(batch_size, *self.conv.window_size)

    def check_input(self, x: Tensor, rank: int) -> None:
        """Raise unless x has shape (b, t, m) for rank 3 or (b, m) for rank 2, and a valid dtype."""
        check_layer_input(x, rank, self.d_model, read_parameter(self.conv, "weight"))

    def checked_state(self, state: Any, b: int) -> ConvolvedState:
        """`state` with a batch axis; TypeError or ValueError unless it is one of b samples. The
        layer checks `state.inner`, unless `state` is of a single sample."""
        check_kind(state, ConvolvedState)
        check_tensor("state.conv", state.conv, "(b, w - 1, m)")
        if state.conv.dim() == 2:
            state = state.stack([state])
        check_field("state.conv", state.conv, (b, *self.conv.window_size), self._like)
        checked: ConvolvedState = state
        return checked

    @property
    def _like(self) -> Tensor:
        """An empty tensor with the dtype and device of the window."""
        weight = read_parameter(self.conv, "weight")
        # no method of the weight makes it, since that of a sharded one makes shards
        return torch.empty(0, dtype=accumulator(weight.dtype), device=weight.device)

    def _incoming(
        self,
        state: ConvolvedState | None,
        x: Tensor,  # (b, t, m)
        packing: Packing | None,
    ) -> ConvolvedState | None:
        """The states before the first token of each sequence; None: those of `init_state`."""
        if state is None:
            return None
        if packing is None:
            return self.checked_state(state, x.shape[0])
        return packing.before(self.checked_state(state, packing.num_states), self.init_state(1))

    def extra_repr(self) -> str:
        return f"{self.d_model}, d_conv={self.conv.width}"
