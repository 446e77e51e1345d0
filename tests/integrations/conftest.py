"""Tests against the real packages, which are skipped where a package is missing.

`make contracts` installs all packages and sets BEDOUIN_CONTRACTS=1: a skipped test is then a
failure, unless it needs a GPU or a process with interpreted kernels.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

_skipped: list[str] = []


def pytest_collectreport(report: pytest.CollectReport | pytest.TestReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    if report.skipped and not any(need in reason for need in ("CUDA device", "TRITON_INTERPRET")):
        _skipped.append(f"{report.nodeid}: {reason}")


pytest_runtest_logreport = pytest_collectreport


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("BEDOUIN_CONTRACTS") == "1" and _skipped:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        raise pytest.UsageError("contract tests were skipped: " + "; ".join(_skipped))


_NAMES = "defaults convolved hybrid windowed tracking memory tracker rnn paper"


@pytest.fixture(params=_NAMES.split())
def mixing(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of the mixers of a model for transformers."""
    from tests.integrations.hf_models import MIXINGS

    return MIXINGS[request.param]


@pytest.fixture
def model(mixing: dict[str, Any]) -> Any:
    from tests.integrations.hf_models import make_model

    return make_model(**mixing)


@pytest.fixture
def ids() -> Tensor:
    from tests.integrations.hf_models import VOCAB

    return torch.randint(1, VOCAB, (3, 7))
