"""Fully sharded models (FSDP2) on two processes: training, states, decoding, checkpoints.

Letters: b batch, t time.
"""

import copy
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.layer_cases import in_chunks, in_steps, make, marks
from tests.processes import IMPORTS, end, start
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as model_state
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from bedouin import Bedouin, SequenceModel, param_groups
from bedouin.model import Block

FLOAT64: dict[str, Any] = {"dtype": torch.float64}

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


def make_model() -> SequenceModel:
    """With a layer of every kind that keeps a state."""
    names = ("one head", "vector, heads", "no mixing", "convolution", "lstm", "mamba")
    mixers = [make(name).train() for name in (*names, "delta product", "attention")]
    return SequenceModel(7, 4, mixers, mlp_expand=2, **FLOAT64)


def shard(model: SequenceModel) -> SequenceModel:
    mesh = make_mesh(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def make_mesh(module: nn.Module) -> DeviceMesh:
    return init_device_mesh(next(module.parameters()).device.type, (2,))


def train(model: SequenceModel, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()


def check_training_and_decoding(folder: str, device: str) -> None:
    plain = make_model().to(device)
    model = shard(copy.deepcopy(plain))
    assert type(plain.mixers[0].D) is nn.Parameter
    assert marks(model) == marks(plain)
    # SGD, because Adam turns the rounding error of a gradient of zero into a step
    networks = [
        (network, torch.optim.SGD(param_groups(network, weight_decay=0.1), lr=0.1))
        for network in (model, plain)
    ]
    tokens = torch.randint(7, (2, 4), device=device)
    # a step before any other call: nothing has been gathered yet
    step, _ = model.step(tokens[:, 0], model.init_state(2))
    torch.testing.assert_close(step, plain(tokens)[:, 0])
    for network, optimizer in networks:
        train(network, optimizer, tokens)
    chunks = in_chunks(model, tokens, None, [2, 2])
    for logits in (chunks[0], in_steps(model, tokens, model.init_state(len(tokens)))[0]):
        torch.testing.assert_close(logits, plain(tokens))
    # one process could end after the first token, but takes part in the calls of the other
    rank = dist.get_rank()
    prompt = tokens[rank : rank + 1]
    eos = int(plain.generate(prompt, 1)[0, -1]) if rank else None
    found = model.generate(prompt, 4, eos=eos)
    assert torch.equal(found, plain.generate(prompt, 4, eos=eos))
    whole = model_state.StateDictOptions(full_state_dict=True)
    for name, value in model_state.get_model_state_dict(model, options=whole).items():
        if not name.endswith("_extra_state"):  # the number of calls, of which `plain` had fewer
            torch.testing.assert_close(value, plain.state_dict()[name])
    saved = model_state.get_model_state_dict(model)
    save(saved, checkpoint_id=folder)
    torch.manual_seed(1)
    other = shard(make_model().to(device))
    assert not torch.equal(other(tokens), plain(tokens))
    values = model_state.get_model_state_dict(other)
    load(values, checkpoint_id=folder)
    model_state.set_model_state_dict(other, values)
    torch.testing.assert_close(other(tokens), plain(tokens))


def check_a_layer_alone(device: str) -> None:
    plain = Bedouin(4, device=device, **FLOAT64)
    layer: Any = fully_shard(copy.deepcopy(plain), mesh=make_mesh(plain))
    x_t, state = torch.randn(2, 4, device=device, **FLOAT64), plain.init_state(2)
    expected, _ = plain.step(x_t, state)
    torch.testing.assert_close(layer.step(x_t, state)[0], expected)
    register_fsdp_forward_method(layer, "step")
    torch.testing.assert_close(layer.step(x_t, state)[0], expected)
    # the hooks of a module around the layer do not run in calls of the layer
    around: Any = fully_shard(nn.Sequential(copy.deepcopy(plain)), mesh=make_mesh(plain))
    with pytest.raises(ValueError, match="got shards: FSDP gathers.*register_fsdp_forward_method"):
        around[0].step(x_t, state)
    # each projection a unit of its own, which gathers its weight when it is called
    parts = copy.deepcopy(plain)
    for name in ("in_proj", "x_proj", "y_proj", "out_proj"):
        fully_shard(getattr(parts, name), mesh=make_mesh(plain))
    x = torch.randn(2, 3, 4, device=device, **FLOAT64)
    torch.testing.assert_close(parts(x), plain(x))
    for network in (parts, plain):
        network(x).square().mean().backward()
    for (name, ours), theirs in zip(parts.named_parameters(), plain.parameters(), strict=True):
        grad: Any = ours.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(grad, theirs.grad, msg=name)


def check_a_rank_without_samples(device: str) -> None:
    """Its gradients count as zeros in the mean over the ranks."""
    plain = make_model().to(device)
    tokens = torch.randint(7, (2, 4), device=device)
    (plain(tokens).square().sum() / 2).backward()
    own = tokens if dist.get_rank() == 0 else tokens[:0]
    parallel: Any = DistributedDataParallel(copy.deepcopy(plain))
    sharded = shard(copy.deepcopy(plain))
    for model in (parallel, sharded):
        model.zero_grad()
        model(own).square().sum().backward()
    names = dict(plain.named_parameters())
    grads = [dict(model.named_parameters()) for model in (parallel.module, sharded)]
    for name, value in names.items():
        in_parallel, whole = grads[0][name].grad, grads[1][name].grad.full_tensor()
        torch.testing.assert_close(in_parallel, value.grad, msg=name)
        torch.testing.assert_close(whole, value.grad, msg=name)


def check_mixed_precision(device: str) -> None:
    """FSDP casts the states that it is given, and takes the calls that follow one another."""
    plain = make_model().float().to(device)
    tokens, low = torch.randint(7, (2, 4), device=device), torch.bfloat16
    with torch.no_grad():
        expected = plain(tokens)
    mesh, policy = make_mesh(plain), MixedPrecisionPolicy(param_dtype=low)
    second: Any = copy.deepcopy(plain)
    for block in second.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(second, mesh=mesh, mp_policy=policy)
    first: Any = FullyShardedDataParallel(
        copy.deepcopy(plain),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device(device),
        mixed_precision=MixedPrecision(param_dtype=low, cast_root_forward_inputs=True),
        use_orig_params=True,
    )
    start = plain.init_state(2)
    for model in (first, second):
        chunk, state = model(tokens[:, :2], start, return_state=True)
        rest, state = model(tokens[:, 2:], state, return_state=True)
        torch.testing.assert_close(torch.cat([chunk, rest], 1).float(), expected, rtol=0, atol=0.2)
        step, _ = model(tokens[:, 0], start, one_token=True)
        torch.testing.assert_close(step.float(), expected[:, 0], rtol=0, atol=0.2)
        rest.float().square().mean().backward()
    whole = Bedouin(4, device=device)
    layer: Any = fully_shard(copy.deepcopy(whole), mesh=mesh, mp_policy=policy)
    x, before = torch.randn(2, 3, 4, device=device), whole.init_state(2)
    output, state = layer(x, before, return_state=True)
    torch.testing.assert_close(output.float(), whole(x), rtol=0, atol=0.05)
    assert state.ssm.dtype == torch.float32
    token, _ = layer.step(x[:, 0], before)
    torch.testing.assert_close(token.float(), whole(x)[:, 0], rtol=0, atol=0.05)


def run_process(folder: str, device: str, rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = f"file://{folder}/store"
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2)
    try:
        with warnings.catch_warnings():
            # FSDP cannot follow outputs that are changed in place if they are views
            warnings.filterwarnings("error", message=".*returned a view tensor")
            check_training_and_decoding(f"{folder}/checkpoint", device)
        check_a_layer_alone(device)
        check_a_rank_without_samples(device)
        check_mixed_precision(device)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sharded_models_are_those_of_one_process(device: str, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    command = "-P", __file__, str(tmp_path), device
    end([start(*command, rank, PYTHONPATH=IMPORTS) for rank in "01"])


if __name__ == "__main__":
    run_process(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    # all is checked; a thread of torch.distributed that outlives the interpreter would now and then
    # abort the process
    os._exit(0)
