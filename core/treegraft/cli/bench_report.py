"""`treegraft bench report`: finished runs side by side."""

import json
from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from treegraft.bench.report import compare_runs, comparison_table
from treegraft.cli.tables import table


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, and nothing else.")
def report(folders: Sequence[Path], as_json: bool) -> None:
    """Compare finished runs: one table, and a warning for whatever makes them hard to compare.

    DIR is a folder that `treegraft bench --out DIR` wrote.
    """
    comparison = compare_runs(folders)
    if as_json:
        click.echo(json.dumps(attrs.asdict(comparison), allow_nan=False))
        return
    for line in table(*comparison_table(comparison)):
        click.echo(line)
    for text in comparison.warnings:
        click.echo(f"warning: {text}", err=True)
