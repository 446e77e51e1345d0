"""Padded rows and packed documents: statistics, kernels, errors."""

from typing import Any

import pytest
import torch
from tests.layer_cases import check_alone, random_state, rows_of
from torch import Tensor

from bedouin import Bedouin, LowRank
from bedouin.solvers import (
    Anderson,
    Broyden,
    Direct,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    UnrolledAdjoint,
)
from bedouin.testing import assert_close

KINDS: list[dict[str, Any]] = [
    {"solver": Direct()},
    {"solver": Direct(), "adjoint": UnrolledAdjoint()},
    {"solver": Direct(), "mixer": LowRank(2), "input_scale": "one_minus_decay"},
    {"solver": Picard(rtol=1e-13, atol=0.0)},
    {"solver": Picard(rtol=1e-3), "adjoint": OneStepAdjoint()},
    {"solver": Picard(rtol=1e-9, patience=2), "adjoint": PhantomAdjoint(2)},
    {"solver": Picard(rtol=0.1, stop_rule="paper"), "adjoint": OneStepAdjoint()},
    {"solver": Picard(rtol=1e-9), "adjoint": UnrolledAdjoint()},
    {"solver": Jacobi(rtol=1e-13, atol=0.0), "mixer": LowRank(2)},
    {"solver": Jacobi(rtol=1e-9), "adjoint": ImplicitAdjoint(Jacobi(rtol=1e-9, atol=0.0))},
    {"solver": Jacobi(rtol=1e-9), "adjoint": ImplicitAdjoint(Picard(rtol=1e-9, atol=0.0))},
    {"solver": Anderson(rtol=1e-9), "adjoint": ImplicitAdjoint(Anderson(rtol=1e-9))},
    {"solver": Broyden(rtol=1e-9), "adjoint": ImplicitAdjoint(Broyden(rtol=1e-9, atol=0.0))},
]


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(map(str, o.values()))[:60])
@pytest.mark.parametrize(("num_heads", "documents"), [(1, True), (2, False)])
def test_statistics_are_those_of_the_tokens(
    options: dict[str, Any], num_heads: int, documents: bool
) -> None:
    """Steps, residual and pivot, of the solve and of its adjoint, for every solver and adjoint."""
    layer = Bedouin(4, num_heads=num_heads, dtype=torch.float64, **options)
    x = torch.randn(4, 6, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 1, 1], [0] * 6, [1] * 6]).bool()
    before: Any = random_state(layer, 4)
    # quasi-Newton steps sum over all tokens, in another order if there is padding
    rough = isinstance(layer.solver, Anderson | Broyden)
    places: dict[str, Any] = {"mask": mask}
    if documents:
        # one document in each row, as the padding has no index
        places["seq_idx"] = torch.where(mask, 7, torch.arange(6))
    pieces = rows_of(mask)
    check_alone(layer, x, pieces, before, 1e-7 if rough else 1e-11, 1e-13, **places)
    layer(x, before, **places).sum().backward()
    found = layer.stats
    assert found is not None and found.converged.all()
    for i, piece in enumerate(pieces):
        output = layer(x[piece].unsqueeze(0), before[i : i + 1])
        output.sum().backward()
        one = layer.stats
        assert one is not None
        if piece.any() and one.backward is not None:
            assert found.backward is not None and found.backward.converged.all()
            assert rough or found.backward.num_steps[i] == one.backward.num_steps[0]
            back = found.backward.residual[i], one.backward.residual[0]
            assert_close("residual of the adjoint", *back, 1e-2, 1e-9 if rough else 1e-12)
        assert found.num_steps[i] == one.num_steps[0]
        assert_close("residual", found.residual[i], one.residual[0], 1e-2, 1e-12)
        if one.conditioning is not None and found.conditioning is not None:
            assert_close("pivot", found.conditioning[i], one.conditioning[0], 1e-11)


@torch.no_grad()
def test_masks_of_an_ensemble() -> None:
    """vmap over stacked parameters, and over masks."""
    layers = [Bedouin(4, dtype=torch.float64) for _ in range(2)]
    x, mask = torch.randn(3, 5, 4, dtype=torch.float64), torch.rand(3, 5) > 0.4
    parameters, _ = torch.func.stack_module_state(list(layers))

    def run(values: dict[str, Tensor], mask: Tensor) -> Any:
        return torch.func.functional_call(layers[0], values, (x,), {"mask": mask})

    found = torch.func.vmap(run)(parameters, torch.stack([mask, ~mask]))
    for output, layer, rows in zip(found, layers, (mask, ~mask), strict=True):
        assert_close("output", output, layer(x, mask=rows), 1e-12)


def test_documents_under_the_compiler(caplog: pytest.LogCaptureFixture) -> None:
    """The graph breaks where the host reads them, without a word from the compiler."""
    layer = Bedouin(4, dtype=torch.float64)
    compiled = torch.compile(layer, backend="aot_eager")
    for t in (5, 7):
        x, bounds = torch.randn(1, t, 4, dtype=torch.float64), torch.tensor([0, 2, t])
        found = compiled(x, cu_seqlens=bounds)
        assert_close("output", found, layer(x, cu_seqlens=bounds), 1e-12)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [1, 8])
def test_masks_on_a_gpu(num_heads: int, no_synchronization: Any) -> None:
    """Without waiting for the GPU, and captured; documents are refused during a capture."""
    layer = Bedouin(64, num_heads=num_heads, device="cuda")
    x, mask = torch.randn(4, 32, 64, device="cuda"), torch.rand(4, 32, device="cuda") > 0.3
    layer(x, mask=mask).sum().backward()
    with no_synchronization():
        output, state = layer(x, return_state=True, mask=mask)
        output.sum().backward()
    for i in range(4):
        alone, after = layer(x[i][mask[i]].unsqueeze(0), return_state=True)
        # float32, in other sums: as many tokens in another batch
        assert_close(f"row {i}", output[i][mask[i]], alone[0], 1e-3)
        assert_close(f"ssm {i}", state.ssm[i], after.ssm[0], 1e-3)
    graph, bounds = torch.cuda.CUDAGraph(), torch.tensor([0, 32], device="cuda")
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = layer(x, mask=mask)
        with pytest.raises(ValueError, match="cu_seqlens must be None during the capture"):
            layer(x[:1], cu_seqlens=bounds)
    graph.replay()
    assert_close("captured", captured, output, 1e-4)


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mask": [True]}, TypeError, "mask must be a tensor (b, t), got list"),
    ({"mask": torch.ones(1, 4)}, TypeError, "mask must have dtype torch.bool, got torch.float32"),
    ({"mask": torch.ones(1, 3).bool()}, ValueError,
     "mask must have shape (b, t) = (1, 4), got (1, 3)"),
    ({"mask": torch.ones(1, 4, device="meta").bool()}, ValueError,
     "mask must be on the device of x"),
    ({"seq_idx": torch.ones(1, 4)}, TypeError,
     "seq_idx must have dtype torch.int32 or torch.int64, got torch.float32"),
    ({"cu_seqlens": [0, 4]}, TypeError,
     "cu_seqlens must be a tensor (documents + 1,), got list: convert it with torch.as_tensor"),
    ({"cu_seqlens": torch.tensor([0.0, 4.0])}, TypeError, "cu_seqlens must have dtype torch.int32"),
    ({"cu_seqlens": torch.tensor(4)}, ValueError, "cu_seqlens must have shape (documents + 1,)"),
    ({"cu_seqlens": torch.tensor([0, 3])}, ValueError,
     "cu_seqlens must ascend from 0 to t = 4, got [0, 3]"),
    ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, ValueError, "cu_seqlens must ascend from 0"),
    ({"cu_seqlens": torch.tensor([1, 4])}, ValueError, "cu_seqlens must ascend from 0"),
    ({"cu_seqlens": torch.tensor([0, 4]), "seq_idx": torch.ones(1, 4).int()}, ValueError,
     "at most one of cu_seqlens and seq_idx says where documents begin, got both"),
    ({"cu_seqlens": torch.tensor([0, 9]), "mask": torch.ones(1, 4).bool()}, ValueError,
     "cu_seqlens must ascend from 0 to t = 4, got [0, 9]"),
    ({"seq_idx": torch.ones(1, 4).int(), "mask": torch.ones(1, 4)}, TypeError,
     "mask must have dtype torch.bool"),
    ({"cu_seqlens": torch.tensor([0, 2, 4]), "state": Bedouin(2).init_state(1)}, ValueError,
     "state.ssm must have shape (2, 4, 16), got (1, 4, 16)"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), ERRORS, ids=lambda v: str(v)[:50])
def test_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        Bedouin(2)(torch.zeros(1, 4, 2), **options)
    assert message in str(caught.value)


def test_documents_need_a_single_row() -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens needs a single row, x \(1, t, m\)"):
        Bedouin(2)(torch.zeros(2, 4, 2), cu_seqlens=torch.tensor([0, 4]))
