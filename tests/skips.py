"""Skipped tests say of which kind they are, are counted by kind, and can be forbidden.

A skip's reason starts with its kind ("apex: it was not built here"); tests of a folder named like
a kind need not say it. With VIME_OPTIM_REQUIRE=gpu,ray (or all) a skip of such a kind fails, so
that a machine that has to have what a test needs cannot pass without it. A skip of no kind always
fails.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from pathlib import PurePosixPath
from typing import Any

import pytest

KINDS = {
    "gpu": "a CUDA device, or a second one",
    "transformer-engine": "NVIDIA Transformer Engine, a build of it that the GPU can run",
    "apex": "NVIDIA Apex, built with its CUDA extensions",
    "ray": "the extra `ray`",
    "clients": "the training frameworks that call Megatron",
}
VARIABLE = "VIME_OPTIM_REQUIRE"


def required(text: str | None = None) -> frozenset[str]:
    """The kinds that may not be skipped, from the variable.

    Raises:
        pytest.UsageError: a word that names no kind.
    """
    text = os.environ.get(VARIABLE, "") if text is None else text
    words = {word.strip() for word in text.split(",") if word.strip()}
    if unknown := words - KINDS.keys() - {"all"}:
        raise pytest.UsageError(
            f"{VARIABLE} names {', '.join(sorted(unknown))}; there are {', '.join(KINDS)} and all"
        )
    return frozenset(KINDS) if "all" in words else frozenset(words)


def kind_of(nodeid: str, reason: str) -> str | None:
    """The kind that a skip's reason begins with, else the one that the test's folder is named for.

    pytest puts "Skipped: " before the reason of one that a test or a fixture decided on.
    """
    named = reason.removeprefix("Skipped: ").partition(":")[0].strip()
    if named in KINDS:
        return named
    folders = PurePosixPath(nodeid.partition("::")[0]).parts[:-1]
    return next((folder for folder in folders if folder in KINDS), None)


def fault_of(nodeid: str, reason: str, forbidden: frozenset[str]) -> str | None:
    """Why this skip is a failure; None where it is allowed."""
    kind = kind_of(nodeid, reason)
    if kind is None:
        return f"this skip is of no known kind ({', '.join(KINDS)}); its reason: {reason}"
    if kind in forbidden:
        return f"skipped, and {VARIABLE} asks for `{kind}` ({KINDS[kind]}); its reason: {reason}"
    return None


def _reason(report: Any) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)


def _judge(report: Any) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        fault = fault_of(report.nodeid, _reason(report), required())
        if fault is not None:
            report.outcome, report.longrepr = "failed", fault


def pytest_configure(config: pytest.Config) -> None:
    """A word that is not understood stops the run before any test."""
    required()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    _judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    _judge(report)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line: how many tests of which kind did not run."""
    skipped = terminalreporter.stats.get("skipped", [])
    counts = Counter(kind_of(report.nodeid, _reason(report)) for report in skipped)
    if counts:
        text = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items(), key=str))
        terminalreporter.write_line(f"skipped, by kind: {text} (failures with {VARIABLE})")
