"""`treegraft fit collect`: plain continuations, replayed under all schedules."""

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import click

from treegraft.bench.prompts import Prompt, read_all
from treegraft.bench.records import require_packages
from treegraft.cli.bench import token_ids
from treegraft.cli.embedded import spare_threads
from treegraft.cli.fit_edges import models_of
from treegraft.cli.options import TEMPERATURES, Listed, costs_of, model_options, plugins_from_here, prompt_options
from treegraft.cli.progress import progress
from treegraft.cli.quiet import quiet
from treegraft.cli.replaying import check_replayable, replaying
from treegraft.cli.run import with_defaults
from treegraft.compose import build, resolve
from treegraft.errors import RequestError
from treegraft.interfaces import Source
from treegraft.pipeline import Pipeline

DATASETS = ("category", "file", "id")


@click.command()
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option(
    "--prompts", type=Listed(Path, "a list of files"), required=True, metavar="FILE[,FILE...]",
    help="JSON lines with id, category and turns, or Spec-Bench's own.",
)  # fmt: skip
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="The collection's folder.",
)
@click.option(
    "--pipeline", default="treegraft", show_default=True, help="Its two sources, their selectors and grafts are used."
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Of a continuation.")
@click.option(
    "--temperature", type=TEMPERATURES, default="0,0.8", show_default=True, metavar="T[,T...]",
    help="Every prompt is continued at each.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of sampling.")
@click.option(
    "--every", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
    help="Replay all schedules at every N-th round of a continuation.",
)  # fmt: skip
@click.option(
    "--dataset", type=click.Choice(DATASETS), default="category", show_default=True,
    help="What groups rounds into reports, which folds never split: a prompt's category, its file, or its id up to "
    "the first / or :.",
)  # fmt: skip
@click.option(
    "--costs", type=click.Path(path_type=Path), metavar="FILE",
    help="A cost table, such as `bench costs` measures, for the manifest.  [default: measured]",
)  # fmt: skip
@prompt_options
@model_options
def collect(
    overrides: Sequence[str],
    prompts: Sequence[Path],
    out: Path,
    pipeline: str,
    max_new_tokens: int,
    temperature: Sequence[float],
    seed: int,
    every: int,
    dataset: str,
    costs: Path | None,
    chat: bool,
    limit: int | None,
    per_task: int | None,
    dtype: str | None,
    device: str | None,
    registry: Path | None,
    modules: Sequence[str],
) -> None:
    """Decode prompts plainly and replay them under all 2^D schedules: what `fit scheduler` learns from.

    A continuation is cut into rounds, each of a schedule drawn at random; where one begins, all are replayed. One
    Parquet file for each prompt and temperature is written to DIR; what is there is not made again, so the same command
    goes on with an interrupted collection. The cost table measured at the start goes into DIR/manifest.json.
    """
    require_packages()
    from treegraft_plugins.schedulers.distilled import collect as parts
    from treegraft_plugins.schedulers.distilled.fit import Setup
    from treegraft_plugins.schedulers.distilled.signals import CANDIDATES

    chosen = read_all(prompts, limit, per_task)
    plugins = plugins_from_here(modules)
    if costs is not None:
        overrides = [*overrides, costs_of(costs)]
    resolved = with_defaults(resolve(pipeline, overrides, registry=registry, plugins=plugins), dtype, device)
    check_replayable(resolved)
    with quiet(), progress() as report:
        spare_threads(resolved.models)
        report("loading models", 0, 1)
        live = build(resolved)
        replayed = build(replaying(resolved, live, parts.FREE))
        small, middle = _small_and_middle(live)
        texts = [
            parts.Text(
                prompt.id, _dataset(prompt, dataset), prompt.category, tuple(token_ids(live.target, prompt, chat))
            )
            for prompt in chosen
        ]
        manifest = parts.Manifest(
            target=live.target.model_name,
            middle=middle.drafter.model_name,
            small=small.drafter.model_name,
            vocab_size=live.target.vocab_size,
            setup=Setup(
                small.name, middle.name, middle.width, live.parts.budget.max_verify_nodes
            ),
            pipeline={key: resolved.config[key] for key in ("sources", "pruner", "calibration")},
            steps=live.parts.steps,
            max_new_tokens=max_new_tokens,
            every=every,
            temperatures=tuple(temperature),
            seed=seed,
            signals=tuple(CANDIDATES),
            prompts=parts.prompts_hash(texts),
            costs=live.costs.table(),
            models=models_of(resolved),
            num_parts=len(texts) * len(temperature),
            versions={name: metadata.version(name) for name in ("treegraft", "torch", "transformers")},
        )  # fmt: skip
        parts.collect(live, replayed, texts, manifest, out, report)
    click.echo(f"{out}: {len(texts) * len(manifest.temperatures)} continuations of {manifest.pair}", err=True)


def _small_and_middle(pipeline: Pipeline) -> tuple[Source, Source]:
    ranked = sorted(pipeline.sources, key=lambda source: source.rank)
    if len(ranked) != 2 or ranked[0].rank == ranked[1].rank:
        raise RequestError(
            f"--pipeline {pipeline.name}", f"{len(ranked)} sources of ranks {[source.rank for source in ranked]}",
            "Allowed: a pipeline of two sources, the middle's rank above the small one's.",
        )  # fmt: skip
    return ranked[0], ranked[1]


def _dataset(prompt: Prompt, by: str) -> str:
    if by == "file":
        return Path(prompt.file).stem
    return prompt.task if by == "category" else prompt.id.replace(":", "/").partition("/")[0].removesuffix(".py")
