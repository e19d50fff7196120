"""How far a long command is, on stderr: a bar with the time left on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from treegraft.bench.run import Progress as Report

SECONDS = 15.0  # between two lines


@contextmanager
def progress() -> Iterator[Report]:
    """Yields what is to be called with (what is being done, how much is done, how much there is)."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None)
        shown = ""

        def report(what: str, done: int, total: int) -> None:
            nonlocal shown
            if what != shown:
                bar.reset(task)  # the time left goes by the speed of this part alone
                shown = what
            bar.update(task, description=what, completed=done, total=total)

        yield report


class _Lines:
    """A line when a part begins and ends, and every few seconds between."""

    def __init__(self) -> None:
        self._what, self._first, self._began, self._said = "", 0, 0.0, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._first, self._began = what, done, now
        elif done < total and now - self._said < SECONDS:
            return
        self._said = now
        left = ""
        if self._first < done < total:
            left = f", {_duration((now - self._began) / (done - self._first) * (total - done))} left"
        click.echo(f"{what}: {done} of {total}{left}", err=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
