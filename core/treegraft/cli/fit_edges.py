"""`treegraft fit edges`: weights for the edge scorers `tdes` and `bigram`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from treegraft.bench.prompts import Prompt, read_all
from treegraft.cli.bench import token_ids
from treegraft.cli.embedded import spare_threads
from treegraft.cli.options import (
    TEMPERATURES,
    Finite,
    Listed,
    costs_of,
    finite,
    model_options,
    plugins_from_here,
    prompt_options,
)
from treegraft.cli.progress import progress
from treegraft.cli.quiet import quiet
from treegraft.cli.run import with_defaults
from treegraft.compose import ResolvedPipeline, build, resolve
from treegraft.errors import RequestError
from treegraft.interfaces import TargetModel


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
    help="Weights, traces, checkpoint and report; the same command goes on with an interrupted fit.",
)  # fmt: skip
@click.option(
    "--pipeline", default="ddtree", show_default=True, help="Of one source, whose drafter takes an edge scorer."
)
@click.option("--nodes", type=click.IntRange(min=1), default=63, show_default=True, help="Of a tree, non-root.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Of a continuation.")
@click.option(
    "--temperature", type=TEMPERATURES, default="0,0.8", show_default=True, metavar="T[,T...]",
    help="Every prompt is continued at each.",
)  # fmt: skip
@click.option(
    "--betas", type=Listed(finite(lambda beta: beta > 0), "a list of finite numbers > 0"),
    default="0.2,0.4,0.7,1,1.4", show_default=True,
    metavar="B[,B...]", help="To choose from, and to report.",
)  # fmt: skip
@click.option("--rank", type=click.IntRange(min=1), default=64, show_default=True, help="Of the towers.")
@click.option("--steps", type=click.IntRange(min=1), default=2000, show_default=True, help="Optimiser steps.")
@click.option(
    "--learning-rate", type=Finite(min=1e-6), default=0.02, show_default=True,
    help="Of the projections (Muon); the depths' weights learn at a fifth of it.",
)  # fmt: skip
@click.option("--batch", type=click.IntRange(min=1), default=256, show_default=True, help="Parents a step.")
@click.option("--distribution-loss", type=Finite(min=0.0), default=1.0, show_default=True, help="Its weight.")
@click.option("--pairwise-loss", type=Finite(min=0.0), default=0.5, show_default=True, help="Its weight.")
@click.option("--edge-loss", type=Finite(min=0.0), default=0.5, show_default=True, help="Its weight.")
@click.option(
    "--measure-every", type=click.IntRange(min=1), default=200, show_default=True, help="Steps between measurements."
)
@click.option(
    "--save-every", type=click.IntRange(min=1), default=200, show_default=True, help="Steps between checkpoints."
)
@click.option("--costs", type=click.Path(path_type=Path), metavar="FILE", help="A cost table.  [default: measured]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
@prompt_options
@model_options
def edges(
    overrides: Sequence[str],
    prompts: Sequence[Path],
    held_out: Sequence[Path],
    out: Path,
    pipeline: str,
    nodes: int,
    max_new_tokens: int,
    temperature: Sequence[float],
    betas: Sequence[float],
    rank: int,
    steps: int,
    learning_rate: float,
    batch: int,
    distribution_loss: float,
    pairwise_loss: float,
    edge_loss: float,
    measure_every: int,
    save_every: int,
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
    """Fit the edge scorers `tdes` and `bigram` to what the target says under drafted trees, and report their worth.

    DIR then holds tdes.safetensors and bigram.safetensors, each with the beta that is best on the validation prompts,
    and report.md: mismatched edges, accepted length and modelled throughput against beta.
    """
    from treegraft_plugins.blocktree.distil.offline import EdgeFit
    from treegraft_plugins.blocktree.distil.training import Distillation
    from treegraft_plugins.collection import claim, kept_costs
    from treegraft_plugins.hf.training.loop import Schedule

    plugins = plugins_from_here(modules)
    _require_free(overrides)
    name = _source(resolve(pipeline, overrides, registry=registry, plugins=plugins))
    fixed = [f"scheduler={{use: fixed, pattern: [{name}, null]}}", f"budget={{use: fixed, verify_nodes: {nodes}}}"]
    if costs is not None:
        fixed.append(costs_of(costs))
    resolved = resolve(pipeline, [*overrides, *fixed], registry=registry, plugins=plugins)
    resolved = with_defaults(resolved, dtype, device)
    with quiet(), progress() as report:
        spare_threads(resolved.models)
        report("loading models", 0, 1)
        made = build(resolved)
        claim(out, "treegraft fit edges")
        path = EdgeFit(
            pipeline=made,
            texts=texts_of(made.target, read_all(prompts, limit, per_task), chat),
            held_out=texts_of(made.target, read_all(held_out, limit, per_task), chat),
            max_new_tokens=max_new_tokens,
            temperatures=tuple(temperature),
            seed=seed,
            betas=tuple(sorted(betas)),
            distillation=Distillation(
                rank=rank, batch=batch, distribution=distribution_loss, pairwise=pairwise_loss, edge=edge_loss
            ),
            schedule=Schedule(
                steps=steps, learning_rate=learning_rate, measure_every=measure_every, save_every=save_every, seed=seed
            ),
            costs=kept_costs(made, out, costs),
            settings=settings_of(resolved)
            | {"max_new_tokens": max_new_tokens, "temperatures": list(temperature), "seed": seed},
            out=out,
            progress=report,
            say=lambda line: click.echo(line, err=True),
        ).run()  # fmt: skip
    click.echo(path.read_text())
    click.echo(f"weights: {out}/tdes.safetensors, {out}/bigram.safetensors; report: {path}", err=True)


def _require_free(overrides: Sequence[str]) -> None:
    """Refuse overrides of what the fit itself decides."""
    for override in overrides:
        key = override.partition("=")[0].partition(".")[0]
        if key in ("scheduler", "budget"):
            raise RequestError(
                override, f"the {key} of a fit of edges", "It draws one tree a round.", "Give its size by --nodes."
            )


def _source(resolved: ResolvedPipeline) -> str:
    """The pipeline's one source."""
    takes = [name for name in resolved.sources if resolved.parts[f"sources.{name}.draft"].says("takes_edge_scorer")]
    if len(takes) != 1 or len(resolved.sources) != 1:
        raise RequestError(
            f"--pipeline {resolved.name}", f"the sources {', '.join(resolved.sources) or 'none'}",
            "Allowed: a pipeline of one source, whose drafter takes an edge scorer, such as ddtree.",
        )  # fmt: skip
    return takes[0]


def texts_of(target: TargetModel, prompts: Sequence[Prompt], chat: bool) -> list[Any]:
    """Prompts as the fits take them."""
    from treegraft_plugins.collection import Text

    return [Text(prompt.id, prompt.task, tuple(token_ids(target, prompt, chat))) for prompt in prompts]


def settings_of(resolved: ResolvedPipeline) -> dict[str, Any]:
    """What rounds of a pipeline depend on, but for the machine, as JSON has it."""
    return {
        "pipeline": {key: value for key, value in resolved.config.items() if key != "costs"},
        "models": models_of(resolved),
        "files": {path: digest for path, digest in resolved.file_digests.items() if not path.startswith("costs")},
    }


def models_of(resolved: ResolvedPipeline) -> dict[str, Any]:
    """The models of a command's pipeline: what to load, and what is in it."""
    from treegraft_plugins.hf.loading import checkpoint_digest

    return {name: {**attrs.asdict(spec), "digest": checkpoint_digest(spec)} for name, spec in resolved.models.items()}
