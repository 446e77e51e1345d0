"""The map of a layer whose heads read the outputs of all heads (feedback_scope="layer").

Its iterates have all d channels of a sample, because the heads of a sample converge together.

Letters: b batch, t time, p channels of a head, H heads, d = H p; b' = H b folded samples.
"""

from collections.abc import Callable

from torch import Tensor

from bedouin.fixed_point_map import FixedPointMap, StructuredMap
from bedouin.kernels.direct import Sweep
from bedouin.kernels.heads import fold, unfold
from bedouin.packing import tokens_before
from bedouin.solvers import Solver
from bedouin.solvers.base import GraphMap
from bedouin.solvers.solution import BackwardStats, Solution


class JoinedHeads:
    """y (b, t, d) -> F(y), with the structure of the map `f` of folded samples."""

    def __new__(cls, f: FixedPointMap, num_heads: int) -> "JoinedHeads":
        # solvers ask a map for the methods that they need
        if isinstance(f, GraphMap):
            return super().__new__(_GraphHeads)
        return super().__new__(_StructuredHeads if isinstance(f, StructuredMap) else cls)

    def __init__(self, f: FixedPointMap, num_heads: int) -> None:
        self.f, self.num_heads = f, num_heads

    @property
    def real(self) -> Tensor | None:  # (b, t)
        """Which tokens come before the padding; None: all."""
        lengths = self.f.lengths
        if lengths is None:
            return None
        b = lengths.shape[0] // self.num_heads
        return tokens_before(lengths[:b], self.f.operands.x.shape[1])

    def __call__(
        self,
        y: Tensor,  # (b, t, d)
    ) -> Tensor:  # (b, t, d)
        """F(y)."""
        return self._unfolded(self.f(self._folded(y)))

    def memory(
        self,
        y: Tensor,  # (b, t, d)
    ) -> Tensor:  # (b', p, n)
        """h of the folded samples after the last token of y."""
        return self.f.memory(self._folded(y))

    def _folded(
        self,
        y: Tensor,  # (b, t, d)
    ) -> Tensor:  # (b', t, p)
        return fold(y, self.num_heads)

    def _unfolded(
        self,
        y: Tensor,  # (b', t, p)
    ) -> Tensor:  # (b, t, d)
        return unfold(y, self.num_heads)

    def _by_head(
        self,
        v: Tensor,  # (b', ...)
    ) -> Tensor:  # (H, b, ...)
        return v.reshape(self.num_heads, v.shape[0] // self.num_heads, *v.shape[1:])


class _StructuredHeads(JoinedHeads):
    """With a mixer of the form (e, U, M)."""

    f: StructuredMap
    _swept: tuple[Tensor, Tensor] | None = None  # the y of the last sweep, and that of `f`

    def memory(
        self,
        y: Tensor,  # (b, t, d)
    ) -> Tensor:  # (b', p, n)
        if self._swept is not None and self._swept[0] is y:
            return self.f.memory(self._swept[1])
        return super().memory(y)

    def sweep(self, unroll: bool, cell: BackwardStats) -> Sweep:
        """The exact solve, with the largest norms and the smallest pivot of a sample's heads."""
        found = self.f.sweep(unroll, cell)
        norms = found.defect, found.scale, found.magnitude
        defect, scale, magnitude = (self._by_head(v).amax(0) for v in norms)
        pivot = self._by_head(found.pivot).amin(0)
        y = self._unfolded(found.y)
        self._swept = y, found.y
        return Sweep(y, found.h, defect, scale, magnitude, pivot)

    def attach(
        self,
        y_star: Tensor,  # (b, t, d)
        cell: BackwardStats,
    ) -> Tensor:  # (b, t, d)
        """y_star with the exact implicit gradient."""
        return self._unfolded(self.f.attach(self._folded(y_star), cell))

    def block_solve(
        self,
        y: Tensor,  # (b, t, d)
    ) -> tuple[Tensor, Tensor]:
        """G(y) (b, t, d) and the smallest pivot (b,)."""
        solved, pivot = self.f.block_solve(self._folded(y))
        return self._unfolded(solved), self._by_head(pivot).amin(0)

    def block_transpose(
        self,
        y_star: Tensor,  # (b, t, d)
    ) -> tuple[Callable[[Tensor], Tensor], ...]:
        """The functions of `StructuredMap.block_transpose` on (b, t, d)."""

        def joined(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda v: self._unfolded(function(self._folded(v)))

        return tuple(joined(f) for f in self.f.block_transpose(self._folded(y_star)))


class _GraphHeads(_StructuredHeads):
    """Traced by torch.compile: the operations of `f` join its heads for a y of their width."""

    def solve_in_graph(
        self,
        solver: Solver,
        y0: Tensor,  # (b, t, d)
        max_steps: int,
    ) -> Solution | None:
        assert isinstance(self.f, GraphMap)
        return self.f.solve_in_graph(solver, y0, max_steps)

    def attach_in_graph(
        self,
        solver: Solver,
        y_star: Tensor,  # (b, t, d)
        max_steps: int,
    ) -> Tensor | None:  # (b, t, d)
        assert isinstance(self.f, GraphMap)
        return self.f.attach_in_graph(solver, y_star, max_steps)
