"""`treegraft replay`: accepted lengths of pipelines, schedules and budgets along text that is decoded once."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import click

from treegraft.bench.lineup import AGAIN, resolve_arms
from treegraft.bench.prompts import Prompt, read_all
from treegraft.cli.bench import checked_plan, token_ids
from treegraft.cli.embedded import spare_threads
from treegraft.cli.options import Listed, costs_of, model_options, plugins_from_here, prompt_options
from treegraft.cli.progress import progress
from treegraft.cli.quiet import quiet
from treegraft.cli.replay_report import Tally, label_lines, lines, round_line
from treegraft.cli.replaying import check_replayable
from treegraft.cli.run import with_defaults
from treegraft.compose import ResolvedPipeline, build
from treegraft.errors import ComposeError, RequestError, suggest
from treegraft.pipeline import Pipeline
from treegraft.plugins import Plugins
from treegraft.registry import Registry
from treegraft.replay import Prefix, Recording, ReplayTarget, outcome_of, record, schedules, tabulate, wants_of
from treegraft.replay import replay as replay_pipeline
from treegraft.replay.schedules import check_schedules
from treegraft.sampling import SamplingOptions
from treegraft.statistics import CostModel

ALL = "all"
Write = Callable[[Mapping[str, Any]], None]


@attrs.frozen(eq=False)
class Replayed:
    """What is followed along each recording.

    Attributes:
        name: of the pipeline.
        budget: a fixed one in the place of its own, or None.
        pipeline: loaded with the ReplayTarget.
        costs: the pipeline's; of one that does not draft, another's.
    """

    name: str
    budget: int | None
    pipeline: Pipeline
    costs: CostModel


@click.command()
@click.argument("pipelines", type=Listed(str, "a list of names"), metavar="PIPELINE[,PIPELINE...]")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option(
    "--prompts", type=Listed(Path, "a list of files"), required=True, metavar="FILE[,FILE...]",
    help="JSON lines with id, category and turns, or Spec-Bench's own.",
)  # fmt: skip
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Most tokens of a text."
)
@click.option(
    "--temperature", type=Listed(float, "a list of numbers"), default="0", show_default=True, metavar="T[,T...]",
    help="0 takes the most probable token.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of sampled text.")
@click.option(
    "--schedules", "sources", is_flag=False, flag_value=ALL, metavar="[SOURCE,SOURCE...]",
    help="Label all schedules of these sources, of all without a value, in the place of the pipeline's own.",
)  # fmt: skip
@click.option(
    "--budgets", type=Listed(int, "a list of whole numbers"), metavar="N[,N...]",
    help="Fixed budgets in the place of the pipeline's own: most non-root nodes to verify.",
)  # fmt: skip
@click.option(
    "--every", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
    help="With --schedules: label every N-th position only.",
)  # fmt: skip
@click.option(
    "--costs", type=click.Path(path_type=Path), metavar="FILE", help="A cost table: adds modelled throughput."
)
@prompt_options
@model_options
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="Write every round, or every label, as a JSON line."
)
@click.option("--json", "json_wanted", is_flag=True, help="One JSON object on stdout, and nothing else.")
def replay(
    pipelines: Sequence[str],
    overrides: Sequence[str],
    prompts: Sequence[Path],
    max_new_tokens: int,
    temperature: Sequence[float],
    seed: int,
    sources: str | None,
    budgets: Sequence[int] | None,
    every: int,
    costs: Path | None,
    chat: bool,
    limit: int | None,
    per_task: int | None,
    dtype: str | None,
    device: str | None,
    registry: Path | None,
    modules: Sequence[str],
    out: Path | None,
    json_wanted: bool,
) -> None:
    """Follow PIPELINE along plain continuations, without further forwards of the target.

    Each prompt is continued once; then trees are grown and held against the text. No clock decides anything: the same
    command gives the same figures, and accepted lengths are those of live runs with the same fixed costs.

    \b
    treegraft replay all_small,treegraft_fixed --prompts prompts.jsonl
    treegraft replay treegraft --prompts prompts.jsonl --schedules --costs costs.json
    """
    if every > 1 and sources is None:
        raise click.UsageError("--every needs --schedules.")
    if budgets is not None and (list(budgets) != sorted(budgets) or budgets[0] < 0):
        raise click.UsageError(f"--budgets {','.join(map(str, budgets))}: not ascending numbers >= 0.")
    checked_plan([max_new_tokens], temperature, seed, 1)
    if sources is not None and "=" in sources:
        raise click.UsageError(
            f"--schedules {sources}: no name of a source. Without one it comes last, or as --schedules=all."
        )
    if out is not None and out.is_file():
        raise RequestError(
            f"--out {out}", "a file that exists", "Allowed: a new one.", "Remove it, or take another name."
        )
    defaults = ["costs={use: fixed}"] if costs is None else [costs_of(costs)]
    if sources is not None:
        defaults.append("calibration=off")
    plugins = plugins_from_here(modules)
    fixed: Sequence[int | None] = (None,) if budgets is None or sources is not None else budgets
    resolved = [
        (name, budget, with_defaults(pipeline, dtype, device))
        for budget in fixed
        for name, pipeline in resolved_pipelines(pipelines, overrides, defaults, budget, registry, plugins).items()
    ]
    for *_, pipeline in resolved:
        check_replayable(pipeline)
    for line in differing_schedulers(resolved):
        click.echo(line, err=True)
    chosen = read_all(prompts, limit, per_task)
    tally = Tally(is_modelled=costs is not None or any(text.startswith("costs") for text in overrides))
    with quiet(), progress() as report:
        spare_threads({key: model for *_, pipeline in resolved for key, model in pipeline.models.items()})
        first = resolved[0][-1]
        target = first.parts["target"].make(first.models)
        made = [(name, budget, built(each, ReplayTarget(target))) for name, budget, each in resolved]
        shared = next(pipeline.costs for *_, pipeline in made if pipeline.sources)
        followed = [
            Replayed(name, budget, pipeline, pipeline.costs if pipeline.sources else shared)
            for name, budget, pipeline in made
        ]
        names = None if sources in (None, ALL) else [name.strip() for name in str(sources).split(",")]
        if sources is not None:
            for each in followed:
                check_schedules(each.pipeline, budgets, names)
        wants = wants_of([each.pipeline for each in followed])
        cells = list(itertools.product(temperature, [(prompt, token_ids(target, prompt, chat)) for prompt in chosen]))
        unit = max_new_tokens  # of progress: a token, of a recording or of what follows it
        steps = Steps(partial(report, "replaying"), len(cells) * (1 + len(followed)) * unit)
        with writer(out) as write:
            for heat, (prompt, ids) in cells:
                options = SamplingOptions(heat)
                with steps.part(unit) as step:
                    recording = record(target, ids, max_new_tokens, options, seed, wants, on_token=step)
                for each in followed:
                    where = {"pipeline": each.name, "temperature": heat, "file": prompt.file, "prompt_id": prompt.id}
                    with steps.part(unit) as step:
                        if sources is None:
                            replay_rounds(each, recording, prompt, tally, partial(write, where))
                        else:
                            label(each, recording, prompt, names, budgets, every, tally, step, partial(write, where))
    rows = tally.rows()
    if json_wanted:
        settings = {
            "pipelines": list(pipelines), "overrides": list(overrides), "prompts": list(map(str, prompts)),
            "num_prompts": len(chosen), "max_new_tokens": max_new_tokens, "temperatures": list(temperature),
            "seed": seed, "schedules": sources, "budgets": None if budgets is None else list(budgets), "every": every,
            "costs": None if costs is None else str(costs), "chat": chat,
        }  # fmt: skip
        click.echo(json.dumps({"settings": settings, "rows": rows}, allow_nan=False))
    else:
        click.echo("\n".join(lines(rows, tally.is_modelled)))


def resolved_pipelines(
    names: Sequence[str],
    overrides: Sequence[str],
    defaults: Sequence[str],
    budget: int | None,
    registry: Path | None,
    plugins: Plugins,
) -> Mapping[str, ResolvedPipeline]:
    """The pipelines by name, of one target.

    Args:
        names: pipelines of the registry.
        overrides: as given.
        defaults: overrides that come before them.
        budget: a fixed one for all, or None.
        registry, plugins: as for `resolve`.

    Raises:
        ComposeError: one that there is not, or that is not sound.
    """
    known = list(Registry.read(registry).concrete())
    for name in names:
        if name not in known:
            raise ComposeError(
                "pipeline", f"no pipeline named {name!r}.", f"Known pipelines: {', '.join(known)}.",
                suggest(name, known),
            )  # fmt: skip
    lineup = resolve_arms(names, overrides, registry, plugins)
    if not any(pipeline.sources for pipeline in lineup.pipelines.values()):
        raise ComposeError(
            "pipeline", f"{', '.join(names)}: nothing that drafts", "Allowed: at least one pipeline with sources."
        )  # fmt: skip
    fixed = [] if budget is None else [f"budget={{use: fixed, verify_nodes: {budget}}}"]
    lineup = resolve_arms(names, [*defaults, *overrides, *fixed], registry, plugins)
    return {name: pipeline for name, pipeline in lineup.pipelines.items() if name != AGAIN}


def differing_schedulers(resolved: Sequence[tuple[str, int | None, ResolvedPipeline]]) -> list[str]:
    """What schedulers say of themselves where that depends on the budget which takes the place of their pipeline's."""
    said: dict[str, dict[str | None, list[int | None]]] = {}
    for name, budget, pipeline in resolved:
        said.setdefault(name, {}).setdefault(pipeline.notes.get("scheduler"), []).append(budget)
    return [
        f"{name} with {', '.join(map(str, budgets))} nodes: scheduler: {note}"
        for name, notes in said.items()
        if len(notes) > 1
        for note, budgets in notes.items()
    ]


def built(resolved: ResolvedPipeline, target: ReplayTarget) -> Pipeline:
    """The pipeline upon a target that replays."""
    part = attrs.evolve(resolved.parts["target"], given=target)
    return build(attrs.evolve(resolved, parts=resolved.parts | {"target": part}))


# -- following --------------------------------------------------------------------------------------------------------


def replay_rounds(each: Replayed, recording: Recording, prompt: Prompt, tally: Tally, write: Write) -> None:
    """Run a pipeline along a recording."""
    generation = replay_pipeline(each.pipeline, recording)
    if generation.faults:
        raise RequestError(f"sources.{generation.faults[0]['source']}", generation.faults[0]["error"], None)
    for done in generation.rounds or ():
        outcome = outcome_of([done], each.costs)
        positions = range(done.state.position, done.state.position + len(done.tokens))
        plain_ms = sum(float(each.costs.target_ms(1, position)) for position in positions)
        write(round_line(done, outcome.modelled_ms))
        tally.add_round(
            (each.name, None, each.budget), recording.options.temperature, prompt.task, outcome, plain_ms
        )  # fmt: skip


def label(
    each: Replayed,
    recording: Recording,
    prompt: Prompt,
    names: Sequence[str] | None,
    budgets: Sequence[int] | None,
    every: int,
    tally: Tally,
    on_token: Callable[[], None],
    write: Write,
) -> None:
    """Label all schedules along a recording."""

    def prefixes() -> Iterator[Prefix]:
        for prefix in schedules(each.pipeline, recording, budgets, names, every):
            for line in label_lines(prefix):
                write(line)
            yield prefix
            for _ in range(every):
                on_token()

    table = tabulate(prefixes(), len(recording.tokens))
    tally.add_table(each.name, recording.options.temperature, prompt.task, table, each.costs)


@contextmanager
def writer(out: Path | None) -> Iterator[Callable[[Mapping[str, Any], Mapping[str, Any]], None]]:
    """Yields what writes two objects as one JSON line of the file, or nothing without one.

    Raises:
        RequestError: the file cannot be written.
    """
    if out is None:
        yield lambda where, line: None
        return
    try:
        file = out.open("w", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--out {out}", error.strerror or "not opened", "Allowed: a file to write.") from error
    with file:
        yield lambda where, line: print(json.dumps({**where, **line}, allow_nan=False), file=file)


class Steps:
    """How much is done of parts of a known size, whatever each turns out to need."""

    def __init__(self, report: Callable[[int, int], None], total: int):
        self._report, self._total, self._done = report, total, 0
        report(0, total)

    @contextmanager
    def part(self, size: int) -> Iterator[Callable[[], None]]:
        """One part; yields what to call for each of its steps."""
        begin = self._done

        def step() -> None:
            self._done = min(self._done + 1, begin + size)
            self._report(self._done, self._total)

        yield step
        self._done = begin + size
        self._report(self._done, self._total)
