"""`treegraft bench report`: finished runs side by side, or the arms of one against each other."""

import json
from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from treegraft.bench.pairs import compare_arms
from treegraft.bench.report import compare_runs, comparison_table, pairs_table
from treegraft.cli.options import Listed
from treegraft.cli.tables import table


def _pair(text: str) -> tuple[str, str]:
    arm, base = (name.strip() for name in text.split("/"))
    return arm, base


PAIRS = Listed(_pair, "pairs of arms, ARM/BASE")


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR...", type=click.Path(path_type=Path))
@click.option(
    "--pairs",
    type=PAIRS,
    metavar="ARM/BASE[,ARM/BASE...]",
    help="Of one run: how much faster an arm is than another, with intervals, over all prompts and by category.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, and nothing else.")
def report(folders: Sequence[Path], pairs: Sequence[tuple[str, str]] | None, as_json: bool) -> None:
    """Compare finished runs: one table, and a warning for whatever makes them hard to compare.

    DIR is a folder that `treegraft bench --out DIR` wrote.
    """
    comparison = compare_runs(folders)
    rows = comparison.rows
    columns, lines = comparison_table(comparison)
    if pairs is not None:
        if len(folders) > 1:
            raise click.UsageError("--pairs compares the arms of one run; several folders were given.")
        found = compare_arms(folders[0], pairs)
        rows, (columns, lines) = [attrs.asdict(row) for row in found], pairs_table(found)
    if as_json:
        click.echo(json.dumps({"warnings": comparison.warnings, "rows": rows}, allow_nan=False))
        return
    for line in table(columns, lines):
        click.echo(line)
    for text in comparison.warnings:
        click.echo(f"warning: {text}", err=True)
