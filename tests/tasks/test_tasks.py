"""What holds of all tasks: labels, splits, sizes, devices, messages."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import of, of_kind, refused
from tests.tasks.rows import check, check_row, padded, rows_of

from bedouin.tasks import (
    IGNORE,
    MQAR,
    BoundPermutations,
    Copying,
    Group,
    ModularArithmetic,
    Parity,
    WordProblem,
    cyclic,
    stream,
    symmetric,
)

A5, S5, Z2, Z5 = Group.from_name("A5"), symmetric(5), cyclic(2), cyclic(5)
groups = st.sampled_from(["S3", "A5", "Z7", "D4", "A4xZ5"]).map(Group.from_name)

STRATEGIES = {
    "word problem": st.builds(WordProblem, groups, st.integers(1, 20)),
    "fillers": st.builds(
        WordProblem,
        st.just(S5),
        st.integers(1, 9),
        tokens_per_transition=st.integers(1, 4),
        label_at=st.sampled_from(["transition", "every", "last"]),
    ),
    "restricted": st.builds(
        WordProblem,
        st.just(S5),
        st.integers(1, 9),
        st.sampled_from(["swaps", "3-permutations"]),
        include_identity=st.booleans(),
    ),
    "generators": st.builds(
        WordProblem,
        st.sampled_from([A5, S5]),
        generators=st.integers(4, 12),
        generator_seed=st.integers(0, 99),
    ),
    "official": st.builds(WordProblem, groups, st.integers(1, 9), protocol=st.just("official")),
    "copying": st.builds(
        lambda low, more, room, letters: Copying(
            2 * (low + more) + 3 + room, low, low + more, letters
        ),
        *(st.integers(1, 6), st.integers(0, 5), st.integers(0, 40), st.sampled_from([2, 5, 26])),
    ),
    "parity": st.builds(
        lambda least, more, label_at: Parity(least + more, least, label_at),
        *(st.integers(1, 12), st.integers(0, 8), st.sampled_from(["last", "every"])),
    ),
    "arithmetic": st.builds(
        lambda modulus, brackets, least, more, multiplication: ModularArithmetic(
            modulus, brackets, 2 * (least + more), 2 * least, multiplication
        ),
        *(st.integers(2, 12), st.booleans(), st.integers(1, 12), st.integers(0, 8)),
        st.booleans(),
    ),
    "bracketed": st.builds(ModularArithmetic, brackets=st.just(True), length=st.integers(2, 60)),
    "MQAR": st.builds(
        lambda r, more, half: MQAR(2 * half, 4 * r + 2 * more, r),
        *(st.integers(1, 6), st.integers(0, 10), st.integers(7, 40)),
    ),
    "bound permutations": st.builds(
        lambda group, m, more, least, longer: BoundPermutations(
            Group.from_name(group), m, m + more, least, least + longer
        ),
        *(st.sampled_from(["S3", "A4", "Z7"]), st.integers(1, 6), st.integers(0, 20)),
        *(st.integers(1, 9), st.integers(0, 9)),
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@settings(max_examples=40)
@given(st.data(), st.integers(0, 6), st.integers(0, 99), st.sampled_from(["train", "test"]))
def test_labels_are_what_reading_the_row_gives(
    strategy: Any, data: st.DataObject, b: int, seed: int, split: Any
) -> None:
    task = data.draw(strategy)
    batch = task.sample(b, stream(split, seed))
    assert len(batch.tokens) == b
    check(task, batch)


FILLED = "3 5 0 5 4 5 1 5 1 5 2 5"
DOCUMENTED: list[tuple[Any, str, str]] = [
    (WordProblem(Z5, 6), "3 0 4 1 1 2", "3 3 2 3 4 1"),
    (WordProblem(Z5, 6, protocol="official"), "6 3 0 4 1 1 2", "6 3 3 2 3 4 1"),
    (WordProblem(Z5, 6, tokens_per_transition=2), FILLED, ". 3 . 3 . 2 . 3 . 4 . 1"),
    *(
        (WordProblem(Z5, 6, tokens_per_transition=2, label_at=label_at), FILLED, labels)  # type: ignore[arg-type]
        for label_at, labels in (
            ("every", "0 3 3 3 3 2 2 3 3 4 4 1"),
            ("last", ". . . . . . . . . . . 1"),
        )
    ),
    (Copying(24, 2, 4), "$bat|bat.$node|node.$ox|", "    bat.      node."),
    (Copying(24, 2, 4), "$owl|owl.", "    owl."),
    (Parity(6, 3), "1 0 1 1 0 1", ". . . . . 0"),
    (Parity(6, 3), "1 1 1 0 2 2", ". . . 1 . ."),
    (Parity(6, 3, "every"), "1 0 1 1 0 1", "1 1 0 1 1 0"),
    (Parity(6, 3, "every"), "1 1 1 0 2 2", "1 0 1 1 . ."),
    (ModularArithmetic(length=10, min_length=4), "2-3-3*2+4=", ".........2"),
    (ModularArithmetic(length=10, min_length=4), "4*3+1=____", ".....3...."),
    (ModularArithmetic(brackets=True, length=13), "((-4)*(2+3))=", "............0"),
    (MQAR(12, 16, 2), "2 8 4 7 * * 4 * * * 2 * * * * *", "            7       8"),
    (
        BoundPermutations(Z5, 2, 2, 5, 5),
        "a 3 f 4 a . f . ! a 1 ? a a . * * * *",
        "          3   2         1   3",
    ),
]


def id_of(task: Any, symbol: str) -> int:
    """The token of a symbol in the docstring of a task."""
    if hasattr(task, "symbols"):
        return int(task.symbols.index(symbol))
    if isinstance(task, BoundPermutations):
        names, others = "abcdefghijklmnopqrstuvwxyz", "01234!?.*"  # of Z5
        return names.find(symbol) if symbol in names else 26 + others.index(symbol)
    return 0 if symbol == "*" else int(symbol)  # any token


@pytest.mark.parametrize(("task", "row", "labels"), DOCUMENTED)
def test_the_rows_of_the_docstring(task: Any, row: str, labels: str) -> None:
    """They are judged right, and so is what judges the others."""
    assert all(of in str(type(task).__doc__) for of in (row, labels))
    step = 1 if hasattr(task, "symbols") else 2  # with a blank between two tokens
    tokens = [id_of(task, symbol) for symbol in row[::step]]
    with_symbols = isinstance(task, Copying)
    answers = [
        IGNORE if v in " ." and not (v == "." and with_symbols)
        else (id_of(task, v) if with_symbols else int(v))
        for v in labels[::step]
    ]  # fmt: skip
    check_row(task, tokens, padded(answers, tokens), None)


CALLS: dict[str, tuple[Any, dict[str, Any], tuple[int, int]]] = {
    "word problem": (WordProblem(A5, 6, tokens_per_transition=3), {}, (2, 18)),
    "another length": (WordProblem(A5, 6, tokens_per_transition=3), {"length": 11}, (2, 33)),
    "copying": (Copying(), {}, (2, 32)),
    "copying one string": (Copying(), {"length": 20}, (2, 43)),
    "official copying": (Copying(protocol="official"), {"length": 5}, (2, 32)),
    "long official copying": (Copying(protocol="official"), {"length": 20}, (2, 43)),
    "parity": (Parity(), {}, (2, 40)),
    "parity without padding": (Parity(40, 3), {"length": 70}, (2, 70)),
    "arithmetic": (ModularArithmetic(length=256, min_length=40), {}, (2, 256)),
    "brackets": (ModularArithmetic(brackets=True, length=256, min_length=40), {}, (2, 256)),
    "another number of tokens": (ModularArithmetic(brackets=True), {"length": 21}, (2, 21)),
    "MQAR": (MQAR(), {}, (2, 256)),
    "another MQAR": (MQAR(64, 24, 2), {"length": 48}, (2, 48)),
    "bound permutations": (BoundPermutations(), {}, (2, 128)),
}
calls = pytest.mark.parametrize(("task", "options", "shape"), CALLS.values(), ids=CALLS)


@calls
def test_a_call(task: Any, options: dict[str, Any], shape: tuple[int, int]) -> None:
    batch, again = (task.sample(2, stream("test", 5), **options) for _ in range(2))
    assert batch.tokens.shape == shape
    check(task, batch, **options)
    assert all(torch.equal(v, w) for v, w in zip(batch, again, strict=True))
    other = task.sample(2, stream("test", 6), **options)
    assert not torch.equal(batch.tokens, other.tokens)
    moved = task.sample(2, stream("train", 0), device="meta", **options)
    assert moved.tokens.shape == moved.labels.shape == shape
    assert moved.tokens.device.type == moved.labels.device.type == "meta"
    torch.set_default_dtype(torch.float64)
    try:
        again = task.sample(2, stream("test", 5), **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(v, w) for v, w in zip(batch, again, strict=True))


@pytest.mark.gpu
@calls
def test_rows_are_made_on_the_gpu_without_waiting(
    task: Any, options: dict[str, Any], shape: tuple[int, int], no_synchronization: Any
) -> None:
    generator = stream("train", 0, "cuda")
    task.sample(2, generator)  # the first call copies the table of a group to the device
    with no_synchronization():
        batch = task.sample(64, generator, **options)
    assert batch.tokens.is_cuda
    check(task, batch, **options)


@pytest.mark.parametrize(
    ("task", "vocab_size", "output_size", "chance"),
    [
        (WordProblem(A5), 60, 60, 1 / 60),
        (WordProblem(A5, tokens_per_transition=4), 61, 60, 1 / 60),
        (WordProblem(A5, protocol="official"), 67, 67, 1 / 60),
        (WordProblem(S5, elements="swaps"), 120, 120, 1 / 120),
        (Copying(), 30, 30, 1 / 26),
        (Parity(), 3, 2, 1 / 2),
        (ModularArithmetic(), 10, 5, 1 / 5),
        (ModularArithmetic(11, brackets=True, multiplication=False), 18, 11, 1 / 11),
        (MQAR(), 8192, 8192, 1 / 8192),
        (BoundPermutations(), 90, 60, 1 / 60),
    ],
)
def test_sizes(task: Any, vocab_size: int, output_size: int, chance: float) -> None:
    found = task.vocab_size, task.output_size, task.chance
    assert found == (vocab_size, output_size, chance)


@pytest.mark.parametrize(
    ("task", "last", "train_rows", "test_rows"),
    [
        (WordProblem(Z5, 3), 2, 100, 25),
        (WordProblem(Z2, 4), 3, 8, 8),
        (WordProblem(symmetric(3), 1), 0, 5, 1),
        (ModularArithmetic(3, length=4), 2, 18, 9),
        (ModularArithmetic(3, brackets=True, length=6), 3, 18, 9),
        (Parity(5), 4, 16, 16),
        (MQAR(4, 4, 1), 1, 4, 4),
    ],
)
def test_splits_share_the_whole_space(
    task: Any, last: int, train_rows: int, test_rows: int
) -> None:
    """Rows that differ in the last element that is drawn are distributed among both splits."""
    train, test, both = (
        rows_of(task.sample(4000, generator).tokens)
        for generator in (stream("train", 0), stream("test", 0), torch.Generator().manual_seed(0))
    )
    assert not train & test and train | test == both
    assert rows_of(task.sample(99, torch.Generator(), split="test").tokens) <= test
    assert (len(train), len(test)) == (train_rows, test_rows)
    prefixes, others = ({row[:last] + row[last + 1 :] for row in split} for split in (train, test))
    assert prefixes == others


@pytest.mark.parametrize(
    ("task", "padding", "exact"),
    [
        (Parity(9, 1), 2, [Parity(1), Parity(4), Parity(5)]),
        (ModularArithmetic(3, False, 12, 2), 7, [ModularArithmetic(3, False, n) for n in (2, 4)]),
        (ModularArithmetic(3, True, 12, 2), 9, [ModularArithmetic(3, True, n) for n in (2, 4, 6)]),
        (BoundPermutations(Z2, 1, 3, 1, 3), 31, [BoundPermutations(Z2, 1, 1, 1, 1)]),
    ],
)
def test_padding_changes_no_split(task: Any, padding: int, exact: list[Any]) -> None:
    """Padded rows of a train stream against rows of exactly one length of a test stream."""
    train = rows_of(task.sample(6000, stream("train", 0)).tokens, padding)
    for shorter in exact:
        test = rows_of(shorter.sample(6000, stream("test", 0)).tokens, padding)
        assert not train & test
        lengths = {len(row) for row in test}
        assert sum(len(row) in lengths for row in train) > len(test) / 2 > 0


TASKS: dict[Any, str] = {
    WordProblem(A5): "at least 1",
    Copying(): "at least 1",
    Parity(): "at least 1",
    ModularArithmetic(): "at least 2",
    MQAR(): "at least 1",
    BoundPermutations(): "",
}
"""Tasks with what the length of a call must be."""
NUMBERS: list[tuple[Any, tuple[Any, ...], str]] = [
    (WordProblem, (A5,), "length tokens_per_transition generators"),
    (Copying, (), "context_len min_length max_length num_letters"),
    (Parity, (), "length"),
    (ModularArithmetic, (), "modulus length"),
    (MQAR, (), "vocab_size length num_pairs"),
    (BoundPermutations, (), "min_definitions max_definitions min_operations max_operations"),
]
TRAIN = stream("train", 0)
FIELDS = of_kind(ValueError, [
    (of(WordProblem, A5, length=0), "length must be at least 1, got 0"),
    (of(WordProblem, A5, tokens_per_transition=0),
     "tokens_per_transition must be at least 1, got 0"),
    (of(WordProblem, A5, elements="some"),
     "elements must be one of ('all', 'swaps', ...got 'some'"),
    (of(WordProblem, A5, protocol="mine"), "one of ('plain', 'official'), got 'mine'"),
    (of(WordProblem, A5, elements="swaps"), 'two elements of A5 ... got 0: use elements="all"'),
    (of(WordProblem, group=cyclic(1)), "at least two elements of Z1"),
    (of(WordProblem, A5, protocol="official", tokens_per_transition=2), "no fillers, got 2"),
    (of(WordProblem, A5, label_at="first"), "one of ('transition', 'every', 'last'), got 'first'"),
    (of(WordProblem, A5, label_at="last", protocol="official"), "must be 'transition' with"),
    (of(WordProblem, A5, include_identity=True), 'include_identity=True needs elements="swaps"'),
    (of(WordProblem, A5, generators=1), "generators must be in [2, 60), got 1"),
    (of(WordProblem, A5, generators=4, elements="swaps"), "needs elements=\"all\", got 'swaps'"),
    (of(WordProblem, A5, generators=4, generator_seed=-1), "generator_seed must be at least 0"),
    (of(WordProblem, A5, generator_seed=3), "generator_seed must be 0 without generators, got 3"),
    (of(Copying, min_length=0), "min_length must be at least 1, got 0"),
    (of(Copying, min_length=9), "at most max_length, got min_length=9"),
    (of(Copying, context_len=18), "2·max_length + 3 = 19, got 18: raise it"),
    (of(Copying, num_letters=1), "num_letters must be in [2, 26], got 1"),
    (of(Copying, protocol="mine"), "protocol must be one of ..., got 'mine'"),
    (of(Parity, length=0), "length must be at least 1, got 0"),
    (of(Parity, min_length=41), "min_length must be in [1, 41), got 41"),
    (of(Parity, label_at="first"), "label_at must be one of ('last', 'every'), got 'first'"),
    (of(ModularArithmetic, modulus=1), "modulus must be at least 2, got 1"),
    (of(ModularArithmetic, length=1), "length must be at least 2, got 1"),
    (of(ModularArithmetic, length=41), "must be even without brackets, got 41: digits and"),
    (of(ModularArithmetic, min_length=1), "min_length must be in [2, 41), got 1"),
    (of(MQAR, vocab_size=3), "vocab_size must be at least 4, got 3"),
    (of(MQAR, num_pairs=0), "num_pairs must be in [1, 4096), got 0"),
    (of(MQAR, length=127), "length must be even and at least 4 num_pairs = 128, got 127"),
    (of(MQAR, length=126), "length must be even and at least 4 num_pairs = 128, got 126"),
    (of(MQAR, power=0.0), "power must be > 0, got 0.0"),
    (of(BoundPermutations, group=cyclic(1)), "group must have at least two elements, got Z1"),
    (of(BoundPermutations, min_definitions=17), "min_definitions must be in [1, 17), got 17"),
    (of(BoundPermutations, max_definitions=27), "max_definitions must be in [1, 27), got 27"),
    (of(BoundPermutations, min_operations=33), "min_operations must be in [1, 33), got 33"),
    (of(BoundPermutations, max_operations=0), "max_operations must be at least 1, got 0"),
    (of(ModularArithmetic().sample, 1, TRAIN, length=7),
     "length must be even without brackets, got 7"),
    (of(ModularArithmetic().sample, 1, TRAIN, length=1), "length must be at least 2, got 1"),
    (of(MQAR().sample, 1, TRAIN, num_pairs=65), "at least 4 num_pairs = 260, got 256"),
    (of(BoundPermutations().sample, 1, TRAIN, definitions=27),
     "definitions must be in [1, 27), got 27"),
    (of(BoundPermutations().sample, 1, TRAIN, operations=0),
     "operations must be at least 1, got 0"),
    *((of(task.sample, -1, TRAIN), "batch_size must be at least 0, got -1") for task in TASKS),
    *((of(task.sample, 1, TRAIN, split="test"), "split must be that of the stream")
      for task in TASKS),
    *((of(task.sample, 1, torch.Generator(), split="both"), "split must be one of")
      for task in TASKS),
    *((of(task.sample, 1, TRAIN, length=0), f"length must be {least}, got 0")
      for task, least in TASKS.items() if least),
]) + of_kind(TypeError, [
    *((of(task.sample, 2.0, TRAIN), "batch_size must be an int, got 2.0") for task in TASKS),
    *((of(task.sample, 1, 0), "generator must be a torch.Generator, got 0") for task in TASKS),
    *((of(task.sample, 1, TRAIN, length=True), "length must be an int, got True")
      for task, least in TASKS.items() if least),
    *((of(kind, *group, **{name: value}), f"{name} must be an int, got {value!r}")
      for kind, group, names in NUMBERS for name in names.split()
      for value in (True, 2.0, "2", None) if (name, value) != ("generators", None)),
    *((of(WordProblem, A5, generators=4, generator_seed=value),
       f"generator_seed must be an int, got {value!r}") for value in (True, 2.0, "2", None)),
    *((of(kind, "A5"), "group must be a Group, got 'A5'...Group.from_name")
      for kind in (WordProblem, BoundPermutations)),
])  # fmt: skip

test_bad_fields_and_calls = refused(FIELDS)
