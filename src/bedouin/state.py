"""The recurrent states of layers, and calls with them.

Letters: b batch, d d_inner, n d_state, w width of a convolution, c channels convolved.
"""

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar, overload

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from bedouin.checks import check_tensor

S = TypeVar("S")
StateT = TypeVar("StateT", bound="RecurrentState")

Join = Callable[[list[Tensor]], Tensor]  # such as `torch.cat`


class RecurrentState:
    """What the states of all layers can do; a subclass is also a NamedTuple of tensors (b, ...). A
    call or step converts a state of a lower floating dtype to that of `init_state`, since mixed
    precision casts what a module is given (FSDP). `torch.load` reads states with weights_only=True,
    exported programs take and return them, and code that takes named tuples apart finds the tensors
    alone. An index selects samples, not fields."""

    __slots__ = ()

    axes: ClassVar[tuple[int, ...]]  # of each field, in the state of a single sample
    letters: ClassVar[dict[str, str]] = {}  # the shapes of fields in letters, for messages
    optional: ClassVar[tuple[str, ...]] = ()  # the fields that may be None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        torch.serialization.add_safe_globals([cls])
        register_pytree_node(
            cls,
            lambda state: (list(state), None),
            lambda values, _: cls._make(values),
            serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
            flatten_with_keys_fn=lambda state: (
                [(GetAttrKey(name), v) for name, v in state._asdict().items()],
                None,
            ),
        )

    @property
    def _asdict(self) -> Callable[[], dict[str, Any]]:
        """Named tuples' method; a property, as exports index the fields of what has the method."""
        named: Any = self
        return lambda: dict(zip(named._fields, named, strict=False))

    def __repr__(self) -> str:
        """Shapes, dtypes and devices, since the numbers would fill screens."""
        named: Any = self
        fields = []
        for name in named._fields:
            v = getattr(self, name)
            about = f"{tuple(v.shape)} {v.dtype} on {v.device}" if isinstance(v, Tensor) else f"{v}"
            fields.append(f"{name}={about}")
        return f"{type(self).__name__}({', '.join(fields)})"

    def detach(self) -> Self:
        """The state without its gradient history, for truncated back-propagation through time."""
        return self._each(Tensor.detach)

    def clone(self) -> Self:
        """A copy in memory of its own, through which gradients flow."""
        return self._each(Tensor.clone)

    def to(self, *args: Any, **options: Any) -> Self:
        """The state with `Tensor.to` applied to every tensor."""
        return self._each(lambda v: v.to(*args, **options))

    def cpu(self) -> Self:
        """The state on the CPU."""
        return self.to("cpu")

    def __getitem__(self, index: Any) -> Self:
        """Samples of the batch, in any order and as often as the index names them. A slice, a list,
        a mask (b,) or a tensor of indices keeps the batch axis. An int drops it: state[i] is a
        single sample, which calls with a batch of 1 accept and `stack` collects. Raises TypeError
        for a tuple, ValueError for a state without batch axis."""
        if isinstance(index, tuple):
            raise TypeError(
                f"index must select samples of the batch, got the tuple {index}: use an int, a "
                "slice, a list, or a tensor"
            )
        self._check_batched(True, "an index")
        return self._each(lambda v: v[index])

    @classmethod
    def cat(cls, states: Sequence[Self]) -> Self:
        """The samples of all states, one after the other, as one batch. Raises TypeError for other
        types, ValueError for no states or one without batch axis."""
        return cls._joined(states, True, torch.cat)

    @classmethod
    def stack(cls, states: Sequence[Self]) -> Self:
        """A batch of single samples, such as `state[i]`. Raises TypeError for other types,
        ValueError for no states or one that has a batch axis."""
        return cls._joined(states, False, torch.stack)

    @classmethod
    def _joined(cls, states: Sequence[Self], batched: bool, join: Join) -> Self:
        name = "cat" if batched else "stack"
        if isinstance(states, RecurrentState) or not isinstance(states, Sequence) or not states:
            raise ValueError(
                f"{name} must get a list of at least one {cls.__name__}, got {states!r:.80}"
            )
        shapes = []
        for state in states:
            if not isinstance(state, cls):
                raise TypeError(
                    f"{name} must get a list of {cls.__name__}, got one of {type(state).__name__}"
                )
            state._check_batched(batched, name)
            shapes.append([tuple(v.shape[int(batched) :]) for v in state.tensors])
            first, last = shapes[0], shapes[-1]
            if first != last:
                raise ValueError(
                    f"{name} needs states of one layer, got tensors of shapes {first} and {last}"
                )
        fields = zip(*(state.tensors for state in states), strict=True)
        return cls._make(join(list(field)) for field in fields)

    def _check_batched(self, batched: bool, user: str) -> None:
        if (self.tensors[0].dim() > self.axes[0]) == batched:
            return
        has, remedy = ("no", "stack") if batched else ("a", "cat")
        needs = "states with a batch axis" if batched else "states of single samples"
        raise ValueError(f"{user} needs {needs}, got one that has {has} batch axis: use {remedy}")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The fields, one after the other."""
        values: Any = self
        return tuple(values)

    @classmethod
    def _make(cls, values: Iterable[Any]) -> Self:
        """The state of these tensors, in the order in which it iterates over them."""
        make: Any = cls
        state: Self = make(*values)
        return state

    def _each(self, convert: Callable[[Tensor], Tensor]) -> Self:
        """The state with `convert` applied to every tensor."""
        return self._make(convert(v) for v in self.tensors)


if TYPE_CHECKING:
    # type checkers know what an index of a named tuple is, whatever a subclass says
    class _BedouinFields:
        ssm: Tensor
        y: Tensor
        conv: Tensor | None

        def __init__(self, ssm: Tensor, y: Tensor, conv: Tensor | None = None) -> None: ...

else:
    _BedouinFields = namedtuple("_BedouinFields", "ssm y conv", defaults=(None,))


class BedouinState(RecurrentState, _BedouinFields):
    """The recurrent state of a layer between two tokens, at least float32. ssm: (b, d, n), the
    memory h of the scan; y: (b, d), the fixed point at the last token; conv: (b, d_conv - 1, c),
    the last inputs of the layer's convolution, None for a layer without one. A state that a layer
    returns owns its memory: writing into `state.detach()` in place affects neither the call that
    returned it nor its backward pass."""

    __slots__ = ()
    axes = (2, 1, 2)
    letters: ClassVar[dict[str, str]] = {"ssm": "(b, d, n)", "y": "(b, d)", "conv": "(b, w - 1, c)"}
    optional = ("conv",)

    def __iter__(self) -> Iterator[Tensor]:
        """The tensors, so that `ssm, y = state` holds without a convolution."""
        fields = (self.ssm, self.y, self.conv)
        return iter([v for v in fields if v is not None])

    def __len__(self) -> int:
        """The number of tensors, those over which it iterates."""
        return 2 if self.conv is None else 3

    def _replace(self, **changes: Any) -> Self:
        """The state with other values of some fields."""
        return self._make((self._asdict() | changes).values())


StateShapes = dict[str, tuple[int | None, ...]]
"""The shape of each tensor of a state without its batch axis; None: any length. A field that is
not in it is None."""


def zero_state(
    kind: type[StateT], shapes: StateShapes, b: int, like: Tensor, missing: tuple[str, ...] = ()
) -> StateT:  # like: with the dtype and device of the state
    """The state before the first token: zeros, and None for the tensors that are `missing`."""
    return kind._make(
        None if name in missing else like.new_zeros(b, *(n or 0 for n in shape))
        for name, shape in shapes.items()
    )


def check_state(
    state: Any, kind: type[StateT], shapes: StateShapes, b: int, like: Tensor
) -> StateT:  # like: with the dtype and device of the state
    """`state` with a batch axis, of which a single sample gets one of 1, and at least in the dtype
    of `like`. Raises TypeError for another type, ValueError for another shape, dtype or device."""
    if not isinstance(state, kind):
        raise TypeError(
            f"state must be a {kind.__name__} or None, got {type(state).__name__}: make one with "
            f"init_state(batch_size) or {kind.__name__}({', '.join(shapes)})"
        )
    names: Any = state
    for name in names._fields:
        value = getattr(state, name)
        if name in shapes and value is None and name in kind.optional:
            expected = f"a tensor of shape {(b, *shapes[name])}, the window of the convolution"
        elif name not in shapes and value is not None:
            expected = "None, since the layer has no convolution"
        else:
            continue
        got = "None" if value is None else tuple(value.shape)
        raise ValueError(
            f"state.{name} must be {expected}, got {got}: make a state with init_state(batch_size)"
        )
    for name, shape in shapes.items():
        axes = ", ".join("any" if n is None else str(n) for n in shape)
        check_tensor(f"state.{name}", getattr(state, name), kind.letters.get(name, f"(b, {axes})"))
    if all(getattr(state, name).dim() == len(shape) for name, shape in shapes.items()):
        state = state.stack([state])
    dtype, size = like.dtype, like.dtype.itemsize
    if any(v.dtype != dtype for v in state.tensors):
        state = state._each(
            lambda v: v.to(dtype) if v.is_floating_point() and v.dtype.itemsize < size else v
        )
    for name, shape in shapes.items():
        tensor: Tensor = getattr(state, name)
        # compared one by one: torch.compile cannot look for a symbolic size in a tuple
        fits = tensor.dim() == len(shape) + 1 and all(
            n is None or n == size for size, n in zip(tensor.shape, (b, *shape), strict=True)
        )
        if not fits:
            expected = ", ".join("any" if n is None else str(n) for n in (b, *shape))
            raise ValueError(
                f"state.{name} must have shape ({expected}), got {tuple(tensor.shape)}: make one "
                "with init_state(batch_size) or select samples with state[...]"
            )
        if (tensor.dtype, tensor.device) != (like.dtype, like.device):
            raise ValueError(
                f"state.{name} must have dtype {like.dtype} on {like.device}, got {tensor.dtype} "
                f"on {tensor.device}: use state.to({str(like.device)!r}, {like.dtype})"
            )
    checked: StateT = state
    return checked


class SequenceCall(Protocol[S]):
    """How a layer or model with states of this type is called, for type checkers; `others` are
    mask, cu_seqlens and seq_idx, and of `step` one_token."""

    @overload
    def __call__(
        self, x: Tensor, state: S | None = None, return_state: Literal[False] = False, **others: Any
    ) -> Tensor: ...

    @overload
    def __call__(
        self, x: Tensor, state: S | None = None, *, return_state: Literal[True], **others: Any
    ) -> tuple[Tensor, S]: ...

    @overload
    def __call__(self, x: Tensor, state: S | None, return_state: bool, **others: Any) -> Any: ...
