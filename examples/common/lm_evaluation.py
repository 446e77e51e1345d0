"""Bits per byte on held-out documents, over all processes.

Letters: t time, v classes.
"""

import math

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from common.lm_text import END, Corpus

Piece = tuple[int, int]
"""Begin and end in the tokens of a corpus."""


@torch.no_grad()
def bits_per_byte(
    accelerator: Accelerator, model: nn.Module, corpus: Corpus, pieces: list[Piece], tokens: int
) -> float:
    """The bits that the model needs for the tokens after those of the pieces, ends of documents
    included, divided by the number of bytes among them.

    Every piece begins with the state zero. tokens: about how many are processed at once.
    """
    batches = batched(pieces, tokens)
    processes, rank = accelerator.num_processes, accelerator.process_index
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # nats, bytes
    model.eval()
    # every process calls the model equally often, because parts of a sharded model meet in a call
    for index in range(rank, math.ceil(len(batches) / processes) * processes, processes):
        with accelerator.autocast():
            found = nats_and_bytes(model, corpus, batches[min(index, len(batches) - 1)])
        if index < len(batches):
            sums += found
    model.train()
    nats, num_bytes = accelerator.reduce(sums, reduction="sum").tolist()
    return float(nats / math.log(2) / num_bytes)


def nats_and_bytes(model: nn.Module, corpus: Corpus, pieces: list[Piece]) -> Tensor:  # (2,) float64
    """The sum of the losses, and the number of labels that are bytes."""
    tokens, labels, cu_seqlens = corpus.packed(pieces)
    logits = model(tokens, cu_seqlens=cu_seqlens)  # (1, t, v)
    nats = cross_entropy(logits[0].float(), labels[0], reduction="none").double().sum()
    return torch.stack([nats, (labels != END).sum()])


def batched(pieces: list[Piece], tokens: int) -> list[list[Piece]]:
    """Pieces in their order, in lists of at most `tokens` tokens or of one piece."""
    found: list[list[Piece]] = []
    left = 0
    for start, stop in pieces:
        if stop - start > left or not found:
            found.append([])
            left = tokens
        found[-1].append((start, stop))
        left -= stop - start
    return found
