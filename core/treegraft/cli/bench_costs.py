"""`treegraft bench costs`: what forwards and drafting steps take on this machine, by rows and context."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import torch

from treegraft.bench.costs import CONTEXTS, ROWS, cost_table, measure, num_rounds, points
from treegraft.bench.records import require_packages
from treegraft.cli.embedded import spare_threads
from treegraft.cli.options import Listed, model_options, resolve_options
from treegraft.cli.progress import progress
from treegraft.cli.quiet import quiet
from treegraft.cli.run import with_defaults
from treegraft.cli.tables import table
from treegraft.compose import build
from treegraft.errors import RequestError

DEFAULT = "treegraft"
NOTHING_MEASURED = "costs={use: fixed}"  # the pipeline's own costs would be measured at load, for nothing


class _Numbers(Listed):
    def __init__(self) -> None:
        super().__init__(_positive, "a list of whole numbers from 1 on")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


@click.command()
@click.argument("words", nargs=-1, metavar="[PIPELINE] [KEY=VALUE ...]")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR",
    help="A new folder for costs.json, curves.json and costs.png.",
)  # fmt: skip
@click.option(
    "--rows", type=_Numbers(), default=",".join(map(str, ROWS)), show_default=True, metavar="N[,N...]",
    help="Rows of the target's forwards.",
)  # fmt: skip
@click.option(
    "--contexts", type=_Numbers(), default=",".join(map(str, CONTEXTS)), show_default=True, metavar="N[,N...]",
    help="Committed tokens; several tell what context costs.",
)  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=9, show_default=True, help="Rounds of each kind.")
@model_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, and nothing else.")
def costs(
    words: Sequence[str],
    out: Path,
    rows: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    dtype: str | None,
    device: str | None,
    registry: Path | None,
    modules: Sequence[str],
    as_json: bool,
) -> None:
    """Measure what verification and each source's drafting step take, and plot it.

    PIPELINE (by default treegraft) says whose target and sources. DIR/costs.json is a cost table for
    costs={use: file, path: DIR/costs.json}: with it, runs can be repeated exactly.
    """
    require_packages(["matplotlib"])
    from treegraft.bench.plots import write_costs_plot  # once what it needs is known to be there

    named, overrides = ([word for word in words if ("=" in word) == wanted] for wanted in (False, True))
    if len(named) > 1:
        raise click.UsageError(f"{' '.join(named)}: one PIPELINE at most.")
    for text in overrides:
        if text.startswith("costs"):
            raise click.UsageError(f"{text}: costs are what is measured here.")
    pipeline = (named or [DEFAULT])[0]
    if out.exists() and any(out.iterdir()):
        raise RequestError(f"--out {out}", "a folder that is not empty", "Allowed: a new one.")
    with quiet(), progress() as report:
        resolved = resolve_options(pipeline, [*overrides, NOTHING_MEASURED], registry, modules)
        resolved = with_defaults(resolved, dtype, device)
        spare_threads(resolved.models)
        built = build(resolved)
        total, done = num_rounds(built, rows, contexts, repeats), 0

        def tick() -> None:
            nonlocal done
            done += 1
            report("measuring", done, total)

        found = points(measure(built, rows, contexts, repeats, tick=tick))
    made_of = {
        "pipeline": pipeline, "target": built.target.identity, "num_threads": torch.get_num_threads(),
        "sources": {source.name: source.drafter.identity for source in built.sources},
    }  # fmt: skip
    result: dict[str, Any] = {
        "table": cost_table(found),
        "points": [attrs.asdict(point) for point in found],
        **made_of,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "costs.json").write_text(json.dumps(result["table"], indent=1) + "\n", encoding="utf-8")
    (out / "curves.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    write_costs_plot(out / "costs.png", found, f"{built.target.identity}; {repeats} repeats")
    if as_json:
        click.echo(json.dumps(result))
        return
    lines = [
        (point.name, str(point.rows), str(point.context), f"{point.median_ms:.2f}",
         f"{point.low_ms:.2f}-{point.high_ms:.2f}", str(point.num_samples))
        for point in found
    ]  # fmt: skip
    click.echo("\n".join(table(("what", "rows", "context", "ms", "quartiles", "n"), lines)))
    click.echo(f"costs={{use: file, path: {out / 'costs.json'}}}")
