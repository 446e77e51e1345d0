"""Options of `train_lm.py`, and the model that they describe."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bedouin import SequenceModel
from common.checks import check_ranges, whole
from common.layers import count
from common.lm_text import VOCABULARY
from common.matching import matching_width
from common.options import RunConfig, build_model


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(RunConfig):
    """Train a language model of bytes on files of text."""

    text: Path | None = None
    """Folder of the text, with all folders below it; None: the source of Python's library, without
    its tests. One file of 16, chosen by a hash of its name, is held out."""
    pattern: str = "*.py"
    """Names of the files in --text."""
    length: int = 1024
    """Tokens of a training row; documents in a row are kept apart."""
    batch_size: int = 64
    """Rows of an optimizer step, those of all processes together."""
    accumulate: int = 1
    """Parts of a batch, whose gradients are added up: more of them need less memory."""
    match_parameters: int | None = None
    """Replace --d-model by the width, a multiple of 32, with which the model has about this many
    parameters."""
    shard: bool = False
    """Distribute parameters, gradients and the optimizer's state over several GPUs (FSDP2);
    otherwise every process has all of them."""
    eval_lengths: tuple[int, ...] = ()
    """Lengths of the pieces into which held-out files are cut; --length is always one of them."""
    eval_bytes: int = 2**17
    """Held-out bytes of an evaluation during training."""
    final_bytes: int = 2**22
    """Held-out bytes of the evaluation after training."""
    eval_tokens: int = 2**16
    """Tokens of an evaluation batch, at least one piece."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, _RANGES, ("match_parameters",))
        if self.preset == "paper":
            raise ValueError("--preset must be auto, cpu or gpu, got paper: it has no such task")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"--accumulate must divide --batch-size = {self.batch_size}, got {self.accumulate}"
            )


_RANGES = dict.fromkeys(
    (
        *("length", "accumulate", "match_parameters", "eval_lengths", "eval_bytes"),
        *("final_bytes", "eval_tokens"),
    ),
    whole(1),
)


def build_language_model(config: LanguageConfig) -> SequenceModel:
    """The model, (b, t) tokens -> (b, t, VOCABULARY), initialized from the seed."""
    return build_model(config, VOCABULARY, VOCABULARY)


def matched(config: LanguageConfig) -> LanguageConfig:
    """The configuration with the width that `match_parameters` asks for.

    Raises ValueError if even the narrowest model has 1.5 times as many parameters.
    """
    if config.match_parameters is None:
        return config

    def size(d_model: int) -> int:
        return num_parameters(replace(config, d_model=d_model))

    return replace(config, d_model=matching_width(size, config.match_parameters))


def num_parameters(config: LanguageConfig) -> int:
    """The number of parameters of the model, which is not made."""
    with torch.device("meta"):
        return count(build_language_model(config))
