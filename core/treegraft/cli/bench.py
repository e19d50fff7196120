"""`treegraft bench`: several pipelines and their rivals on the same prompts, so that the figures can be believed."""

import json
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from treegraft.bench.arms import Arm
from treegraft.bench.checks import SHARED, check_shared, check_vary, shape
from treegraft.bench.lineup import RIVALS, resolve_arms
from treegraft.bench.manifest import of_arms, of_lineup, of_machine, of_prompts
from treegraft.bench.prompts import Prompt, read_all
from treegraft.bench.records import require_packages
from treegraft.bench.run import Bench, Plan, Task, check_same, earlier_manifest, run
from treegraft.cli import with_debug
from treegraft.cli.embedded import spare_threads
from treegraft.cli.options import Listed, model_options, plugins_from_here
from treegraft.cli.progress import progress
from treegraft.cli.quiet import quiet
from treegraft.cli.run import chat_prompt, with_defaults
from treegraft.cli.tables import table
from treegraft.errors import RequestError
from treegraft.interfaces import TargetModel
from treegraft.sampling import SamplingOptions, SeededDraws

SUBCOMMANDS = {"report": "treegraft.cli.bench_report:report", "costs": "treegraft.cli.bench_costs:costs"}
"""What the first word after `bench` may be instead of an option."""
INTERRUPTED = 130  # as shells have it


class _Bench(click.Command):
    """The command itself, or the subcommand that the first word names."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in SUBCOMMANDS:
            module, name = SUBCOMMANDS[args[0]].split(":")
            command = with_debug(getattr(import_module(module), name))
            return command.make_context(f"{info_name} {args[0]}", args[1:], parent=parent, **extra)
        words = list(args)
        context = super().make_context(info_name, args, parent=parent, **extra)
        context.meta["treegraft.bench.command"] = shlex.join(["treegraft", "bench", *words])
        return context


@click.command(
    cls=_Bench, epilog="treegraft bench report DIR... compares runs; treegraft bench costs measures latencies."
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option(
    "--arms", type=Listed(str, "a list of names"), default="plain,all_small,all_middle,treegraft", show_default=True,
    metavar="NAME[,NAME...]", help=f"Pipelines of the registry, and of transformers: {', '.join(RIVALS)}.",
)  # fmt: skip
@click.option(
    "--prompts", type=Listed(Path, "a list of files"), required=True, metavar="FILE[,FILE...]",
    help="JSON lines with id, category and turns, or Spec-Bench's own.",
)  # fmt: skip
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="The run's folder; a new one, or one that was interrupted.",
)
@click.option(
    "--max-new-tokens", type=Listed(int, "a list of whole numbers"), default="128", show_default=True,
    metavar="N[,N...]", help="Most tokens to emit; lengths and temperatures are crossed.",
)  # fmt: skip
@click.option(
    "--temperature", type=Listed(float, "a list of numbers"), default="0", show_default=True, metavar="T[,T...]",
    help="0 takes the most probable token.",
)  # fmt: skip
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Of sampling, and of the order of arms; repeat r samples with seed + r.",
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="How often everything is run."
)
@click.option("--chat", is_flag=True, help="Put each prompt as a user's message into the chat template.")
@click.option("--limit", type=click.IntRange(min=1), help="Take the first so many prompts of each file.")
@click.option(
    "--per-task",
    type=click.IntRange(min=1),
    help="Of those, so many of each task; MT-Bench's eight categories are one.",
)
@click.option(
    "--vary", type=Listed(str, "a list of names"), default=(), metavar="NAME[,NAME...]",
    help=f"What arms may differ in, of {', '.join(SHARED)}; without it they must not.",
)  # fmt: skip
@model_options
@click.option("--json", "json_wanted", is_flag=True, help="The summary as one JSON object on stdout, and nothing else.")
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    overrides: Sequence[str],
    arms: Sequence[str],
    prompts: Sequence[Path],
    out: Path,
    max_new_tokens: Sequence[int],
    temperature: Sequence[float],
    seed: int,
    repeats: int,
    chat: bool,
    limit: int | None,
    per_task: int | None,
    vary: Sequence[str],
    dtype: str | None,
    device: str | None,
    registry: Path | None,
    modules: Sequence[str],
    json_wanted: bool,
) -> None:
    """Run the same prompts through several arms, in turns, and compare speed and text.

    Arms are pipelines and transformers' own ways to decode with the same models. KEY=VALUE changes a model for all
    arms (models.target=PATH), or a part of every pipeline that has it (steps=3, sources.small.width=4).

    \b
    treegraft bench --prompts prompts.jsonl --out runs/first
    treegraft bench --arms plain,treegraft,hf_plain,hf_assisted --prompts prompts.jsonl --out runs/rivals

    Ends with 1 if the run is not valid. An interrupted run is gone on with by the same command.
    """
    from treegraft.bench.summary import write_summary  # with what it needs of the extra

    require_packages()
    plan = checked_plan(max_new_tokens, temperature, seed, repeats)
    check_vary(vary)
    lineup = resolve_arms(arms, overrides, registry, plugins_from_here(modules))
    lineup = lineup.mapped(partial(with_defaults, dtype=dtype, device=device))
    chosen = read_all(prompts, limit, per_task)
    earlier = earlier_manifest(out)
    settings = {
        "max_new_tokens": list(max_new_tokens), "temperatures": list(temperature), "seed": seed, "repeats": repeats,
        "chat": chat, "limit": limit, "per_task": per_task, "vary": list(vary), "dtype": dtype, "device": device,
    }  # fmt: skip
    manifest = {
        "command": ctx.meta["treegraft.bench.command"], "arms": list(lineup.names), "overrides": list(overrides),
        "settings": settings, **of_lineup(lineup), **of_prompts(prompts, chosen), **of_machine(lineup),
    }  # fmt: skip
    if earlier is not None:
        check_same(out, earlier, manifest)
    try:
        with quiet(), progress() as report:
            spare_threads(lineup.models)
            report("loading models", 0, len(lineup.names))
            target, made = lineup.build()
            check_shared(made, vary)
            tasks = [Task(prompt, tuple(token_ids(target, prompt, chat))) for prompt in chosen]
            measured = Bench(made, target, tasks, plan, progress=report)
            measured.check_lengths()
            manifest |= of_arms(target, made, tasks)
            click.echo("\n".join(settings_table(made)), err=True)
            run(measured, out, manifest, earlier)
            summary = write_summary(out)
    except KeyboardInterrupt:
        click.echo(f"Interrupted. The same command goes on with {out}.", err=True)
        ctx.exit(INTERRUPTED)
    click.echo(
        json.dumps(summary, allow_nan=False) if json_wanted else (out / "summary.md").read_text(), nl=json_wanted
    )
    ctx.exit(0 if summary["valid"] else 1)


def checked_plan(max_new_tokens: Sequence[int], temperatures: Sequence[float], seed: int, repeats: int) -> Plan:
    """What is run, as far as numbers go.

    Raises:
        RequestError: one that no request could honour.
    """
    for length in max_new_tokens:
        if length < 1:
            raise RequestError("--max-new-tokens", f"{length}", "Allowed: an int >= 1.")
    for temperature in temperatures:
        SamplingOptions(temperature)
    SeededDraws(seed)
    return Plan(tuple(max_new_tokens), tuple(temperatures), seed, repeats)


def token_ids(target: TargetModel, prompt: Prompt, chat: bool) -> list[int]:
    """The first turn, as `treegraft run` reads a prompt.

    Raises:
        RequestError: there is no tokenizer, or with `chat` no chat template, or no room for a token behind the prompt.
    """
    if target.tokenizer is None:
        raise RequestError("--prompts", "the target has no tokenizer to read text with", "Allowed: one that has.")
    if chat:
        ids = chat_prompt(target.tokenizer, prompt.turns[0], None, {})
    else:
        ids = list(target.tokenizer(prompt.turns[0])["input_ids"])
    if target.max_length is not None and len(ids) >= target.max_length:
        raise RequestError(
            f"{prompt.file}: prompt {prompt.id!r}", f"{len(ids)} tokens",
            f"The target's context holds {target.max_length}, what follows included.", "Shorten it, or leave it out.",
        )  # fmt: skip
    return ids


def settings_table(arms: Sequence[Arm]) -> list[str]:
    """The lines of a table of what each arm is made of, as read back."""
    rows = []
    for arm in arms:
        found = arm.settings()
        if not (arm.is_ours and arm.drafts):
            rows.append((arm.name, *("-" for _ in range(7))))
            continue
        own: Mapping[str, Any] = shape(found)
        numbers = ("/".join(map(str, value)) if isinstance(value, list) else str(value) for value in own.values())
        rows.append((arm.name, *numbers, *(found[f"{part}.use"] for part in ("scheduler", "budget", "costs"))))
    return table(("arm", "steps", "nodes", "width", "branching", "scheduler", "budget", "costs"), rows)
