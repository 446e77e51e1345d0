"""Sequences of several lengths in one tensor: padded rows, and rows of several documents.

Layers are causal, so they compute such sequences as a batch in which each begins at the left and
padding follows its last token: a `Packing` says which token goes where. The padding then has no
influence on any token, if x is 0 there, and only the state after it and the statistics need care.

Letters: b rows, t time, l sequences (the b rows without their padding, or documents), w the length
of the longest one.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bedouin.checks import check_tensor
from bedouin.kernels.backend import is_transformed
from bedouin.kernels.linear import padding
from bedouin.kernels.padding import CLOSED, closed_value
from bedouin.state import RecurrentState

StateT = TypeVar("StateT", bound=RecurrentState)

_LENGTHS = "_lengths_before_padding"
"""The name under which a mask of rows whose padding follows their tokens has their lengths."""


class _Gather(torch.autograd.Function):
    """v[index] where `kept` is True, and 0 elsewhere.

    The gradient is gathered as well, with the inverse of the index; autograd would add into zeros,
    at scattered addresses.
    """

    @staticmethod
    def forward(
        ctx: Any,
        v: Tensor,  # (i, j, ...)
        index: Tensor,  # (k l,), of the i j
        inverse: Tensor,  # (i j,), of the k l
        kept: Tensor | None,  # (k, l) bool
        used: Tensor | None,  # (i, j) bool, what the index contains; None: all
        size: tuple[int, int],  # k, l
    ) -> Tensor:  # (k, l, ...)
        ctx.save_for_backward(index, inverse, kept, used)
        ctx.size = v.shape[:2]
        gathered = v.flatten(0, 1).index_select(0, index).unflatten(0, size)
        return gathered if kept is None else zero_outside(kept, gathered, in_place=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # grad: (k, l, ...)
        index, inverse, kept, used = ctx.saved_tensors
        return _gather(grad, inverse, index, used, kept, ctx.size), None, None, None, None, None


def _gather(
    v: Tensor,  # (i, j, ...)
    index: Tensor,  # (k l,)
    inverse: Tensor,  # (i j,)
    kept: Tensor | None,  # (k, l) bool
    used: Tensor | None,  # (i, j) bool
    size: tuple[int, int],  # k, l
) -> Tensor:  # (k, l, ...)
    """What `_Gather` computes, in memory of its own."""
    if not (torch.compiler.is_compiling() or is_transformed()):
        gathered: Tensor = _Gather.apply(v, index, inverse, kept, used, size)  # type: ignore[no-untyped-call]
        return gathered
    flat = v.flatten(0, 1).index_select(0, index).unflatten(0, size)
    return flat.clone() if kept is None else zero_outside(kept, flat)


@dataclass(frozen=True)
class Packing:
    """Where the tokens of l sequences are in b rows. A state is one of sequences, or of rows.

    source and target say for each place of a sequence from which of the b t its token comes, and
    for each place of a row at which of the l w its token is; None: at the same one.
    """

    lengths: Tensor  # (l,)
    size: tuple[int, int]  # l, w
    real: Tensor | None  # (l, w) bool, False in the padding after each sequence; None: no padding
    source: Tensor | None  # (l w,)
    target: Tensor | None  # (b t,)
    mask: Tensor | None = None  # (b, t) bool, the places of rows that have a token; None: all
    first: Tensor | None = None  # (l,), the index + 1 of the row that a sequence begins, or 0
    last: Tensor | None = None  # (b,), the last sequence of each row

    @property
    def num_states(self) -> int:
        """How many samples a state has before and after a call."""
        return (self.lengths if self.last is None else self.last).shape[0]

    def padded_lengths(self, num_heads: int = 1) -> Tensor | None:  # (H l,)
        """The lengths of folded samples (bedouin.heads); None if there is no padding."""
        if self.real is None or num_heads == 1:
            return None if self.real is None else self.lengths
        return self.lengths.repeat(num_heads)

    @property
    def mask_of_sequences(self) -> Tensor | None:  # (l, w) bool
        """`real`, marked so that `find_packing` need not test that padding follows the tokens."""
        if self.real is not None and not torch.compiler.is_compiling():
            setattr(self.real, _LENGTHS, self.lengths)
        return self.real

    def take(self, x: Tensor) -> Tensor:  # (b, t, ...) -> (l, w, ...)
        """The tokens of each sequence, and zeros in its padding, even where x is NaN."""
        if self.source is not None and self.target is not None:
            return _gather(x, self.source, self.target, self.real, self.mask, self.size)
        taken = _in_rows(x, self.size)
        return taken if self.real is None else zero_outside(self.real, taken)

    def put(
        self,
        y: Tensor,  # (l, w, ...)
        shape: torch.Size,  # (b, t, ...)
    ) -> Tensor:  # (b, t, ...)
        """The inverse of `take`, with zeros at places without a token."""
        b, t = shape[:2]
        if self.source is not None and self.target is not None:
            return _gather(y, self.target, self.source, self.mask, self.real, (b, t))
        rows = _in_rows(y, (b, t))
        if self.mask is not None:
            return zero_outside(self.mask, rows)
        # not a view, since that would keep FSDP from gathering the parameters for its backward
        return rows if rows is y else rows.clone()

    def before(
        self,
        state: StateT,  # of rows, or with cu_seqlens of documents
        zeros: StateT,  # of one sample before its first token
    ) -> StateT:
        """The states before the first token of each sequence."""
        if self.first is None:
            return state
        if not isinstance(zeros, RecurrentState):
            raise TypeError(
                "seq_idx needs states that can be joined, such as BedouinState, got "
                f"{type(zeros).__name__}: use cu_seqlens, which takes a state for each document"
            )
        return type(zeros).cat([zeros, state])[self.first]

    def after(
        self,
        state: StateT | None,  # of sequences
    ) -> StateT | None:
        """The states after the last token of each row, or with cu_seqlens of each document."""
        return state if self.last is None or state is None else state[self.last]


def tokens_before(lengths: Tensor, w: int) -> Tensor:  # (l,) -> (l, w)
    """Which of w places come before the end of each sequence."""
    return torch.arange(w, device=lengths.device) < lengths.unsqueeze(1)


def zero_outside(
    mask: Tensor,  # (l, w) bool
    v: Tensor,  # (l, w, ...)
    *,
    in_place: bool = False,
) -> Tensor:  # (l, w, ...)
    """v where the mask is True, and 0 elsewhere, also for the gradient where v is not finite."""
    # not a product: that would leave NaN
    fill = v.masked_fill_ if in_place else v.masked_fill
    return fill(~mask.view(*mask.shape, *(1,) * (v.dim() - 2)), 0)


def _in_rows(
    v: Tensor,  # (i, j, ...)
    size: tuple[int, int],  # k, l with k l = i j
) -> Tensor:  # (k, l, ...)
    return v if v.shape[:2] == size else v.flatten(0, 1).unflatten(0, size)


def last_token(
    y: Tensor,  # (l, w, d), w > 0
    lengths: Tensor,  # (l,)
    before: Tensor | None,  # (l, d), the value for a sequence without tokens; None: zeros
) -> Tensor:  # (l, d)
    """y at the last token of each sequence."""
    index = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, y.shape[2])
    last = y.gather(1, index).squeeze(1)
    return torch.where(lengths[:, None] > 0, last, 0.0 if before is None else before)


def hold_memory(
    raw: Tensor,  # (H l, w, r)
    real: Tensor,  # (l, w) bool
    num_heads: int,
    p: int,
    closed: float,
    erases: bool,
) -> Tensor:  # (H l, w, r)
    """Raw values whose first p, those of Delta, are `closed` in the padding, and with `erases` the
    last, that of beta^e, so low that nothing is erased.

    With Delta = 0 the decay is 1 and the input scale 0, in every parameterization: the memory
    passes, and no gradient reaches the other raw values.
    """
    padded = ~real.unsqueeze(-1)
    if num_heads > 1:
        padded = padded.repeat(num_heads, 1, 1)
    r = raw.shape[-1]
    # one split, because its gradient is one concatenation
    delta, rest, *erase = raw.split([p, r - p - 1, 1] if erases else [p, r - p], -1)
    columns = [delta.masked_fill(padded, closed_value(closed, raw.dtype)), rest]
    columns += [v.masked_fill(padded, closed_value(-CLOSED, raw.dtype)) for v in erase]
    if not padding(r) or raw.stride(1) != r + padding(r):
        return torch.cat(columns, -1)
    # rows that kernels read begin at aligned addresses, which spare columns keep
    return torch.cat([*columns, raw.new_empty(*raw.shape[:2], padding(r))], -1)[..., :r]


def find_packing(
    x: Tensor,  # (b, t, ...), or tokens (b, t)
    mask: Tensor | None,  # (b, t)
    cu_seqlens: Tensor | None,  # (l + 1,)
    seq_idx: Tensor | None,  # (b, t)
) -> Packing | None:
    """What the arguments of a call say about x; None if all are None.

    mask: bool, True for real tokens, padding anywhere. cu_seqlens: int32 or int64, the places in
    a single row where each document begins, and the row's length last. seq_idx: int32 or int64; a
    document ends where it changes. The latter two are read by the host, once. With a mask, padding
    is in no document: those of cu_seqlens are shorter by it, and its seq_idx has no influence.
    Raises TypeError for another type or dtype, ValueError for another shape, both cu_seqlens and
    seq_idx, cu_seqlens that do not ascend from 0 to t, and under the capture of a CUDA graph what
    the host would have to read.
    """
    if mask is not None:
        check_rows("mask", mask, x, (torch.bool,))
    if cu_seqlens is not None and seq_idx is not None:
        raise ValueError(
            "at most one of cu_seqlens and seq_idx says where documents begin, got both: use "
            "seq_idx, or cu_seqlens for a single row with one state for each document"
        )
    if cu_seqlens is not None:
        return _split_at(cu_seqlens, x, mask)
    if seq_idx is None:
        return None if mask is None else _pad_rows(mask)
    check_rows("seq_idx", seq_idx, x, (torch.int32, torch.int64))
    check_readable("seq_idx", x)
    if not seq_idx.numel():
        return None
    return _split_rows(seq_idx, mask)


def _pad_rows(
    mask: Tensor,  # (b, t) bool
) -> Packing:
    """Each row is a sequence of the same width, so that no shape depends on the mask."""
    b, t = mask.shape
    if not torch.compiler.is_compiling() and (known := getattr(mask, _LENGTHS, None)) is not None:
        return Packing(known, (b, t), mask, None, None, mask)
    rows = torch.arange(b, device=mask.device).unsqueeze(1).expand(b, t)
    return _place(rows.flatten(), mask.cumsum(1).flatten() - 1, None, mask, mask.sum(1), t)


def _split_at(
    cu_seqlens: Tensor,  # (l + 1,)
    x: Tensor,  # (1, t, ...)
    mask: Tensor | None,  # (1, t) bool
) -> Packing:
    """Each document of the row is a sequence."""
    check_tensor("cu_seqlens", cu_seqlens, "(documents + 1,)")
    _check_like("cu_seqlens", cu_seqlens, x, (torch.int32, torch.int64))
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
    # how many tokens come before each bound, which is the bound itself without padding
    tokens = bounds
    if mask is not None:
        tokens = nn.functional.pad(mask.flatten().cumsum(0), (1, 0))[bounds.clamp(0, t)]
    ends: list[int]
    # in one read of the device
    ends, counts = [bounds.tolist()] * 2 if mask is None else torch.stack([bounds, tokens]).tolist()
    check_bounds("cu_seqlens", ends, t)
    # masked places without a token need one of a sequence, too
    least = 0 if mask is None else min(t, 1)
    w = max([least, *(stop - start for start, stop in zip(counts, counts[1:], strict=False))])
    lengths = tokens.diff()
    if mask is None and (len(ends) - 1) * w == t and t:
        return Packing(lengths, (len(ends) - 1, w), None, None, None)
    places = torch.arange(t, device=x.device)
    document = torch.searchsorted(bounds[1:], places, right=True)
    before = places if mask is None else mask.flatten().cumsum(0) - 1
    starts = tokens[:-1]
    return _place(document, before - starts[document], starts, mask, lengths, w)


def document_begins(
    seq_idx: Tensor,  # (b, t)
    mask: Tensor | None,  # (b, t) bool
) -> Tensor:  # (b, t) bool
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


def _split_rows(
    seq_idx: Tensor,  # (b, t)
    mask: Tensor | None,  # (b, t) bool
) -> Packing:
    """Each run of one index is a sequence, and a row without tokens is an empty one."""
    b, t = seq_idx.shape
    device = seq_idx.device
    real = torch.ones_like(seq_idx) if mask is None else mask.long()
    begins = document_begins(seq_idx, mask)
    begins[:, 0] = True
    begins, real = begins.flatten(), real.flatten().long()
    document, count = begins.cumsum(0) - 1, real.cumsum(0)
    before = count - real
    within = count - torch.where(begins, before, 0).cummax(0).values
    # both in one read of the device
    num, w = torch.stack([document[-1] + 1, within.max().clamp(min=1)]).tolist()
    starts = torch.searchsorted(document, torch.arange(num, device=device))
    lengths = torch.cat([before[starts], count[-1:]]).diff()
    if mask is None and num * w == b * t:
        packing = Packing(lengths, (num, w), None, None, None)
    else:
        packing = _place(document, within - 1, starts, mask, lengths, w)
    first = torch.where(starts % t == 0, starts // t + 1, 0)
    return replace(packing, first=first, last=document.view(b, t)[:, -1])


def _place(
    document: Tensor,  # (b t,), the sequence of each place
    within: Tensor,  # (b t,), which token of the sequence is there
    starts: Tensor | None,  # (l,), the places where sequences begin; with a mask unused
    mask: Tensor | None,  # (b, t) bool, the places with a token
    lengths: Tensor,  # (l,)
    w: int,
) -> Packing:
    """The packing of sequences, one after the other."""
    # not by len, which makes a symbolic size a constant
    places, count = document.shape[0], lengths.shape[0]
    target, real = document * w + within, tokens_before(lengths, w)
    if mask is None:
        assert starts is not None
        source = starts.unsqueeze(1) + torch.arange(w, device=target.device)
        source = source.clamp(max=places - 1).flatten()
        return Packing(lengths, (count, w), real, source, target)
    # the last slot is that of places without a token, which are masked
    target, slots = torch.where(mask.flatten(), target, count * w), target.new_zeros(count * w + 1)
    source = slots.scatter(0, target, torch.arange(places, device=target.device))[:-1]
    return Packing(lengths, (count, w), real, source, target.clamp(max=count * w - 1), mask)


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
        raise ValueError(
            f"{name} must be on the device of x, {x.device}, got {value.device}: use "
            f"{name}.to(x.device)"
        )


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
