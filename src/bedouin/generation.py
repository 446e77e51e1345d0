"""Generation: tokens that a model chooses one after the other.

The prompt is one call; each token after it is one step of a `Decoder`.
Letters: b batch, t time, v classes.
"""

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bedouin.checks import check_tensor
from bedouin.decode import Decoder
from bedouin.kernels.checks import check_count, check_number
from bedouin.layers.common import without_noise

READ_EVERY = 32  # tokens between two reads of whether all have ended, which synchronize a GPU


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits, as `SequenceModel.generate` describes it."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0, math.inf, open_low=False)
        check_count("top_k", self.top_k, optional=True)
        if self.top_p is not None:
            check_number("top_p", self.top_p, 0, 1, open_low=True)
        for name in ("top_k", "top_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} must be None with temperature=0, which takes the most probable token, "
                    f"got {getattr(self, name)}: use a temperature > 0"
                )
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise TypeError(
                f"generator must be None or a torch.Generator, got {type(self.generator).__name__}"
            )

    def choose(self, logits: Tensor) -> Tensor:  # (b, v) -> (b,)
        """A token for each sample."""
        if self.temperature == 0:
            return logits.argmax(-1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # the quotients of a small temperature, and its inverse, would overflow
        scaled = (wide - wide.amax(-1, keepdim=True)) / max(self.temperature, 1e-30)
        if self.top_k is not None:
            # by place, since several logits may equal the k-th largest, above all in bfloat16
            kept = scaled.topk(min(self.top_k, scaled.shape[-1]))
            scaled = torch.full_like(scaled, -torch.inf).scatter(-1, kept.indices, kept.values)
        probabilities = scaled.softmax(-1)
        if self.top_p is not None:
            ordered, index = probabilities.sort(-1, descending=True)
            # a class is kept while those before it have less than top_p, so the first always is
            chosen = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0)
            probabilities = torch.zeros_like(probabilities).scatter(-1, index, chosen)
        return torch.multinomial(probabilities, 1, generator=self.generator).squeeze(1)


@torch.no_grad()
def generate(
    model: Any,  # a SequenceModel
    prompt: Tensor,  # (b, t)
    max_new_tokens: int,
    sampling: Sampling,
    *,
    eos: int | None,
    mask: Tensor | None,  # (b, t)
) -> Tensor:  # (b, t + max_new_tokens)
    """`SequenceModel.generate`."""
    check_tensor("prompt", prompt, "(b, t)")
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(
            f"prompt must have shape (b, t) with at least one token, got {tuple(prompt.shape)}: "
            "begin with a token of its own for the start"
        )
    check_count("max_new_tokens", max_new_tokens, 0)
    check_count("eos", eos, 0, optional=True)
    inputs, classes = model.embedding.num_embeddings, model.head.out_features
    if inputs != classes:
        raise ValueError(
            "generate needs a model whose classes are its input ids, got vocab_size = "
            f"{inputs} and output_size = {classes}: leave output_size out"
        )
    if eos is not None and eos >= classes:
        raise ValueError(f"eos must be an id below vocab_size = {classes}, got {eos}")
    if max_new_tokens == 0 or len(prompt) == 0:
        return torch.cat([prompt, prompt.new_zeros(len(prompt), max_new_tokens)], 1)
    with without_noise():
        logits, state = model(prompt, return_state=True, mask=mask)
    if mask is not None and not mask.any(1).all():
        raise ValueError(
            "mask must be True for at least one token of each row of the prompt, which a new token "
            "follows, got a row without any: begin with a token of its own for the start"
        )
    decoder = Decoder(model, len(prompt), state=state)
    if mask is not None:  # that of each sample's last real token
        places = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask, places, 0).amax(1)
        logits = logits[torch.arange(len(mask), device=mask.device), last].unsqueeze(1)
    token = sampling.choose(logits[:, -1]).to(prompt.dtype)
    # a sample that has ended goes on with eos, so eos fills what is not computed
    result = prompt.new_full((len(prompt), max_new_tokens), 0 if eos is None else eos)
    result[:, 0] = token
    ended = torch.zeros_like(token, dtype=torch.bool)
    # processes that share a model by FSDP meet in every call, so none may stop before the others
    fsdp = sys.modules.get("torch.distributed.fsdp")
    stops = fsdp is None or not any(isinstance(m, fsdp.FSDPModule) for m in model.modules())
    for i in range(1, max_new_tokens):
        if eos is not None:
            ended = ended | (token == eos)
            if stops and (not token.is_cuda or i % READ_EVERY == 0) and ended.all():
                break
        token = sampling.choose(decoder(token)).to(prompt.dtype)
        if eos is not None:
            token = token.masked_fill(ended, eos)
        result[:, i] = token
    return torch.cat([prompt, result], 1)
