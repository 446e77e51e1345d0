"""Language models: text, packed documents, bits per byte, several processes, generation."""

import dataclasses
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from tests.examples.training import interrupting, read_metrics
from tests.processes import IMPORTS, end, start_two
from torch import nn

import generate
import train_lm
from bedouin.generation import Sampling
from common import run as run_module
from common.options import make_layer
from common.run import Run
from common.script import leave_process_group
from flags import UsageError
from language.evaluation import batched, bits_per_byte
from language.text import END, VOCABULARY, TextOptions, make_corpus, read_corpora
from research import baselines
from research.baselines import BASELINES, count, make_baseline
from research.experiment import RESULTS
from research.experiments.language_model import COMPARED, SCORE, TUNING_SEED, language
from research.experiments.presets import CPU
from research.experiments.table import RATES
from research.runs import read_runs
from train_lm import LanguageConfig, make_model

LINES = "def {}(x):\n    return x\n"
SMALL: dict[str, Any] = {
    **{"device": "cpu", "d_model": 16, "warmup_steps": 1, "batch_size": 4, "length": 24},
    **{"steps": 4, "log_every": 2, "eval_every": 2, "checkpoint_every": 2, "eval_tokens": 64},
    **{"eval_bytes": 100, "final_bytes": 200},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"file{i}.py").write_text(LINES.format(f"f{i}") * (1 + i % 3))
    (folder / "notes.txt").write_text("no source")
    return folder


def small(text: Path, out: Path, **changes: Any) -> LanguageConfig:
    return LanguageConfig(**{**SMALL, "text": text, "out": out, **changes})


def corpora(text: Path, pattern: str | None = None) -> Any:
    return read_corpora(TextOptions(text=text, pattern=pattern, length=1))


def maker(mixer: str) -> Any:
    return make_layer if mixer == "bedouin" else make_baseline


def test_rows_hold_documents_their_labels_and_where_they_begin() -> None:
    corpus = make_corpus([b"ab", b"", b"c"])
    assert corpus.tokens.tolist() == [END, 97, 98, END, END, 99, END] and corpus.num_bytes == 3
    tokens, labels, document = corpus.rows(torch.tensor([0, 1]), 5)
    assert tokens.tolist() == [[END, 97, 98, END, END], [97, 98, END, END, 99]]
    assert labels.tolist() == [[97, 98, END, END, 99], [98, END, END, 99, END]]
    assert document.tolist() == [[1, 1, 1, 2, 3], [1, 1, 2, 3, 3]]
    drawn = corpus.draw(200, 5, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {0, 1}  # all places that have a label for every token


def test_pieces_cover_the_documents_once() -> None:
    corpus = make_corpus([b"abcde", b"", b"fg"])
    pieces = corpus.pieces(4, 100)
    assert sorted(pieces) == [(0, 4), (4, 6), (6, 7), (7, 10)] and pieces[0] == (0, 4)
    assert sorted(corpus.pieces(4, 8)) == [(0, 4), (4, 6), (6, 7), (7, 8)]
    assert batched(pieces, 5) == [[(0, 4)], [(7, 10), (4, 6)], [(6, 7)]]
    assert batched(pieces, 1) == [[piece] for piece in pieces]
    tokens, labels, cu_seqlens = corpus.packed(pieces[1:])
    assert tokens.tolist() == [[END, 102, 103, 100, 101, END]]
    assert cu_seqlens.tolist() == [0, 3, 5, 6]
    assert labels.tolist() == [[102, 103, END, 101, END, END]]


def test_files_are_held_out_by_their_names(text: Path, tmp_path: Path) -> None:
    training_part, held_out = corpora(text, "*.py")
    assert len(training_part.starts) + len(held_out.starts) == 40 and len(held_out.starts) >= 1
    for path in text.glob("*.py"):
        if path.name != "file7.py":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    without = corpora(tmp_path, "*.py")
    assert sum(len(part.starts) for part in without) == 39
    changed = [
        len(one.starts) - len(two.starts)
        for one, two in zip(without, (training_part, held_out), strict=True)
    ]
    assert sorted(changed) == [-1, 0]  # the other files are where they were
    with pytest.raises(UsageError, match=r"and to hold out, got 0 files with --pattern '\*.md'"):
        corpora(text, "*.md")


def test_the_last_part_of_one_file_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(bytes(range(160)))
    for text in (tmp_path / "book.txt", tmp_path):
        training_part, held_out = corpora(text)
        assert training_part.tokens.tolist() == [END, *range(150), END]
        assert held_out.tokens.tolist() == [END, *range(150, 160), END]
    with pytest.raises(UsageError, match="--pattern is for a folder, got the file .*leave it out"):
        corpora(tmp_path / "book.txt", "*.txt")
    with pytest.raises(UsageError, match="must be a file or a folder, got .*/none, which does not"):
        corpora(tmp_path / "none")
    (tmp_path / "book.txt").write_bytes(b"short")
    with pytest.raises(UsageError, match="--text must have text to train with and to hold out"):
        corpora(tmp_path / "book.txt")


def test_a_folder_is_read_without_a_pattern_and_each_file_once(tmp_path: Path) -> None:
    """Links to a file are no files of their own, and do not bring it into both parts."""
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden").write_text("no text")
    sizes = 0
    for i in range(40):
        path = tmp_path / f"chapter{i}.{'txt' if i % 2 else 'md'}"
        path.write_text("word " * (i + 1))
        sizes += path.stat().st_size
        for name in ("l", "link-"):
            (tmp_path / f"{name}{i}").symlink_to(path)
        (tmp_path / f"z{i}").hardlink_to(path)
    parts = corpora(tmp_path)
    assert sum(len(part.starts) for part in parts) == 40
    assert sum(part.num_bytes for part in parts) == sizes
    links = corpora(tmp_path, "l*")
    assert sum(part.num_bytes for part in links) == sizes


def test_the_library_is_read_without_its_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    places = {"stdlib": str(tmp_path), "purelib": str(packages)}
    monkeypatch.setattr("sysconfig.get_path", places.get)
    for i in range(40):
        (tmp_path / f"module{i}.py").write_text("x")
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "more.py").write_text("y")
    (tmp_path / "notes.txt").write_text("z")
    for i in range(50):
        (packages / f"package{i}.py").write_text("xy")
    options = TextOptions(length=1)
    assert sum(corpus.num_bytes for corpus in read_corpora(options)) == 40
    options = TextOptions(length=1, packages=True)
    assert sum(corpus.num_bytes for corpus in read_corpora(options)) == 101
    with pytest.raises(UsageError, match="--packages is for runs without --text, got"):
        read_corpora(TextOptions(text=packages, packages=True))


def test_a_hybrid_has_attention_in_its_place() -> None:
    config = dataclasses.replace(train_lm.CPU, num_layers=4, attention_every=2)
    kinds = [type(mixer).__name__ for mixer in make_model(config).mixers]
    assert kinds == ["Bedouin", "Attention"] * 2


class Uniform(nn.Module):
    """Every token has the same probability."""

    def forward(self, tokens: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*tokens.shape, VOCABULARY)


def test_bits_per_byte_counts_the_ends_of_documents() -> None:
    corpus = make_corpus([b"abcde", b"", b"fg"])
    batches = batched(corpus.pieces(3, 100), 4)
    found = bits_per_byte(Accelerator(cpu=True), Uniform(), corpus, batches)
    assert found == pytest.approx(10 / 7 * math.log2(VOCABULARY))


@pytest.mark.parametrize("mixer", ["bedouin", *BASELINES])
def test_pieces_are_evaluated_as_if_alone(mixer: str, text: Path, tmp_path: Path) -> None:
    config = small(text, tmp_path, layer=mixer, num_layers=2, mlp_expand=2.0)
    model = make_model(config, maker(mixer)).double().eval()
    corpus = make_corpus([b"abcde", b"", b"fghij" * 3])
    pieces, accelerator = corpus.pieces(7, 100), Accelerator(cpu=True)
    packed, alone = (
        bits_per_byte(accelerator, model, corpus, batched(pieces, tokens)) for tokens in (100, 1)
    )
    assert packed == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 2, "mlp_expand": 2.0, "autocast": "bf16"},
        *({"layer": name} for name in ("mamba", "deltaproduct", "lstm", "attention")),
    ],
    ids=str,
)
def test_every_layer_learns(
    changes: dict[str, Any], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(text, tmp_path, steps=8, lr=2e-2, eval_lengths=(8,), eval_every=4, **changes)
    train_lm.main(config, maker(config.layer))
    metrics = read_metrics(tmp_path)
    before, after = (entry["bits_per_byte"]["24"] for entry in metrics["history"])
    assert after < before < 8 and metrics["history"][1]["loss"] < metrics["history"][0]["loss"]
    assert metrics["bits_per_byte"].keys() == {"8", "24"} and metrics["tokens_per_second"] > 0
    assert metrics["text"]["training_files"] + metrics["text"]["held_out_files"] == 41
    assert metrics["parameters"] == size(config)
    assert (tmp_path / "bits_per_byte.png").stat().st_size > 5000
    assert (tmp_path / "sample.txt").read_text()
    assert f"python examples/generate.py --run {tmp_path}" in capsys.readouterr().out
    assert count(generate.load_model(tmp_path, torch.device("cpu"))) == size(config)


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in read_metrics(folder)["history"]]


PARALLEL: dict[str, Any] = {
    **{"num_heads": 2, "mlp_expand": 2.0, "steps": 3, "eval_every": 3, "checkpoint_every": 1}
}


@pytest.mark.slow
def test_parts_and_processes_do_not_change_the_training(text: Path, tmp_path: Path) -> None:
    train_lm.main(small(text, tmp_path / "one", **PARALLEL))
    train_lm.main(small(text, tmp_path / "parts", accumulate=4, **PARALLEL))
    end(start_two("-P", __file__, str(text), str(tmp_path), PYTHONPATH=IMPORTS))
    expected = read_metrics(tmp_path / "one")
    for name in ("parts", "replicated", "sharded"):
        found = read_metrics(tmp_path / name)
        assert found["processes"] == (1 if name == "parts" else 2)
        # sums of gradients in another order, in float32, through three steps of Adam
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-4), name
        assert found["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-4), name
    # a model that was sharded is saved whole
    weights = load_file(tmp_path / "sharded" / "model.safetensors")
    model = generate.load_model(tmp_path / "sharded", torch.device("cpu"))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def run_process(text: Path, folder: Path) -> None:
    """Train replicated and sharded, the latter with an interruption."""
    torch.set_num_threads(1)
    train_lm.main(small(text, folder / "replicated", accumulate=2, **PARALLEL))
    AcceleratorState._reset_state()

    def sharding_accelerator(*args: Any, fsdp_plugin: Any, **options: Any) -> Accelerator:
        # accelerate takes its plugin on GPUs only, although FSDP2 works on CPUs
        accelerator = Accelerator(*args, **options)
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.fsdp_plugin = fsdp_plugin
        return accelerator

    update, seen = Run.update, []

    def updating(run: Run, *args: Any, **shown: Any) -> None:
        seen.append(all(hasattr(p, "full_tensor") for p in run.model.parameters()))
        update(run, *args, **shown)

    config = small(text, folder / "sharded", accumulate=2, shard=True, **PARALLEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "Accelerator", sharding_accelerator)
        patch.setattr(Run, "update", updating)
        with interrupting(2), pytest.raises(KeyboardInterrupt):
            train_lm.main(config)
        train_lm.main(dataclasses.replace(config, resume=True))
    assert seen == [True, True, True]


def test_bad_options_are_named(text: Path, tmp_path: Path) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "--preset must be auto, cpu or gpu": {"preset": "paper"},
        "--length must be below the": {"length": 10**6},
        "--shard needs several GPUs": {"shard": True},
    }
    for message, changes in wrong.items():
        with pytest.raises(ValueError, match=message):
            train_lm.main(small(text, tmp_path, **changes))


def parsed(runs: Any) -> list[LanguageConfig]:
    """The configurations of runs, with their baselines."""
    return [baselines.parse(train_lm, run.arguments)[0] for run in runs]


def size(config: LanguageConfig) -> int:
    """The number of parameters of the model that is trained."""
    own = config.layer not in BASELINES
    with torch.device("meta"):
        return count(make_model(config, make_layer if own else make_baseline))


def test_languages_are_reported_at_the_best_rate(tmp_path: Path) -> None:
    """The runs of results, among them the further rates of layers whose best of three is at an
    edge; without runs there is nothing to report."""
    made = {
        n: run for n, run in read_runs(RESULTS / "language").items() if not n.startswith("recall")
    }
    runs = language(RESULTS)[0].runs
    reported = [run for run in runs if "-seed" in run.name]
    tuning = [run for run in runs if run not in reported]
    rates = {name for name in made if re.search(r"-0\.\d+$", name)}
    assert {run.name for run in tuning} == rates
    configs = parsed(tuning)
    assert {config.seed for config in configs} == {TUNING_SEED}
    sizes = [size(config) for config in configs if config.lr == 1e-3]
    assert all(abs(n / sizes[0] - 1) < 0.02 for n in sizes)
    assert len(reported) == 3 * len(COMPARED)
    for run, config in zip(reported, parsed(reported), strict=True):
        name, _, seed = run.name.partition("-seed")
        own = [rate for rate in rates if rate.rpartition("-")[0] == name]
        best = min(own, key=lambda rate: float(made[rate]["bits_per_byte"][SCORE]))
        assert made[run.name]["config"]["lr"] == config.lr == float(best.rpartition("-")[2])
        assert config.seed == int(seed)
    untuned = language(tmp_path)[0].runs
    assert len(untuned) == len(RATES) * len(COMPARED)
    assert {config.seed for config in parsed(untuned)} == {TUNING_SEED}


def test_the_lstm_has_the_size_and_the_steps_of_the_model_of_make_lm() -> None:
    runs = {run.name: run for run in CPU.runs}
    own, other = parsed([runs["bedouin-seed0"], runs["lm_lstm-seed0"]])
    assert dataclasses.replace(own, preset="auto") == dataclasses.replace(
        train_lm.CPU, seed=0, preset="auto"
    )
    assert own.steps == other.steps and own.num_layers == other.num_layers
    assert abs(size(other) / size(own) - 1) < 0.02


def test_generated_text_is_that_of_the_model(
    text: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    train_lm.main(small(text, tmp_path))
    model = generate.load_model(tmp_path, torch.device("cpu"))
    prompt = b"def "
    whole = model.generate(torch.tensor([[END, *prompt]]), 12, eos=END)[0, 1 + len(prompt) :]
    expected = bytes(token for token in whole.tolist() if token != END)
    streamed = b"".join(generate.stream_bytes(model, prompt, 12, Sampling()))
    assert streamed == expected
    capfdbinary.readouterr()
    config = generate.Config(run=tmp_path, prompt="def ", length=5, device="cpu")
    generate.main(config)
    first = capfdbinary.readouterr()
    assert first.out.startswith(b"def ") and b"bytes/s" in first.err
    generate.main(config)
    assert capfdbinary.readouterr().out == first.out  # the same seed
    with pytest.raises(UsageError, match="--run: there is no checkpoint in"):
        generate.load_model(text, torch.device("cpu"))
    with pytest.raises(ValueError, match="--top-k must be None with --temperature=0"):
        generate.Config(run=tmp_path, temperature=0.0, top_k=3)


if __name__ == "__main__":
    run_process(Path(sys.argv[1]), Path(sys.argv[2]))
    leave_process_group()
    # threads of torch that still run when its objects are destroyed abort the process at times
    os._exit(0)
