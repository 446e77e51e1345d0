"""The model for transformers on two processes, DDP, FSDP2 and tensors in parts, and compiled.

Letters: b batch, t time.
"""

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from tests.integrations.hf_models import HYBRID, MIXINGS, PAD, VOCAB, make_config
from tests.processes import IMPORTS, end, start_two
from torch import Tensor
from transformers.distributed import DistributedConfig

from bedouin.integrations.hf import BedouinForCausalLM

# The warnings of other libraries are no failures of this one.
pytestmark = pytest.mark.filterwarnings("default")

NAMES = "defaults", "convolved", "hybrid", "tracking"


def make_model(num_layers: int = 2, **options: Any) -> BedouinForCausalLM:
    torch.manual_seed(0)
    config = make_config(initializer_range=0.5, **options | {"num_hidden_layers": num_layers})
    model: BedouinForCausalLM = BedouinForCausalLM(config).double()
    return model


def rows() -> dict[str, Tensor]:
    """Four rows, two of which are padded on the left: two for each process."""
    torch.manual_seed(1)
    ids = torch.randint(1, VOCAB, (4, 6))
    mask = torch.arange(6) >= torch.tensor([[0], [2], [2], [0]])
    ids[~mask] = PAD
    labels = ids.masked_fill(~mask, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def part(batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    return {name: value[2 * rank : 2 * rank + 2] for name, value in batch.items()}


def make_accelerator(sharded: bool) -> Accelerator:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    if sharded:
        # accelerate takes its plugin on GPUs only, although FSDP2 works on CPUs; the blocks that it
        # wraps are those in the model's _no_split_modules
        plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="transformer_based_wrap")
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def check(folder: Path, sharded: bool, rank: int, **options: Any) -> None:
    plain, batch = make_model(**options), rows()
    accelerator = make_accelerator(sharded)
    model = copy.deepcopy(plain)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(hasattr(p, "full_tensor") == sharded for p in model.parameters())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        accelerator.backward(model(**part(batch, rank)).loss)
        # as many tokens in both parts, so that the mean of their losses is that of the whole
        plain(**batch).loss.backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    whole = accelerator.get_state_dict(model)
    if rank == 0:
        for name, value in plain.state_dict().items():
            if not name.endswith("_extra_state"):  # the number of calls
                torch.testing.assert_close(whole[name], value, msg=name)
    unwrapped = accelerator.unwrap_model(model)
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": batch["attention_mask"]}
    plain.eval()
    model.eval()
    tokens = unwrapped.generate(batch["input_ids"], **options)
    assert torch.equal(tokens, plain.generate(batch["input_ids"], **options))
    accelerator.save_state(folder / "state")
    main = accelerator.is_main_process
    unwrapped.save_pretrained(folder / "model", is_main_process=main, state_dict=whole)
    accelerator.wait_for_everyone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder / "state")
    torch.testing.assert_close(model(**batch).loss, plain(**batch).loss)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.testing.assert_close(loaded(**batch).loss, plain(**batch).loss)


def check_tensor_parallel(folder: Path, accelerator: Accelerator) -> None:
    """Attention, MLPs and the head are split by transformers; Bedouin layers are whole."""
    plain, batch = make_model(**HYBRID, vocab_size=VOCAB + 1), rows()
    if accelerator.is_main_process:
        plain.save_pretrained(folder)
    accelerator.wait_for_everyone()
    split = {"distributed_config": DistributedConfig(tp_plan="auto"), "dtype": torch.float64}
    model = BedouinForCausalLM.from_pretrained(folder, **split)
    found = {name for name, p in model.named_parameters() if hasattr(p, "full_tensor")}
    layers = [f"layers.{i}.mlp.1.{name}" for i in range(2) for name in ("in_proj", "out_proj")]
    layers += ["embed_tokens", *(f"layers.1.mixer.{name}_proj" for name in "qkvo")]
    assert found == {f"model.{name}.weight" for name in layers}
    for each in (model, plain):
        each(**batch).loss.backward()
    weight = "model.layers.0.mixer.in_proj.weight"
    gradients = (dict(each.named_parameters())[weight].grad for each in (model, plain))
    torch.testing.assert_close(*gradients)
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": batch["attention_mask"]}
    tokens = (each.eval().generate(batch["input_ids"], **options) for each in (model, plain))
    assert torch.equal(*tokens)


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """With DDP, with FSDP2, and with tensor parallelism."""
    end(start_two("-P", __file__, str(tmp_path), PYTHONPATH=IMPORTS))


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_model(name: str) -> None:
    """Whole graphs: forward and backward with padding, and `generate`, prompt and tokens."""
    torch.compiler.reset()
    model, batch = make_model(1 + (name == "hybrid"), **MIXINGS[name]), rows()
    expected = model(**batch)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(expected.loss, parameters)
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(**batch)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(torch.autograd.grad(found.loss, parameters), gradients)
    del batch["labels"]
    options: dict[str, Any] = batch | {"max_new_tokens": 3, "do_sample": False}
    tokens = model.eval().generate(**options)
    # in place, so that `generate` calls the graph
    model.compile(fullgraph=True, backend="eager")
    assert torch.equal(model.generate(**options), tokens)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        for sharded in (False, True):
            for name in NAMES:
                folder = Path(sys.argv[1]) / f"{name}, {sharded=}"
                check(folder, sharded, int(os.environ["RANK"]), **MIXINGS[name])
                AcceleratorState._reset_state()
        check_tensor_parallel(Path(sys.argv[1]) / "split", make_accelerator(sharded=False))
    finally:
        torch.distributed.destroy_process_group()
