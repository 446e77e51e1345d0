"""Options of `train_lm.py`, and the model that they describe."""

from dataclasses import dataclass
from pathlib import Path

from bedouin import SequenceModel
from common.checks import Count
from common.lm_text import VOCABULARY
from common.options import RunConfig, build_model


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(RunConfig):
    """Train a language model of bytes on files of text."""

    text: Path | None = None
    """Folder of the text, with all folders below it, of which one file of 16, chosen by a hash of
    its name, is held out; or one file, whose last sixteenth is held out. None: the source of
    Python's library, without its tests."""
    pattern: str | None = None
    """Names of the files in the folder; None: all that are not hidden, or *.py without --text."""
    length: Count = 1024
    """Tokens of a training row; documents in a row are kept apart."""
    batch_size: Count = 64
    """Rows of an optimizer step, those of all processes together."""
    accumulate: Count = 1
    """Parts of a batch, whose gradients are added up: more of them need less memory."""
    shard: bool = False
    """Distribute parameters, gradients and the optimizer's state over several GPUs (FSDP2);
    otherwise every process has all of them."""
    eval_lengths: tuple[Count, ...] = ()
    """Lengths of the pieces into which held-out files are cut; --length is always one of them."""
    eval_bytes: Count = 2**17
    """Held-out bytes of an evaluation during training."""
    final_bytes: Count = 2**22
    """Held-out bytes of the evaluation after training."""
    eval_tokens: Count = 2**16
    """Tokens of an evaluation batch, at least one piece."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset == "paper":
            raise ValueError("--preset must be auto, cpu or gpu, got paper: it has no such task")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"--accumulate must divide --batch-size = {self.batch_size}, got {self.accumulate}"
            )


def build_language_model(config: LanguageConfig) -> SequenceModel:
    """The model, (b, t) tokens -> (b, t, VOCABULARY), initialized from the seed."""
    return build_model(config, VOCABULARY, VOCABULARY)
