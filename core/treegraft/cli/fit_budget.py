"""`treegraft fit budget`: weights for the budget `saba`."""

from collections.abc import Sequence
from pathlib import Path

import click

from treegraft.bench.prompts import read_all
from treegraft.cli.embedded import spare_threads
from treegraft.cli.fit_edges import settings_of, texts_of
from treegraft.cli.options import TEMPERATURES, Listed, costs_of, model_options, plugins_from_here, prompt_options
from treegraft.cli.progress import progress
from treegraft.cli.quiet import quiet
from treegraft.cli.replaying import check_replayable, drafters, replaying
from treegraft.cli.run import with_defaults
from treegraft.compose import build, resolve
from treegraft.errors import RequestError
from treegraft.pipeline import Pipeline


@click.command()
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option(
    "--prompts", type=Listed(Path, "a list of files"), required=True, metavar="FILE[,FILE...]",
    help="To fit to: JSON lines with id, category and turns, or Spec-Bench's own. Every eighth is kept for validation.",
)  # fmt: skip
@click.option(
    "--held-out", type=Listed(Path, "a list of files"), required=True, metavar="FILE[,FILE...]",
    help="To report on, by category.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR",
    help="Weights, labels and report; the same command goes on with an interrupted fit.",
)  # fmt: skip
@click.option(
    "--pipeline", default="ddtree_saba", show_default=True, help="Whose rounds are labelled; its budget gives B."
)
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Of a continuation.")
@click.option(
    "--temperature", type=TEMPERATURES, default="0,0.8", show_default=True, metavar="T[,T...]",
    help="Every prompt is continued at each.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), default=1000, show_default=True, help="Optimiser steps.")
@click.option("--costs", type=click.Path(path_type=Path), metavar="FILE", help="A cost table.  [default: measured]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
@prompt_options
@model_options
def budget(
    overrides: Sequence[str],
    prompts: Sequence[Path],
    held_out: Sequence[Path],
    out: Path,
    pipeline: str,
    max_new_tokens: int,
    temperature: Sequence[float],
    steps: int,
    costs: Path | None,
    seed: int,
    chat: bool,
    limit: int | None,
    per_task: int | None,
    dtype: str | None,
    device: str | None,
    registry: Path | None,
    modules: Sequence[str],
) -> None:
    """Fit the budget `saba` to rounds of a pipeline, replayed along plain continuations, and report its worth.

    DIR then holds saba.safetensors, report.md (the fitted budget beside the training-free rule, the best fixed one and
    the oracle, under four cost tables) and rounds.jsonl (what each held-out round chose, expected and emitted).
    """
    from treegraft_plugins.collection import claim, kept_costs
    from treegraft_plugins.saba.offline import BudgetFit

    plugins = plugins_from_here(modules)
    if costs is not None:
        overrides = [*overrides, costs_of(costs)]
    resolved = with_defaults(resolve(pipeline, overrides, registry=registry, plugins=plugins), dtype, device)
    check_replayable(resolved)
    with quiet(), progress() as report:
        spare_threads(resolved.models)
        report("loading models", 0, 1)
        live = build(resolved)
        _require_trees(resolved.name, live)
        claim(out, "treegraft fit budget")
        table = kept_costs(live, out, costs)
        replayed = build(replaying(resolved, live, table))
        texts, unseen = (texts_of(live.target, read_all(files, limit, per_task), chat) for files in (prompts, held_out))
        made = {"target": live.target, **drafters(live)}
        path = BudgetFit(
            target=live.target,
            pipeline=replayed,
            setting=resolved.setting(live.parts.budget.max_verify_nodes, made),
            texts=texts,
            held_out=unseen,
            max_new_tokens=max_new_tokens,
            temperatures=tuple(temperature),
            seed=seed,
            num_steps=steps,
            costs=table,
            settings=settings_of(resolved)
            | {"max_new_tokens": max_new_tokens, "temperatures": list(temperature), "seed": seed},
            out=out,
            progress=report,
        ).run()
    click.echo(path.read_text())
    click.echo(f"weights: {out}/saba.safetensors; report: {path}", err=True)


def _require_trees(name: str, pipeline: Pipeline) -> None:
    """Refuse a pipeline whose rounds hold no choice."""
    if not pipeline.sources or pipeline.parts.budget.max_verify_nodes < 1:
        found = "no sources" if not pipeline.sources else "a budget of no nodes"
        raise RequestError(f"--pipeline {name}", found, "Allowed: one that drafts, and verifies a node at least.")
