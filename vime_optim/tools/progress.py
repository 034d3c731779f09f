"""A progress bar in bytes, on stderr and only where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


@contextmanager
def progress(label: str, total_bytes: int, enabled: bool = True) -> Iterator[Advance]:
    """Yields a function to call with each number of bytes done."""
    if not enabled or not sys.stderr.isatty():
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda count: bar.update(task, advance=count)


@contextmanager
def activity(first: str, enabled: bool = True) -> Iterator[Callable[[str], None]]:
    """What is being done, and that it is being done; yields a function that takes the next text."""
    if not enabled or not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(first) as status:
        yield lambda text: status.update(text)
