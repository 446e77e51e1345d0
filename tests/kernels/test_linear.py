"""Shapes for fast matrix products: padded rows, and parts whose size is a multiple of eight."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from bedouin.kernels.linear import ALIGNMENT, in_eights, pad_rows, padding

sizes = st.integers(0, 300)


@given(sizes)
def test_padding_is_the_least_that_aligns(r: int) -> None:
    assert 0 <= padding(r) < ALIGNMENT and (r + padding(r)) % ALIGNMENT == 0


@given(sizes)
def test_padded_rows_are_zeros_below_the_matrix(r: int) -> None:
    W = torch.ones(r, 2)
    padded = pad_rows(W)
    assert padded.shape == (r + padding(r), 2)
    assert torch.equal(padded[:r], W) and not padded[r:].any()


@given(sizes, st.sampled_from([0, 1]))
def test_parts_in_eights_are_the_whole(size: int, axis: int) -> None:
    v = torch.arange(2.0 * size).view((2, size) if axis else (size, 2))
    parts = in_eights(v, axis)
    found = [part.shape[axis] for part in parts]
    assert found == ([size] if size < 8 or size % 8 == 0 else [size - size % 8, size % 8])
    assert torch.equal(torch.cat(parts, axis), v)
