"""Logging through the trackers of accelerate, such as tensorboard and wandb."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """Options of the logging."""

    trackers: tuple[str, ...] = ()
    """Also log to these trackers of accelerate, which must be installed, e.g. tensorboard or wandb;
    the JSON file has every number in any case."""

    def __post_init__(self) -> None:
        _check_installed(self.trackers)


def _check_installed(names: Collection[str]) -> None:
    """Raise ValueError for a tracker that is not installed; accelerate would leave it out."""
    installed = [name.value for name in get_available_trackers()]
    for name in names:
        if name not in installed:
            raise ValueError(f"--trackers must be among the installed {installed}, got {name!r}")


def tracked_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as values that every tracker takes: numbers, bools and strings."""
    listed = {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}
    return {n: v if isinstance(v, int | float | str) else str(v) for n, v in listed.items()}


def tracked_scores(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The numbers of several metrics, each by length, by the names that the trackers show."""
    return {f"{name}/{n}": value for name, values in scores.items() for n, value in values.items()}


def log_run(
    names: Iterable[str],
    project: str,
    folder: Path,
    options: Mapping[str, Any],
    entries: Iterable[tuple[int, Mapping[str, float]]],
    device: torch.device,
) -> None:
    """Log a whole run to each of the trackers: its options, and its numbers by step.

    It makes no Accelerator, which would fix the precision of all that the process trains.

    Args:
        folder: where trackers that write files do so, in a folder named after the project.
        device: that of the run.
    """
    entries = list(entries)
    for name in names:
        PartialState(cpu=device.type == "cpu")  # the trackers call functions that need one
        tracker = _make_tracker(name, project, folder)
        tracker.start()
        try:
            tracker.store_init_configuration(tracked_config(options))
            for step, numbers in entries:
                tracker.log(dict(numbers), step=step)
        finally:
            tracker.finish()


def _make_tracker(name: str, project: str, folder: Path) -> GeneralTracker:
    kind = LOGGER_TYPE_TO_CLASS[name]
    return kind(project, folder) if kind.requires_logging_directory else kind(project)
