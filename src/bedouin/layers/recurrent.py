"""The interface of layers with an explicit recurrence, that of `Bedouin`.

Letters: b batch, t time, m d_model.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from bedouin.checks import (
    check_batch_size,
    check_dtype,
    check_layer_input,
    check_tensor,
    positive_int,
)
from bedouin.graphed import Graphed
from bedouin.layers.options import expanded, head_size
from bedouin.noise import without_noise
from bedouin.packing import Packing, find_packing
from bedouin.parameters import MarkedModule
from bedouin.short_convolution import ShortConvolution
from bedouin.state import RecurrentState, SequenceCall, check_field, check_kind
from bedouin.wrapped import read_parameter

StateT = TypeVar("StateT", bound=RecurrentState)

StateShapes = dict[str, tuple[int | None, ...]]
"""The shape of each tensor of a state without its batch axis; None: any length."""


class RecurrentLayer(MarkedModule, ABC, Generic[StateT]):
    """A mixing layer (b, t, m) -> (b, t, m) with a recurrent state.

    A subclass names the type of its state, the sizes of the state's tensors, and computes outputs
    and the state after the last token.
    """

    state_type: ClassVar[type[RecurrentState]]

    captures_step: ClassVar[bool] = False
    """Whether a `Decoder` captures `step` as a CUDA graph."""

    none_for_zeros: ClassVar[tuple[str, ...]] = ()
    """The tensors of a state in whose place `_run` takes None for zeros, before the first token."""

    out_proj: nn.Linear
    """The last module of every layer; its weight has the layer's dtype and device."""

    def __init__(self, d_model: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        check_dtype(dtype)
        self.d_model = positive_int("d_model", d_model)

    @abstractmethod
    def reset_parameters(self) -> None:
        """Draw all parameters anew."""

    @abstractmethod
    def _state_sizes(self) -> StateShapes:
        """The sizes of the state's tensors, in the order of its fields."""

    @abstractmethod
    def _run(
        self,
        x: Tensor,  # (b, t, m), neither empty
        state: StateT,
        lengths: Tensor | None,  # (b,)
    ) -> tuple[Tensor, StateT]:  # (b, t, m)
        """The outputs and the state after the last token, whose tensors autograd may have saved.

        lengths: the tokens of each sample, which padding with x = 0 follows; None: t. The outputs
        of padding may be anything finite.
        """

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
        """(b, t, m) -> (b, t, m), or with `return_state` the pair (output, state).

        A sequence fed in chunks, each with the state of the last, gives what one call gives, up to
        rounding. mask, cu_seqlens and seq_idx say which tokens of x are padding, or where documents
        begin, and a state of a lower floating dtype is converted, as in `Bedouin`. Raises TypeError
        for integer or foreign dtypes, ValueError for wrong shapes, devices and states.
        """
        self.check_input(x, 3)
        return self._call(x, state, return_state, find_packing(x, mask, cu_seqlens, seq_idx))

    def _call(
        self,
        x: Tensor,  # (b, t, input_size)
        state: StateT | None,
        return_state: bool,
        packing: Packing | None,
    ) -> Any:
        """`forward` with checked inputs."""
        new_state: StateT | None
        if packing is None:
            output, new_state = self._checked_run(x, state)
        else:
            output, new_state = self._packed_run(x, state, packing, return_state)
        if not return_state:
            return output
        return output, None if new_state is None else owned(new_state)

    if TYPE_CHECKING:
        __call__: SequenceCall[StateT]  # torch's is a Callable[..., Any]

    def step(
        self,
        x_t: Tensor,  # (b, m)
        state: StateT,
    ) -> tuple[Tensor, StateT]:  # (b, m)
        """One token. Raises as `forward` does."""
        self.check_input(x_t, 2)
        return self._step(x_t, state)

    def _step(
        self,
        x_t: Tensor,  # (b, input_size)
        state: StateT,
    ) -> tuple[Tensor, StateT]:  # (b, m)
        """`step` with a checked input."""
        if state is None:
            raise TypeError("state must not be None: make one with init_state(batch_size)")
        with without_noise():
            output, new_state = self._checked_run(x_t.unsqueeze(1), state)
        return output.squeeze(1), owned(new_state)

    def init_state(self, batch_size: int) -> StateT:
        """The state before any token: zeros on the layer's device."""
        check_batch_size(batch_size)
        return self._zeros(batch_size, ())

    def _zeros(self, b: int, missing: tuple[str, ...]) -> StateT:
        """A state of zeros, with None in place of the tensors that are `missing`."""
        device, dtype = self._weight.device, self.state_dtype
        state: StateT = self._make_state(
            None
            if name in missing
            else torch.zeros(b, *(n or 0 for n in size), dtype=dtype, device=device)
            for name, size in self._state_sizes().items()
        )
        return state

    def graphed(self, sample: Tensor) -> Graphed:  # sample: (b, t, m)
        """The layer as a callable for inputs like `sample`, on a GPU, as that of `Bedouin`."""
        return Graphed(self, sample)

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the state: at least float32."""
        return torch.promote_types(self._weight.dtype, torch.float32)

    @property
    def _weight(self) -> Tensor:
        """A parameter with the layer's dtype and device."""
        return read_parameter(self.out_proj, "weight")

    def _make_state(self, tensors: Any) -> Any:
        return self.state_type(*tensors)

    def _checked_run(self, x: Tensor, state: StateT | None) -> tuple[Tensor, StateT]:
        b = x.shape[0]
        if state is not None:
            state = self.checked_state(state, b)
        if not x.numel():
            return self._run_empty(x), self.init_state(b) if state is None else state.clone()
        before = self._zeros(b, self.none_for_zeros) if state is None else state
        return self._run_loaded(x, before, None)

    def _run_loaded(
        self,
        x: Tensor,  # (b, t, m)
        state: StateT,
        lengths: Tensor | None,  # (b,)
    ) -> tuple[Tensor, StateT]:  # (b, t, m)
        """`_run` with the parameters of the layer and of its parts, which a module that accelerate
        offloads has in its own calls alone."""
        layers = [v for v in (self, *self.children()) if isinstance(v, RecurrentLayer)]
        hooked = [(v, vars(v)["_hf_hook"]) for v in layers if "_hf_hook" in vars(v)]
        for layer, hook in hooked:
            hook.pre_forward(layer)
        found = self._run(x, state, lengths)
        for layer, hook in hooked:
            hook.post_forward(layer, ())
        return found

    def _run_empty(
        self,
        x: Tensor,  # (b, t, m), one of them 0
    ) -> Tensor:  # as x
        """The outputs of no tokens, with a graph to every parameter, since data-parallel training
        waits for gradients of them all: a token is run, and none of its outputs is taken."""
        output, _ = self._run_loaded(x.new_zeros(1, 1, x.shape[-1]), self.init_state(1), None)
        return x[..., : self.d_model].to(output.dtype) + output.flatten()[:0].sum()

    def _packed_run(
        self, x: Tensor, state: StateT | None, packing: Packing, wants_state: bool
    ) -> tuple[Tensor, StateT | None]:
        rows = packing.num_states
        state = self.init_state(rows) if state is None else self.checked_state(state, rows)
        state = packing.before(state, self.init_state(1))
        u = packing.take(x)
        if not u.numel():
            return packing.put(self._run_empty(u), x.shape), packing.after(state.clone())
        # padding follows the tokens, so that it changes only the state
        lengths = packing.padded_lengths() if wants_state else None
        output, state = self._run_loaded(u, state, lengths)
        return packing.put(output, x.shape), packing.after(state)

    def check_input(self, x: Tensor, rank: int) -> None:
        """Raise unless x is (b, t, m) for rank 3 or (b, m) for rank 2, of the layer's dtype and
        device."""
        check_layer_input(x, rank, self.d_model, self._weight)

    def checked_state(self, state: StateT, b: int) -> StateT:
        """`state` with a batch axis and in `state_dtype`, unless its own is a higher one; TypeError
        or ValueError where it does not fit the layer."""
        check_kind(state, self.state_type)
        sizes = self._state_sizes()
        for field, tensor in zip(sizes, state.tensors, strict=True):
            axes = ", ".join("any" if n is None else str(n) for n in sizes[field])
            check_tensor(f"state.{field}", tensor, f"(b, {axes})")
        pairs = list(zip(state.tensors, sizes.values(), strict=True))
        if all(v.dim() == len(size) for v, size in pairs):
            state = state.stack([state])
        state = state.at_least(self.state_dtype)
        like = self._weight.new_empty(0, dtype=self.state_dtype)
        for (field, size), tensor in zip(sizes.items(), state.tensors, strict=True):
            check_field(f"state.{field}", tensor, (b, *size), like)
        return state


class MatrixLayer(RecurrentLayer[StateT]):
    """A layer of several heads whose memories are matrices, after a short convolution.

    The options are h heads, p key channels (None: d_model / h), and expand_v p value channels.
    """

    conv: ShortConvolution

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int | None,
        expand_v: float,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(d_model, dtype)
        h = self.num_heads = positive_int("num_heads", num_heads)
        p = head_size(d_model, h) if head_dim is None else positive_int("head_dim", head_dim)
        self.head_dim, self.value_dim = p, expanded("expand_v", expand_v, "head_dim", p)

    def _state_sizes(self) -> StateShapes:
        memory = self.num_heads, self.head_dim, self.value_dim
        return {"conv": self.conv.window_size, "memory": memory}

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"value_dim={self.value_dim}"
        )


def owned(state: StateT) -> StateT:
    """The state with copies of what autograd may have saved: a state may be written in place."""
    return state._each(lambda v: v.clone() if v.requires_grad else v)
