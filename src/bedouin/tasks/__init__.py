"""Synthetic tasks, generated with torch on the training device, without files or downloads.

task = WordProblem(Group.from_name("A5"), length=16)
tokens, labels = task.sample(128, stream("train", seed=0))  # two (b, t) int64 tensors
"""

from bedouin.tasks.arithmetic import ModularArithmetic
from bedouin.tasks.batch import IGNORE, Batch
from bedouin.tasks.bound_permutations import BoundPermutations
from bedouin.tasks.copying import Copying
from bedouin.tasks.group import (
    Group,
    alternating,
    cyclic,
    dihedral,
    direct_product,
    generating_set,
    symmetric,
)
from bedouin.tasks.metrics import (
    last_position_accuracy,
    scale_accuracy,
    scaled_accuracy,
    sequence_accuracy,
    token_accuracy,
)
from bedouin.tasks.mqar import MQAR
from bedouin.tasks.parity import Parity
from bedouin.tasks.streams import Split, Stream, stream
from bedouin.tasks.word_problem import WordProblem

__all__ = [
    "IGNORE",
    "MQAR",
    "Batch",
    "BoundPermutations",
    "Copying",
    "Group",
    "ModularArithmetic",
    "Parity",
    "Split",
    "Stream",
    "WordProblem",
    "alternating",
    "cyclic",
    "dihedral",
    "direct_product",
    "generating_set",
    "last_position_accuracy",
    "scale_accuracy",
    "scaled_accuracy",
    "sequence_accuracy",
    "stream",
    "symmetric",
    "token_accuracy",
]
