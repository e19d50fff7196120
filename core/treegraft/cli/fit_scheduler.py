"""`treegraft fit scheduler`: weights for the scheduler `distilled`."""

from collections.abc import Sequence
from pathlib import Path

import click
import torch

from treegraft.bench.records import require_packages
from treegraft.cli.options import Listed
from treegraft.cli.progress import progress
from treegraft.errors import RequestError, suggest


@click.command()
@click.argument(
    "folders", nargs=-1, required=True, metavar="DIR...", type=click.Path(path_type=Path, exists=True, file_okay=False)
)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="FILE", help="The weights (safetensors)."
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The report's folder.  [default: beside FILE]",
)
@click.option("--num-signals", type=click.IntRange(min=1), default=6, show_default=True, help="Tree signals to select.")
@click.option(
    "--signals", type=Listed(str, "a list of names"), default=(), metavar="NAME[,NAME...]",
    help="Read these and select nothing.",
)  # fmt: skip
@click.option("--folds", type=click.IntRange(min=2), default=5, show_default=True, help="A report is never split.")
@click.option(
    "--exclude", type=Listed(str, "a list of names"), default=(), metavar="CATEGORY[,...]",
    help="Keep these categories out of the fit.",
)  # fmt: skip
@click.option(
    "--held-out", type=Listed(Path, "a list of folders"), default=(), metavar="DIR[,DIR...]",
    help="More collections, to report on only.",
)  # fmt: skip
@click.option(
    "--resamples", type=click.IntRange(min=2), default=12, show_default=True, help="Cost tables to fit under."
)
@click.option("--training-steps", type=click.IntRange(min=1), default=2500, show_default=True, help="Of each network.")
@click.option(
    "--selection-steps", type=click.IntRange(min=1), default=250, show_default=True,
    help="Of each network that judges a signal.",
)  # fmt: skip
@click.option(
    "--ablations", "with_ablations", is_flag=True,
    help="Fit the ablations too, and write them beside FILE: value_online, one_signal, all_signals.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
def scheduler(
    folders: Sequence[Path],
    out: Path,
    report: Path | None,
    num_signals: int,
    signals: Sequence[str],
    folds: int,
    exclude: Sequence[str],
    held_out: Sequence[Path],
    resamples: int,
    training_steps: int,
    selection_steps: int,
    with_ablations: bool,
    seed: int,
) -> None:
    """Fit weights for the scheduler `distilled` to the rounds in DIR..., and report what they are worth."""
    require_packages()
    from treegraft_plugins.collection import claim
    from treegraft_plugins.schedulers.distilled.offline import Options, fit_ablations, fit_scheduler, gather
    from treegraft_plugins.schedulers.distilled.report import write_report
    from treegraft_plugins.schedulers.distilled.signals import CANDIDATES
    from treegraft_plugins.schedulers.distilled.weights import ABLATIONS

    unknown = [name for name in signals if name not in CANDIDATES]
    if unknown:
        raise RequestError(
            "--signals", f"{unknown[0]!r}", f"Allowed: {', '.join(CANDIDATES)}.", suggest(unknown[0], list(CANDIDATES))
        )
    if num_signals > len(CANDIDATES):
        raise RequestError("--num-signals", str(num_signals), f"Allowed: at most the {len(CANDIDATES)} there are.")
    places = [folder.resolve() for folder in (*folders, *held_out)]
    if len(set(places)) < len(places):
        raise RequestError("DIR", "a collection that is named twice", "Allowed: each once, held out or not.")
    if out.suffix != ".safetensors":
        raise RequestError("--out", str(out), "Allowed: a file name that ends in .safetensors.")
    files = {None: out} | {name: out.with_stem(f"{out.stem}-{name}") for name in ABLATIONS if with_ablations}
    for path in files.values():
        if path.exists():
            raise RequestError(
                f"--out {out}", f"{path} exists", "Allowed: new files.", "Remove it, or take another name."
            )
    options = Options(
        signals=tuple(signals), num_signals=num_signals, folds=folds, resamples=resamples, exclude=tuple(exclude),
        training_steps=training_steps, selection_steps=selection_steps, seed=seed,
    )  # fmt: skip
    beside = report or out.with_name(f"{out.stem}-report")
    claim(beside, "treegraft fit scheduler")
    torch.set_num_threads(1)  # networks so small lose by sharing
    with progress() as say:
        material = gather(folders, options, held_out)
        fitted = fit_scheduler(material, options, beside, say)
        ablations = fit_ablations(fitted, options, beside, say) if with_ablations else {}
    path = write_report(fitted, beside, ablations)
    out.parent.mkdir(parents=True, exist_ok=True)
    for name, each in {None: fitted, **ablations}.items():
        each.weights.save(files[name])
    click.echo(path.read_text())
    click.echo(f"weights: {', '.join(map(str, files.values()))}; report: {path}", err=True)
