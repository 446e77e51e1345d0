"""Sequences of several lengths in one tensor: padded rows, and rows of several documents.

Layers are causal, so they compute such sequences as a batch in which each begins at the left and
padding with x = 0 follows its last token: a `Packing` says which token goes where. Only the state
after the padding and the statistics need care.

Letters: b rows, t time, l sequences (the rows without padding, or documents), w the longest.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from bedouin.checks import check_tensor
from bedouin.kernels.backend import is_batched, is_transformed
from bedouin.state import RecurrentState

StateT = TypeVar("StateT", bound=RecurrentState)

INDICES = torch.int32, torch.int64
_LENGTHS = "_lengths_before_padding"
"""The name under which a mask of rows whose padding follows their tokens has their lengths."""


@dataclass(frozen=True)
class Packing:
    """Where the tokens of l sequences are in b rows; without lengths each row is a sequence without
    padding. A state is one of sequences, or of rows. source and target say for each place of a
    sequence from which of the b t its token comes, and for each place of a row at which of the l w
    its token is; None: at the same one."""

    size: tuple[int, int]  # l, w
    lengths: Tensor | None = None  # (l,)
    real: Tensor | None = None  # (l, w) bool, False in the padding after each; None: no padding
    source: Tensor | None = None  # (l w,)
    target: Tensor | None = None  # (b t,)
    mask: Tensor | None = None  # (b, t) bool, the places of rows that have a token; None: all
    first: Tensor | None = None  # (l,), the index + 1 of the row that a sequence begins, or 0
    last: Tensor | None = None  # (b,), the last sequence of each row

    @property
    def num_states(self) -> int:
        """How many samples a state has before and after a call."""
        return self.size[0] if self.last is None else self.last.shape[0]

    def padded_lengths(self) -> Tensor | None:  # (l,)
        """The lengths; None if there is no padding."""
        return None if self.real is None else self.lengths

    @property
    def mask_of_sequences(self) -> Tensor | None:  # (l, w) bool
        """`real`, marked so that the layers of a model need not gather the tokens again."""
        if self.real is not None and not torch.compiler.is_compiling():
            setattr(self.real, _LENGTHS, self.lengths)
        return self.real

    def take(self, x: Tensor) -> Tensor:  # (b, t, ...) -> (l, w, ...)
        """The tokens of each sequence, and zeros in its padding, even where x is NaN."""
        places = (self.source, self.target, self.real, self.mask)
        return x if self.lengths is None else _move(x, self.size, *places)

    def put(self, y: Tensor, shape: torch.Size) -> Tensor:  # (l, w, ...), (b, t, ...) -> as shape
        """The inverse of `take`, with zeros at places without a token."""
        if self.lengths is None:
            return y
        rows = _move(y, shape[:2], self.target, self.source, self.mask, self.real)
        # not a view, since that would keep FSDP from gathering the parameters for its backward
        return rows if self.target is not None or self.mask is not None else rows.clone()

    def before(self, state: StateT, zeros: StateT) -> StateT:
        """The states before the first token of each sequence, from those of rows, or with
        cu_seqlens of documents, and that of one sample before its first token."""
        if self.first is None:
            return state
        if not isinstance(zeros, RecurrentState):
            raise TypeError(
                "seq_idx needs states that can be joined, such as BedouinState, got "
                f"{type(zeros).__name__}: use cu_seqlens, which takes a state for each document"
            )
        return type(zeros).cat([zeros, state])[self.first]

    def after(self, state: StateT) -> StateT:
        """The states after the last token of each row, or with cu_seqlens of each document."""
        return state if self.last is None else state[self.last]


class _Gather(torch.autograd.Function):
    """`_move` whose gradient is gathered, too: autograd would add it at scattered addresses."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, *where: Any) -> Tensor:
        size, *places = where
        ctx.save_for_backward(*places)
        ctx.size = v.shape[:2]
        return _moved(v, size, places[0], places[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, inverse, kept, used = ctx.saved_tensors
        return _move(grad, ctx.size, inverse, index, used, kept), *[None] * 5


def _move(v: Tensor, size: tuple[int, ...], *places: Tensor | None) -> Tensor:
    """v (i, j, ...) as (k, l, ...), where size = (k, l): at the index (k l,) of the i j, None for
    the same order, where kept (k, l) is True, None for all, and 0 elsewhere. places: index, its
    inverse (i j,), kept, and which (i, j) the index contains."""
    if places[0] is None or torch.compiler.is_compiling() or is_transformed() or is_batched(v):
        return _moved(v, size, places[0], places[2])
    moved: Tensor = _Gather.apply(v, size, *places)  # type: ignore[no-untyped-call]
    return moved


def _moved(v: Tensor, size: tuple[int, ...], index: Tensor | None, kept: Tensor | None) -> Tensor:
    rest = v.shape[2:]  # batched cotangents have reshape, but not flatten
    flat = v.reshape(v.shape[0] * v.shape[1], *rest)
    moved = (flat if index is None else flat.index_select(0, index)).reshape(*size, *rest)
    return moved if kept is None else zero_outside(kept, moved)


def tokens_before(lengths: Tensor, w: int) -> Tensor:  # (l,) -> (l, w)
    """Which of w places come before the end of each sequence."""
    return torch.arange(w, device=lengths.device) < lengths.unsqueeze(1)


def zero_outside(mask: Tensor, v: Tensor) -> Tensor:  # (l, w) bool, (l, w, ...) -> (l, w, ...)
    """v where the mask is True, and 0 elsewhere, also for the gradient where v is not finite."""
    # not a product: that would leave NaN
    return v.masked_fill(~mask.view(*mask.shape, *(1,) * (v.dim() - 2)), 0)


def last_token(y: Tensor, lengths: Tensor, before: Tensor | None) -> Tensor:
    """y (l, w, d), w > 0, at the last token of each sequence of lengths (l,), and `before` (l, d),
    None for zeros, of a sequence without tokens."""
    index = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, y.shape[2])
    last = y.gather(1, index).squeeze(1)
    return torch.where(lengths[:, None] > 0, last, 0.0 if before is None else before)


def find_packing(
    x: Tensor,  # (b, t, ...), or tokens (b, t)
    mask: Tensor | None = None,  # (b, t)
    cu_seqlens: Tensor | None = None,  # (l + 1,)
    seq_idx: Tensor | None = None,  # (b, t)
) -> Packing:
    """What the arguments of a call say about x, as `Bedouin.forward` describes them. Raises
    TypeError for another type or dtype, ValueError for another shape, both cu_seqlens and seq_idx,
    cu_seqlens that do not ascend from 0 to t, and what the host would have to read in a capture."""
    b, t = x.shape[:2]
    if mask is not None:
        check_rows("mask", mask, x, (torch.bool,))
    if cu_seqlens is not None and seq_idx is not None:
        raise ValueError(
            "at most one of cu_seqlens and seq_idx says where documents begin, got both: use "
            "seq_idx, or cu_seqlens for a single row with one state for each document"
        )
    if cu_seqlens is not None:
        return _split_at(cu_seqlens, x, mask)
    if seq_idx is not None:
        check_rows("seq_idx", seq_idx, x, INDICES)
        check_readable("seq_idx", x)
        return _split_rows(seq_idx, mask) if seq_idx.numel() else Packing((b, t))
    if mask is None:
        return Packing((b, t))
    if not torch.compiler.is_compiling() and (known := getattr(mask, _LENGTHS, None)) is not None:
        return Packing((b, t), known, mask, mask=mask)
    # each row is a sequence of the same width, so that no shape depends on the mask
    row = torch.arange(b, device=x.device).unsqueeze(1).expand(b, t)
    return _place(row.flatten(), mask.sum(1), t, mask)


def _split_at(cu_seqlens: Tensor, x: Tensor, mask: Tensor | None) -> Packing:
    """Each document of the row x (1, t, ...) is a sequence; cu_seqlens (l + 1,), mask (1, t)."""
    check_tensor("cu_seqlens", cu_seqlens, "(documents + 1,)")
    _check_like("cu_seqlens", cu_seqlens, x, INDICES)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(
            f"cu_seqlens must have shape (documents + 1,), got {tuple(cu_seqlens.shape)}: for one "
            "document it is [0, t]"
        )
    b, t = x.shape[:2]
    if b != 1:
        raise ValueError(
            f"cu_seqlens needs a single row, x (1, t, m) or tokens (1, t), got {tuple(x.shape)}: "
            "join the rows, or use mask or seq_idx"
        )
    check_readable("cu_seqlens", x)
    bounds = cu_seqlens.to(torch.int64)
    ends: list[int] = bounds.tolist()
    check_bounds("cu_seqlens", ends, t)
    w = max([0, *(stop - start for start, stop in zip(ends, ends[1:], strict=False))])
    if mask is None and (len(ends) - 1) * w == t:  # a batch as it is
        return Packing((len(ends) - 1, w), bounds.diff())
    document = torch.searchsorted(bounds[1:], torch.arange(t, device=x.device), right=True)
    lengths = bounds.diff() if mask is None else _count(document, mask, len(ends) - 1)
    return _place(document, lengths, w, mask)


def document_begins(seq_idx: Tensor, mask: Tensor | None) -> Tensor:  # (b, t) each
    """Where the index of a row's tokens changes; the row's first token is no change."""
    if mask is not None:
        # padding has the index of the token before it, or of the first one of the row
        places = torch.arange(seq_idx.shape[1], device=seq_idx.device)
        token = torch.where(mask, places, -1).cummax(1).values
        first_token = mask.long().argmax(1, keepdim=True)
        seq_idx = seq_idx.gather(1, torch.where(token < 0, first_token, token))
    begins = torch.zeros_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return begins


def _split_rows(seq_idx: Tensor, mask: Tensor | None) -> Packing:  # (b, t), (b, t) bool
    """Each run of one index is a sequence, and a row without tokens is an empty one."""
    b, t = seq_idx.shape
    begins = document_begins(seq_idx, mask)
    begins[:, 0] = True
    document = begins.flatten().cumsum(0) - 1
    lengths = _count(document, mask, b * t)
    # both in one read of the device
    num, w = torch.stack([document[-1] + 1, lengths.max().clamp(min=1)]).tolist()
    starts = torch.searchsorted(document, torch.arange(num, device=document.device))
    first = torch.where(starts % t == 0, starts // t + 1, 0)
    packing = _place(document, lengths[:num], w, mask)
    return replace(packing, first=first, last=document.view(b, t)[:, -1])


def _count(document: Tensor, mask: Tensor | None, num: int) -> Tensor:  # (b t,) -> (num,)
    """The tokens of each sequence."""
    real = torch.ones_like(document) if mask is None else mask.flatten().long()
    return document.new_zeros(num).scatter_add(0, document, real)


def _place(document: Tensor, lengths: Tensor, w: int, mask: Tensor | None) -> Packing:
    """The packing of sequences of lengths (l,) that follow one another. document: (b t,), that of
    each place, in order. mask: (b, t), the places with a token."""
    # not by len, which makes a symbolic size a constant
    size, places = (lengths.shape[0], w), document.shape[0]
    if mask is None and size[0] * w == places:
        return Packing(size, lengths)
    token = place = torch.arange(places, device=document.device)
    if mask is not None:
        token = mask.flatten().cumsum(0) - 1
        # where each token is; the last slot is that of places without one
        slot = torch.where(mask.flatten(), token, places)
        place = token.new_zeros(places + 1).scatter(0, slot, place)
    starts = lengths.cumsum(0) - lengths  # the tokens before each sequence
    source = starts.unsqueeze(1) + torch.arange(w, device=document.device)
    source = place[source.clamp(max=places - 1).flatten()]
    target = (document * w + token - starts[document]).clamp(0, size[0] * w - 1)
    return Packing(size, lengths, tokens_before(lengths, w), source, target, mask)


def check_rows(name: str, value: Tensor, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError or ValueError unless `value` is a tensor (b, t) of these dtypes beside x."""
    check_tensor(name, value, "(b, t)")
    _check_like(name, value, x, dtypes)
    if value.shape != x.shape[:2]:
        raise ValueError(
            f"{name} must have shape (b, t) = {tuple(x.shape[:2])}, got {tuple(value.shape)}"
        )


def _check_like(name: str, value: Tensor, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if value.dtype not in dtypes:
        names = " or ".join(map(str, dtypes))
        raise TypeError(
            f"{name} must have dtype {names}, got {value.dtype}: use {name}.to({dtypes[-1]})"
        )
    if value.device != x.device:
        place = f"on the device of x, {x.device}"
        raise ValueError(f"{name} must be {place}, got {value.device}: use {name}.to(x.device)")


def check_readable(name: str, x: Tensor) -> None:
    """Raise ValueError where the host must not synchronize with the device of x."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{name} must be None during the capture of a CUDA graph, since the host reads the "
            "lengths of the documents: pad the documents to one length and give mask"
        )


def check_bounds(name: str, ends: list[int], t: int) -> None:
    """Raise ValueError unless `ends` are the bounds of documents in a row of t tokens."""
    if ends[:1] != [0] or ends[-1] != t or sorted(ends) != ends:
        raise ValueError(
            f"{name} must ascend from 0 to t = {t}, got {ends!s:.60}: it holds the places where "
            "documents begin, and t"
        )
