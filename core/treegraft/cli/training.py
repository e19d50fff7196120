"""What the commands that train a drafter's network take, and how it becomes a `Fit`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from treegraft.cli.embedded import spare_threads
from treegraft.cli.options import Finite
from treegraft.interfaces import ModelSpec

Command = Callable[..., Any]


def _whole_groups(ctx: click.Context, param: click.Parameter, value: int) -> int:
    if value % 8:
        raise click.BadParameter(f"{value} is not a multiple of 8.", ctx, param)
    return value


_OPTIONS = (
    click.option(
        "--target", default="demo:target", show_default=True, help="What to draft for: demo:*, a folder, a hub id."
    ),
    click.option("--dtype", help="Of the target: float32, bfloat16, ...  [default: float32 on a CPU, else its own]"),
    click.option("--device", help="Of target and drafter: cpu, cuda, cuda:1, ...  [default: an accelerator, if any]"),
    click.option(
        "--text",
        "texts",
        type=click.Path(path_type=Path, exists=True),
        multiple=True,
        required=True,
        metavar="PATH",
        help="A text file, a folder of them, or prompts (JSON lines with turns); may be repeated.",
    ),
    click.option(
        "--held-out",
        type=click.Path(path_type=Path, exists=True),
        multiple=True,
        required=True,
        metavar="PATH",
        help="The same, of text that is never trained on; may be repeated.",
    ),
    click.option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        required=True,
        metavar="DIR",
        help="The drafter's folder; the same command goes on with an interrupted training.",
    ),
    click.option(
        "--start",
        metavar="PATH",
        help="Begin as this drafter, its shape and weights: demo:*, a folder, a hub id.  [default: random weights]",
    ),
    click.option("--steps", type=click.IntRange(min=1), default=2000, show_default=True, help="Optimiser steps."),
    click.option(
        "--learning-rate",
        type=Finite(min=1e-6),
        default=0.03,
        show_default=True,
        help="Of matrices (Muon); others learn at a fifth of it.",
    ),
    click.option(
        "--length", type=click.IntRange(min=32), default=256, show_default=True, help="Tokens of a window of text."
    ),
    click.option(
        "--num-windows", type=click.IntRange(min=0), default=1024, show_default=True, help="Windows of the text itself."
    ),
    click.option(
        "--num-continued",
        type=click.IntRange(min=0),
        default=512,
        show_default=True,
        help="Windows that the target continues itself: what is drafted for.",
    ),
    click.option(
        "--num-held-out",
        type=click.IntRange(min=1),
        default=32,
        show_default=True,
        help="Held-out windows that the target continues, for each temperature.",
    ),
    click.option(
        "--temperature",
        "temperatures",
        type=Finite(min=0.0),
        multiple=True,
        default=(0.0, 0.8, 0.8, 0.8),
        show_default=True,
        help="Of the continuations, in turn; may be repeated.",
    ),
    click.option("--batch", type=click.IntRange(min=1), default=4, show_default=True, help="Windows a step."),
    click.option(
        "--anchors",
        type=click.IntRange(min=8),
        callback=_whole_groups,
        default=128,
        show_default=True,
        help="Anchors a window; a multiple of 8.",
    ),
    click.option(
        "--gamma",
        type=Finite(min=0.1),
        default=4.0,
        show_default=True,
        help="Place k weighs exp(-(k - 1) / gamma); 7 suits blocks of 16.",
    ),
    click.option(
        "--label-temperature",
        type=Finite(min=0.01),
        default=1.0,
        show_default=True,
        help="Of the distributions that are learned.",
    ),
    click.option(
        "--measure-every",
        type=click.IntRange(min=1),
        default=200,
        show_default=True,
        help="Steps between held-out measurements.",
    ),
    click.option(
        "--save-every", type=click.IntRange(min=1), default=200, show_default=True, help="Steps between checkpoints."
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Of everything that is chosen at random.",
    ),
)


def training_options(command: Command) -> Command:
    """Adds the options that `fit_of` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def fit_of(
    *,
    target: str,
    dtype: str | None,
    device: str | None,
    texts: Sequence[Path],
    held_out: Sequence[Path],
    out: Path,
    start: str | None,
    steps: int,
    learning_rate: float,
    length: int,
    num_windows: int,
    num_continued: int,
    num_held_out: int,
    temperatures: Sequence[float],
    batch: int,
    anchors: int,
    gamma: float,
    label_temperature: float,
    measure_every: int,
    save_every: int,
    seed: int,
) -> Any:
    """A `Fit` of these options; embedded targets compute on one thread."""
    from treegraft_plugins.hf.training.corpus import TextPlan
    from treegraft_plugins.hf.training.course import Course, Fit
    from treegraft_plugins.hf.training.loop import Schedule

    spec = ModelSpec(target, dtype=dtype or "auto", device=device or "auto")
    spare_threads({"target": spec})
    return Fit(
        target=spec,
        texts=texts,
        held_out=held_out,
        out=out,
        plan=TextPlan(
            length=length,
            num_windows=num_windows,
            num_continued=num_continued,
            num_held_out=num_held_out,
            temperatures=tuple(temperatures),
            seed=seed,
        ),
        course=Course(num_windows=batch, num_anchors=anchors, gamma=gamma, temperature=label_temperature),
        schedule=Schedule(
            steps=steps, learning_rate=learning_rate, measure_every=measure_every, save_every=save_every, seed=seed
        ),
        start=None if start is None else ModelSpec(start, dtype="float32", device=spec.device),
        report=lambda line: click.echo(line, err=True),
    )
