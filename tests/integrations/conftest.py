"""Tests against the real packages, which are skipped where a package is missing.

`make contracts` installs all packages and sets BEDOUIN_CONTRACTS=1: a skipped test is then a
failure, unless it needs a GPU or a process with interpreted kernels.
"""

import os

import pytest

_skipped: list[str] = []


def _record(report: pytest.CollectReport | pytest.TestReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    if report.skipped and not any(need in reason for need in ("CUDA device", "TRITON_INTERPRET")):
        _skipped.append(f"{report.nodeid}: {reason}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _record(report)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _record(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("BEDOUIN_CONTRACTS") == "1" and _skipped:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        raise pytest.UsageError("contract tests were skipped: " + "; ".join(_skipped))
