"""Language models of about 130 million parameters, and what is measured of them.

Every model is initialized at random and has bfloat16 parameters. A training step is the loss of
b x t tokens, its gradients and a step of AdamW; decoding is greedy.

Letters: b batch, t time, v vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

from bedouin import Decoder, SequenceModel, TrackingDeltaNet
from bedouin.baselines import LSTM, Mamba
from bedouin.integrations.linear_cross_entropy import linear_cross_entropy
from benchmarks.measure import Numbers
from benchmarks.timing import capture, median_ms, peak_gib
from research.baselines import count

MIXERS: dict[str, Callable[..., nn.Module]] = {
    "tracking": TrackingDeltaNet,
    "mamba": Mamba,
    "lstm": LSTM,
}
"""This repository's models: `SequenceModel` around a layer."""

DEPTHS = {"tracking": 17, "mamba": 24, "lstm": 6, "attention": 13, "mamba-ssm": 24}
"""Layers of each model: of the attention model of transformers (Llama) with an MLP, of mamba-ssm's
as published; the others have the number with which they are about as large."""

COMMON = ("train", "decode-1", "decode-64")
GRAPHS = ("captured", "compiled")  # last: a capture that fails can disturb what follows
TASKS = {
    "tracking": (*COMMON, "vocabulary-torch", "vocabulary-liger", "vocabulary-fla", *GRAPHS),
    "mamba": (*COMMON, "vocabulary-torch", "vocabulary-fla", *GRAPHS),
    "mamba-ssm": (*COMMON, *GRAPHS),
    "lstm": (*COMMON, *GRAPHS),
    "attention": (*COMMON, *GRAPHS, "decode-compiled-1", "decode-compiled-64"),
}
"""What is measured of each model: training steps as they are, as a replayed CUDA graph, with
compiled blocks, and at a large vocabulary with a fused loss; decoding at a batch size."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the models and of their inputs."""

    device: torch.device
    v: int = 50280
    large_v: int = 2**17
    m: int = 768
    b: int = 8
    t: int = 2048
    depth: int | None = None  # Layers of every model; None: those of DEPTHS.
    tokens: int = 64  # Tokens decoded in a timed call.
    repeats: int = 8  # Timed training steps.

    @classmethod
    def tiny(cls, device: torch.device) -> "Sizes":
        """Toy sizes, whose times are meaningless."""
        return cls(device, v=31, large_v=64, m=128, b=2, t=8, depth=2, tokens=2, repeats=1)


def measure(name: str, task: str, sizes: Sizes) -> Numbers:
    """Tokens a second, milliseconds of a step or of a token, and on a GPU peak GiB."""
    kind, _, option = task.partition("-")
    if kind == "decode":
        variant, _, batch = option.rpartition("-")
        return _decoding(name, sizes, int(batch), compiled=variant == "compiled")
    if kind == "captured" and sizes.device.type != "cuda":
        raise ValueError("a CUDA graph needs a GPU")
    step = _Step(name, sizes, kind=kind, kernel=option)
    numbers: Numbers = {"parameters": count(step.model)}
    call: Callable[[int], object] = step
    if kind == "captured":
        torch.cuda.reset_peak_memory_stats()
        graph = capture(lambda: step(0))
        numbers["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        call = lambda i: graph.replay()  # noqa: E731
    else:
        numbers["peak_gib"] = peak_gib(lambda: step(0), sizes.device)
    ms = median_ms(call, sizes.device, sizes.repeats)
    return numbers | {"ms": ms, "tokens_per_second": 1e3 * sizes.b * sizes.t / ms}


class _Step:
    """A training step of a new model, always on the same tokens."""

    def __init__(self, name: str, sizes: Sizes, *, kind: str, kernel: str) -> None:
        large, device = kind == "vocabulary", sizes.device
        v = sizes.large_v if large else sizes.v
        self.model, self.kernel = _build(name, sizes, v), kernel
        self.weight: Tensor | None = None
        if large:
            self.weight, self.model.head = self.model.head.weight, nn.Identity()
        if kind == "compiled":
            torch._dynamo.config.recompile_limit = 64
            for block in next(m for m in self.model.modules() if isinstance(m, nn.ModuleList)):
                block.compile()
        on_gpu = device.type == "cuda"
        options: dict[str, Any] = {"fused": on_gpu, "capturable": kind == "captured"}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **options)
        self.tokens = torch.randint(v, (sizes.b, sizes.t + 1), device=device)

    def __call__(self, i: int) -> None:
        self.optimizer.zero_grad()
        found, labels = _logits(self.model, self.tokens[:, :-1]), self.tokens[:, 1:].flatten()
        if self.weight is None:
            loss = cross_entropy(found.flatten(0, 1).float(), labels)
        else:
            kernel: Any = self.kernel
            loss = linear_cross_entropy(found.flatten(0, 1), self.weight, labels, kernel=kernel)
            loss = loss / len(labels)
        loss.backward()
        self.optimizer.step()


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:  # (b, t) -> (b, t, v)
    found = model(tokens)
    logits: Tensor = getattr(found, "logits", found)
    return logits


def _build(name: str, sizes: Sizes, v: int) -> Any:
    """The model, in bfloat16. Raises ImportError if its package is not installed."""
    torch.manual_seed(0)
    depth = DEPTHS[name] if sizes.depth is None else sizes.depth
    factory: dict[str, Any] = {"device": sizes.device, "dtype": torch.bfloat16}
    m = sizes.m
    if name in MIXERS:
        layers = [MIXERS[name](m, **factory) for _ in range(depth)]
        tied = {"tie_embeddings": True, "embedding_std": m**-0.5}
        return SequenceModel(v, m, layers, **tied, **factory)
    if name == "mamba-ssm":
        package = import_module("mamba_ssm.models.mixer_seq_simple")
        config = package.MambaConfig(d_model=m, n_layer=depth, vocab_size=v)
        return package.MambaLMHeadModel(config, **factory)
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=v,
        hidden_size=m,
        intermediate_size=8 * m // 3,
        num_hidden_layers=depth,
        num_attention_heads=m // 64,
        tie_word_embeddings=True,
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
        pad_token_id=0,
        use_cache=False,
    )
    with torch.device(sizes.device):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


@torch.no_grad()
def _decoding(name: str, sizes: Sizes, b: int, *, compiled: bool) -> Numbers:
    """Of a recurrence one token after another; of a model with `generate` the difference of two
    calls, because that processes a prompt first."""
    model, device, many = _build(name, sizes, sizes.v).eval(), sizes.device, sizes.tokens
    if name in MIXERS:
        one = _decoder(model, b, device, is_captured=name != "tracking")

        def stretch(i: int) -> None:
            for _ in range(many):
                one()

        ms = median_ms(stretch, device, 5) / many
    else:
        calls = [_generation(name, model, b, device, n, compiled=compiled) for n in (1, 1 + many)]
        few_ms, many_ms = (median_ms(call, device, 3) for call in calls)
        ms = (many_ms - few_ms) / many
    return {"parameters": count(model), "ms": ms, "tokens_per_second": 1e3 * b / ms}


def _decoder(
    model: SequenceModel, b: int, device: torch.device, *, is_captured: bool
) -> Callable[[], object]:
    """A function that decodes one token: by `Decoder`, which captures the layers that have kernels
    for it, or by `step`, here as a CUDA graph."""
    token = torch.zeros(b, dtype=torch.long, device=device)
    if not is_captured or device.type != "cuda":
        decoder = Decoder(model, b)
        return lambda: token.copy_(decoder(token).argmax(-1))
    state = model.init_state(b)

    def step() -> None:
        logits, after = model.step(token, state)
        token.copy_(logits.argmax(-1))
        for old, new in zip(tree_leaves(state), tree_leaves(after), strict=True):
            old.copy_(new)

    return capture(step).replay


def _generation(
    name: str, model: Any, b: int, device: torch.device, n: int, *, compiled: bool
) -> Callable[[int], object]:
    """A function that generates n tokens after a prompt of 16."""
    prompt = torch.ones(b, 16, dtype=torch.long, device=device)
    if name == "mamba-ssm":
        return lambda i: model.generate(prompt, max_length=16 + n, cg=device.type == "cuda")
    options: dict[str, Any] = {"cache_implementation": "static"} if compiled else {}
    options |= {"max_new_tokens": n, "do_sample": False, "use_cache": True}
    return lambda i: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
