"""Plans that distribute products with W^y over persistent programs, for several devices."""

import itertools

import pytest
import torch

planning = pytest.importorskip("bedouin.kernels.direct.triton_plan")

H100, A100 = planning.Device(132, 232448), planning.Device(108, 166912)
SMALL, OLD = planning.Device(46, 101376), planning.Device(80, 49152)
DEVICES = {"h100": H100, "a100": A100, "small": SMALL, "old": OLD}
BATCHES, WIDTHS = (1, 8, 16, 64, 128, 200), (6, 128, 1000, 1024)
WIDEST = {
    ("h100", torch.bfloat16): 1024,
    ("h100", torch.float32): 128,
    ("a100", torch.bfloat16): 1024,
    ("a100", torch.float32): 128,
    ("small", torch.bfloat16): 128,
    ("small", torch.float32): 128,
    ("old", torch.bfloat16): 0,  # not enough shared memory
    ("old", torch.float32): 0,
}
"""The largest of WIDTHS that has a plan; in float32 a wide tile would be unrolled too far."""


@pytest.mark.parametrize(("device", "dtype"), WIDEST)
def test_a_plan_exists_up_to_a_width_and_fits_the_device(device: str, dtype: torch.dtype) -> None:
    properties, size = DEVICES[device], dtype.itemsize
    for b, d in itertools.product(BATCHES, WIDTHS):
        r = 5 * d + 36
        plan = planning.plan_product(r, d, torch.empty(1, dtype=dtype), b, properties)
        assert (plan is not None) == (d <= WIDEST[device, dtype]), (b, d)
        if plan is None:
            continue
        tile = plan.block_m * plan.block_k * plan.chunks
        vectors = plan.block_k * plan.block_b * (2 if plan.chunks > 1 else 1)
        assert (tile + vectors) * size <= properties.shared_memory
        wide = planning.plan_product(d, r + 4, torch.empty(1, dtype=dtype), b, properties)
        assert wide is None or wide.block_m * wide.block_k * wide.chunks + vectors <= (
            properties.shared_memory // size
        )
        tiles = -(-r // plan.block_m) * plan.splits
        assert tiles <= plan.programs == properties.programs
        assert plan.block_k * plan.chunks * plan.splits >= d
        assert plan.separate == (tiles + b <= plan.programs)
        # otherwise warpgroups would repeat each other's products
        assert plan.chunks == 1 or plan.block_m == planning.MAX_ROWS or size > 2


def test_the_size_of_the_paper_is_persistent_on_an_h100() -> None:
    W = torch.empty(1, dtype=torch.bfloat16)
    for b in (8, 16, 64, 128):
        assert planning.plan_product(5156, 1024, W, b, H100) is not None
        assert planning.plan_product(1024, 5184, W, b, H100) is not None
    # wider tiles, so that no program has a tile and a sample
    wide = planning.plan_product(1024, 5160, W, 64, H100)
    assert wide.separate and wide.block_k * wide.chunks == 768
    # in float32 a tile would be unrolled over too many columns
    assert planning.plan_product(5156, 1024, W.float(), 8, H100) is None
