"""Branches of a CUDA graph: the numbers of one chain of launches, at every replay."""

import pytest
import torch
from torch import Tensor

from bedouin.kernels.branches import beside, branched, join


def branching(x: Tensor) -> tuple[Tensor, Tensor]:  # (n,) -> (n,), (n,)
    """3 x + 2, a part of it on a branch, and x^2 on another, for which nothing waits."""
    with beside("state", x):
        doubled = 2 * x
        doubled = doubled + 1
    y = x.exp().log() + 1
    with beside("statistics", x):
        squared = x.square()
    join("state", doubled)
    return y + doubled, squared


def test_without_a_capture_the_order_is_that_of_the_calls() -> None:
    x = torch.tensor([1.0, 2.0])
    y, squared = branching(x)
    assert torch.allclose(y, 3 * x + 2) and torch.equal(squared, x * x)
    join("state")  # nothing was opened


@pytest.mark.gpu
def test_every_replay_has_the_numbers_of_one_chain() -> None:
    """With memory that is freed and asked for again on each of the streams."""
    x = torch.zeros(10_000, device="cuda")

    def chain(v: Tensor) -> tuple[Tensor, Tensor]:
        squares = []
        for _ in range(20):
            v, squared = branching(0.3 * v)
            squares.append(squared.sum())
        return v, torch.stack(squares)

    def captured() -> tuple[Tensor, ...]:
        squares, v = [], x
        for _ in range(20):
            v, squared = branching(0.3 * v)
            with beside("statistics"):
                squares.append(squared.sum())
        return v, *squares

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), branched():
        captured()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), branched():
        y, *squares = captured()
    for _ in range(50):
        x.normal_()
        graph.replay()
        expected, sums = chain(x)
        assert torch.equal(y, expected) and torch.equal(torch.stack(squares), sums)
