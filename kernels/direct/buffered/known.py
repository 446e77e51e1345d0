"""What the adjoint of a chunk of tokens computes without cotangents.

Letters: b batch, i rows of a chunk (token by token), d channels, n state per channel, k
reflections, k' values of the maps (maps.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.direct.buffered.maps import fill_maps, map_width
from bedouin.kernels.direct.buffered.rows import RowMaker, Rows, first_rows, split_tokens
from bedouin.kernels.direct.layout import activation_slope


class Known(NamedTuple):
    """Values of the rows of a chunk that do not depend on cotangents, and memory for those that its
    tokens compute."""

    delta: Tensor  # (i, 1, d), of `Rows`, as all up to U_columns
    B: Tensor  # (i, 1, n)
    B_column: Tensor  # (i, n, 1)
    C_column: Tensor  # (i, n, 1)
    units: Tensor  # (i, 2, n)
    memory_norms: Tensor  # (i, 2, 1)
    BC: Tensor  # (i, 1, 1), or not read
    s: Tensor  # (i, 1, d), or not read
    sigma: Tensor  # (i, 1, d)
    U: Tensor  # (i, k, d)
    U_columns: Tensor  # (i, d, k)
    mixed: Tensor  # (i, 1, d)
    written: Tensor  # (i, d, 1), s * mixed - erased, or for "one_minus_decay" mixed
    erase: Tensor  # (i, 1, 1), of `Rows`, as the next
    erased: Tensor  # (i, 1, d)
    maps: Tensor  # (i, k, k')
    constant: Tensor  # (i, 1, k')
    slope: Tensor  # (i, 1, d), of the activation of Delta
    slope_reads: Tensor | None  # (i, 1, d), the slope of Delta's raw value for H B
    factor: Tensor  # (i, k + 2, d), U, y - x and m, which the token computes, in one matrix
    m: Tensor  # (i, 1, d)
    z: Tensor  # (i, 1, d), which the token computes, as all that follow
    w: Tensor  # (i, 1, d)
    w_column: Tensor  # (i, d, 1), a view of w
    found: Tensor  # (i, 1, k'), what the maps compute
    f: Tensor  # (i, 1, k), a view of found, as the next two
    found_alpha: Tensor  # (i, k, 1)
    found_u: Tensor  # (i, k, k + 2)
    grad_B: Tensor  # (i, n, 1), the cotangents of B and C
    grad_C: Tensor  # (i, n, 1)
    pair: Tensor  # (i, 2, n), a view of both
    grad_log_erase: Tensor  # (i, 1, 1), the cotangent of log(beta^e); or (i, 1, 0)

    def first(self, count: int) -> "Known":
        """Views of the first rows."""
        return self if count == len(self.m) else Known(*first_rows(self, count))

    def tokens(self, b: int) -> list["Known"]:
        """Views of the b rows of each token."""
        if len(self.m) == b:
            return [self]
        return [Known(*parts) for parts in zip(*split_tokens(self, b), strict=True)]


def allocate_known(
    maker: RowMaker,
    rows: Rows,
    mixed: Tensor,  # (i, 1, d)
) -> Known:
    (i, _, d), n, k = mixed.shape, maker.n, maker.k
    new = maker.like.new_empty
    found, pair, factor = new(i, 1, map_width(k)), new(2, i, n, 1), new(i, k + 2, d)
    w, written = new(i, 1, d), mixed if maker.coupled else new(i, 1, d)
    return Known(
        delta=rows.delta,
        B=rows.B,
        B_column=rows.B_column,
        C_column=rows.C_column,
        units=rows.units,
        memory_norms=rows.memory_norms,
        BC=rows.BC,
        s=rows.s,
        sigma=rows.sigma,
        U=rows.U,
        U_columns=rows.U_columns,
        mixed=mixed,
        written=written.mT,
        erase=rows.erase,
        erased=rows.erased,
        maps=new(i, k, map_width(k)),
        constant=new(i, 1, map_width(k)),
        slope=new(i, 1, d),
        slope_reads=None if maker.coupled else new(i, 1, d),
        factor=factor,
        m=factor[:, k + 1 :],
        z=new(i, 1, d),
        w=w,
        w_column=w.mT,
        found=found,
        f=found[..., :k],
        found_alpha=found[..., k : 2 * k].mT,
        found_u=found[:, 0, 2 * k :].unflatten(-1, (k, k + 2)),
        grad_B=pair[0],
        grad_C=pair[1],
        pair=pair.squeeze(-1).transpose(0, 1),
        grad_log_erase=new(i, 1, int(maker.erases)),
    )


def fill_known(
    maker: RowMaker,
    rows: Rows,
    known: Known,  # its views of `rows` and `mixed` are given
    e: Tensor,  # (i, 1, k)
) -> None:
    """What follows from the rows and from the mixing. Without reflections z is 0, too."""
    if maker.k:
        known.factor[:, :-2].copy_(rows.U)
        fill_maps(maker, rows, e, known.maps, known.constant)
    else:
        known.z.zero_()
    known.slope.copy_(activation_slope(maker.layout, rows.raw_delta))
    if known.slope_reads is not None:
        torch.mul(known.mixed, rows.s, out=known.written.mT)
        if maker.erases:
            known.written.mT.sub_(rows.erased)
        torch.mul(known.mixed, known.slope, out=known.slope_reads)
        if maker.options.input_scale == "bounded_delta":
            known.slope_reads.div_(torch.add(rows.delta, maker.one).square_())
