"""Tables: ruled on a terminal, bare columns elsewhere."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

UNLIMITED = 10_000  # columns; output that goes to a file or a pipe is never cut


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table, as wide as it needs to be."""
    console = Console(width=UNLIMITED, highlight=False)
    ruled = console.is_terminal
    drawn = Table(*columns, box=box.SIMPLE_HEAD if ruled else None, pad_edge=False, show_edge=False)
    for row in rows:
        drawn.add_row(*row)
    with console.capture() as capture:
        console.print(drawn)
    return [line.rstrip() for line in capture.get().splitlines()]
