"""From collections to weights, step by step; what a step made is kept, so that an interrupted fit goes on."""

import hashlib
import json
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import attrs
import numpy as np

from treegraft.errors import RequestError
from treegraft.tree import Floats, Ints
from treegraft_plugins.options import whole
from treegraft_plugins.schedulers.distilled import fit, trajectories
from treegraft_plugins.schedulers.distilled.collect import Manifest, read_collection
from treegraft_plugins.schedulers.distilled.fit import RATIOS, Predictor, ValueSystem, World
from treegraft_plugins.schedulers.distilled.signals import CANDIDATES
from treegraft_plugins.schedulers.distilled.trajectories import Rounds
from treegraft_plugins.schedulers.distilled.weights import Header, Weights

Progress = Callable[[str, int, int], None]


@attrs.frozen(kw_only=True)
class Options:
    """How to fit.

    Args:
        signals: tree signals to read, by name; empty selects `num_signals` of the candidates.
        num_signals: how many to select.
        folds: of the out-of-fold validation.
        resamples: cost tables, spread over the fitted range of t_target / t_middle.
        training_steps: of the heads and of the predictor.
        selection_steps: of the networks that judge candidates.
        exclude: categories that are kept out, to be judged on later.
        ablation: what is left out on purpose; `weights: auto` passes such weights by.
        seed: of everything random.
    """

    signals: tuple[str, ...] = ()
    num_signals: int = attrs.field(default=6, validator=whole(1, len(CANDIDATES)))
    folds: int = attrs.field(default=5, validator=whole(2))
    resamples: int = attrs.field(default=12, validator=whole(2))
    training_steps: int = attrs.field(default=2500, validator=whole(1))
    selection_steps: int = attrs.field(default=250, validator=whole(1))
    exclude: tuple[str, ...] = ()
    ablation: str | None = None
    seed: int = attrs.field(default=0, validator=whole(0))


@attrs.frozen(eq=False)
class Fitted:
    """A fit and all that its report is made from.

    Attributes:
        manifests: of the collections.
        rounds: all rounds that were fitted to, in the collections' order.
        owner: int [N], the collection of each round.
        fold: int [N].
        curve: (signal, error once it is added), or empty where the signals were given.
        errors: out-of-fold errors of the value system.
        value: the value system.
        margins: float [tables, N, 2^D - 1], out of fold.
        predictors: one without each fold, and last the one that is shipped.
        weights: for the scheduler.
    """

    manifests: tuple[Manifest, ...]
    rounds: Rounds
    owner: Ints
    fold: Ints
    curve: list[tuple[str, float]]
    errors: dict[str, float]
    value: ValueSystem
    margins: Floats
    predictors: list[Predictor]
    weights: Weights


def fit_scheduler(folders: Sequence[Path], options: Options, work: Path, progress: Progress) -> Fitted:
    """Fit a scheduler to collections.

    Args:
        folders: made by `treegraft fit collect`, of pipelines with the same D, W and B.
        options: how.
        work: a folder for what finished steps made.
        progress: called with (what is being done, how much is done, how much there is).

    Raises:
        RequestError: the collections do not fit together, or are too few reports.
    """
    collections = [read_collection(folder) for folder in folders]
    manifests = tuple(manifest for manifest, _ in collections)
    _check_alike(folders, manifests)
    parts = [rounds.take(~np.isin(rounds.category, options.exclude)) for _, rounds in collections]
    rounds, owner = Rounds.joined(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    try:
        fold = trajectories.folds(rounds.report, options.folds)
    except ValueError as error:
        raise RequestError(
            "--folds", str(error), f"Allowed: at most as many folds as reports, here {len(set(rounds.report))}.",
            "Collect more kinds of text, or fewer folds.",
        ) from error  # fmt: skip
    steps = _Steps(work, _key(manifests, rounds, options), progress)
    worlds = _worlds(manifests, parts, options)
    curve, names = [], options.signals
    if not names:
        curve = steps.selection(worlds, fold, options)
        names = tuple(name for name, _ in curve[1 : options.num_signals + 1])
    progress("value system", 0, 1)
    value = fit.fit_value_system(worlds, names, fold, num_steps=options.training_steps, seed=options.seed)
    progress("value system", 1, 1)
    wanted = fit.margins(value, worlds, fold)
    progress("predictor", 0, 1)
    predictors = fit.fit_predictors(
        worlds, names, wanted, fold, num_steps=options.training_steps, seed=options.seed
    )  # fmt: skip
    progress("predictor", 1, 1)
    header = Header(
        signals=names,
        steps=rounds.steps,
        pairs=tuple(dict.fromkeys((each.target, each.middle) for each in manifests)),
        vocab_sizes=tuple(dict.fromkeys(each.vocab_size for each in manifests)),
        ratios=RATIOS,
        width=manifests[0].setup.width,
        max_nodes=manifests[0].setup.max_nodes,
        ablation=options.ablation,
        versions={name: metadata.version(name) for name in ("treegraft", "torch", "numpy")},
    )
    return Fitted(
        manifests, rounds, owner, fold, curve, fit.errors(value, worlds, fold), value, wanted, predictors,
        Weights(header, predictors[-1], value),
    )  # fmt: skip


def _check_alike(folders: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    first = manifests[0]
    for folder, other in zip(folders, manifests, strict=True):
        for name in ("steps", "setup"):
            if getattr(other, name) != getattr(first, name):
                raise RequestError(
                    f"{folder}: {name}", f"{getattr(other, name)}, and {getattr(first, name)} in {folders[0]}",
                    "Allowed: collections of the same pipeline, with any models.", "Fit them apart.",
                )  # fmt: skip


def _worlds(manifests: Sequence[Manifest], parts: Sequence[Rounds], options: Options) -> list[World]:
    """All rounds under every resampled cost table; a table has the shape that was measured for each pair."""
    by_pair = [
        [
            fit.world(part, manifest.setup, costs, adaptive)
            for costs, adaptive in fit.sampled_costs(
                manifest.cost_model, manifest.setup, options.resamples, options.seed
            )
        ]
        for manifest, part in zip(manifests, parts, strict=True)
        if len(part)
    ]
    return [fit.joined(list(places)) for places in zip(*by_pair, strict=True)]


def _key(manifests: Sequence[Manifest], rounds: Rounds, options: Options) -> str:
    said = [attrs.asdict(manifest) for manifest in manifests]
    content = json.dumps([said, len(rounds), float(rounds.signals.sum()), attrs.asdict(options)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


@attrs.define
class _Steps:
    """Steps that take minutes, kept on disk under a key of all that they depend on."""

    folder: Path
    key: str
    progress: Progress

    def selection(self, worlds: Sequence[World], fold: Ints, options: Options) -> list[tuple[str, float]]:
        path = self.folder / "selection.json"
        if path.exists():
            said = json.loads(path.read_text())
            if said["key"] == self.key:
                return [(str(name), float(error)) for name, error in said["curve"]]
        most = min(len(CANDIDATES), options.num_signals + 2)
        done = 0

        def report(line: str) -> None:
            nonlocal done
            done += 1
            self.progress("selecting signals", done, most)

        self.progress("selecting signals", 0, most)
        curve = fit.select_signals(worlds, fold, most=most, num_steps=options.selection_steps, report=report)
        self.folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"key": self.key, "curve": curve}))
        part.replace(path)
        return curve
