"""From collections to weights, step by step; what a step made is kept, so that an interrupted fit goes on."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from treegraft.errors import RequestError, suggest
from treegraft.kept import damaged, write_whole
from treegraft.tree import Ints
from treegraft_plugins.fitted import read_arrays, save, versions
from treegraft_plugins.options import whole
from treegraft_plugins.schedulers.distilled import fit, trajectories
from treegraft_plugins.schedulers.distilled.collect import Manifest, read_collection
from treegraft_plugins.schedulers.distilled.fit import RATIOS, Predictor, ValueSystem, World
from treegraft_plugins.schedulers.distilled.signals import CANDIDATES
from treegraft_plugins.schedulers.distilled.trajectories import Rounds
from treegraft_plugins.schedulers.distilled.weights import (
    ALL_SIGNALS,
    FORMAT,
    ONE_SIGNAL,
    VALUE_ONLINE,
    Header,
    Weights,
    predictor_arrays,
    predictor_of,
    value_arrays,
    value_of,
)

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
        seed: of everything random.
    """

    signals: tuple[str, ...] = ()
    num_signals: int = attrs.field(default=6, validator=whole(1, len(CANDIDATES)))
    folds: int = attrs.field(default=5, validator=whole(2))
    resamples: int = attrs.field(default=12, validator=whole(2))
    training_steps: int = attrs.field(default=2500, validator=whole(1))
    selection_steps: int = attrs.field(default=250, validator=whole(1))
    exclude: tuple[str, ...] = ()
    seed: int = attrs.field(default=0, validator=whole(0))


@attrs.frozen(eq=False)
class Material:
    """What is fitted to.

    Attributes:
        manifests: of the collections.
        parts: the rounds of each.
        fold: int [N], of all rounds in the collections' order.
        worlds: all rounds under every cost table.
        held_out: (manifest, rounds) of what is not fitted to, and only reported on.
    """

    manifests: tuple[Manifest, ...]
    parts: tuple[Rounds, ...]
    fold: Ints
    worlds: tuple[World, ...]
    held_out: tuple[tuple[Manifest, Rounds], ...] = ()

    @property
    def rounds(self) -> Rounds:
        """All rounds."""
        return self.worlds[0].rounds

    @property
    def owner(self) -> Ints:
        """int [N], the collection of each round."""
        return np.repeat(np.arange(len(self.parts)), [len(part) for part in self.parts])


@attrs.frozen(eq=False)
class Fitted:
    """A fit and all that its report is made from.

    Attributes:
        material: what it was fitted to.
        curve: (signal, error once it is added), or empty where the signals were given.
        errors: out-of-fold errors of the value system.
        value: the value system.
        predictors: one without each fold, and last the one that is shipped.
        weights: for the scheduler.
    """

    material: Material
    curve: list[tuple[str, float]]
    errors: dict[str, float]
    value: ValueSystem
    predictors: list[Predictor]
    weights: Weights


def gather(folders: Sequence[Path], options: Options, held_out: Sequence[Path] = ()) -> Material:
    """The rounds of collections, under the cost tables to fit for.

    Args:
        folders: made by `treegraft fit collect`, of pipelines with the same parts and sizes.
        options: how to fit.
        held_out: more of them, to report on only, as on the rounds of excluded categories.

    Raises:
        RequestError: the collections do not fit together, or are too few reports.
    """
    every = [read_collection(folder) for folder in (*folders, *held_out)]
    _check_alike([*folders, *held_out], [manifest for manifest, _ in every])
    collections, others = every[: len(folders)], every[len(folders) :]
    unknown = set(options.exclude).difference(*(rounds.category.tolist() for _, rounds in collections))
    if unknown:
        known = sorted({name for _, rounds in collections for name in rounds.category.tolist()})
        raise RequestError(
            "--exclude", f"{min(unknown)!r}", f"Categories: {', '.join(known)}.", suggest(min(unknown), known)
        )
    for folder, (manifest, _) in zip((*folders, *held_out), every, strict=True):
        costs, middle = manifest.cost_model, manifest.setup.middle
        if not (costs.target_ms(1, 0) > 0 and costs.source_ms(middle, 1) > 0):
            raise RequestError(
                str(folder), f"a target or {middle} that costs nothing", "Allowed: latencies > 0.",
                "Collect anew, with another cost table.",
            )  # fmt: skip
    manifests, parts, left_out = [], [], []
    for manifest, rounds in collections:
        is_excluded = np.isin(rounds.category, options.exclude)
        left_out.append((manifest, rounds.take(is_excluded)))
        if not is_excluded.all():
            manifests.append(manifest)
            parts.append(rounds.take(~is_excluded))
    reports = [name for part in parts for name in part.report.tolist()]
    try:
        fold = trajectories.folds(reports, options.folds)
    except ValueError as error:
        raise RequestError(
            "--folds", str(error), f"Allowed: at most as many folds as reports, here {len(set(reports))}.",
            "Collect more kinds of text, or fewer folds.",
        ) from error  # fmt: skip
    return Material(
        tuple(manifests), tuple(parts), fold, tuple(_worlds(manifests, parts, options)),
        tuple((manifest, rounds) for manifest, rounds in (*left_out, *others) if len(rounds)),
    )  # fmt: skip


def fit_scheduler(material: Material, options: Options, work: Path, progress: Progress) -> Fitted:
    """Fit a scheduler.

    Args:
        material: what to fit to.
        options: how.
        work: a folder for what finished steps made.
        progress: called with (what is being done, how much is done, how much there is).
    """
    steps = _Steps(work, material, options, progress)
    curve, names = [], options.signals
    if not names:
        curve = steps.selection()
        names = tuple(name for name, _ in curve[1 : options.num_signals + 1])
    return _fitted(material, steps, names, curve)


def fit_ablations(whole: Fitted, options: Options, work: Path, progress: Progress) -> dict[str, Fitted]:
    """By name, the ablations of a fit: the value system itself, the signal selected first, all candidates.

    Args:
        whole: the fit.
        options, work, progress: it was made with.
    """
    material, names = whole.material, whole.weights.header.signals
    steps = _Steps(work, material, options, progress)
    value_online = attrs.evolve(whole.weights.header, ablation=VALUE_ONLINE)
    return {
        VALUE_ONLINE: attrs.evolve(whole, weights=attrs.evolve(whole.weights, header=value_online, value=whole.value)),
        ONE_SIGNAL: _fitted(material, steps, names[:1], [], ONE_SIGNAL),
        ALL_SIGNALS: _fitted(material, steps, tuple(CANDIDATES), [], ALL_SIGNALS),
    }


def _fitted(
    material: Material,
    steps: "_Steps",
    names: tuple[str, ...],
    curve: list[tuple[str, float]],
    ablation: str | None = None,
) -> Fitted:
    """The value system over these signals, and the predictor of its margins."""
    value = steps.value_system(names)
    predictors = steps.predictors(value)
    manifests = material.manifests
    header = Header(
        signals=names,
        steps=material.rounds.steps,
        pairs=tuple(dict.fromkeys((each.target, each.middle) for each in manifests)),
        small=manifests[0].small,
        vocab_sizes=tuple(dict.fromkeys(each.vocab_size for each in manifests)),
        ratios=RATIOS,
        width=manifests[0].setup.width,
        max_nodes=manifests[0].setup.max_nodes,
        ablation=ablation,
        versions=versions(),
    )
    errors = fit.errors(value, material.worlds, material.fold)
    return Fitted(material, curve, errors, value, predictors, Weights(header, predictors[-1]))


def _check_alike(folders: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    first = manifests[0]
    for folder, other in zip(folders, manifests, strict=True):
        found = first.difference(other, ("steps", "small", "setup", "pipeline"))
        if found is not None:
            name, expected, said = found
            raise RequestError(
                f"{folder}: {name}", f"{said!r}, and {expected!r} in {folders[0]}",
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
    ]
    return [
        fit.jittered(fit.joined(list(places)), options.seed + number)
        for number, places in enumerate(zip(*by_pair, strict=True))
    ]


@attrs.define
class _Steps:
    """The steps that take minutes: what each made is kept on disk, under a key of all that it depends on."""

    folder: Path
    material: Material
    options: Options
    progress: Progress

    def selection(self) -> list[tuple[str, float]]:
        """The selection curve."""
        options = self.options
        most = min(len(CANDIDATES), options.num_signals + 2)
        path, key = self.folder / "selection.json", self._key("selection")
        if path.exists():
            with damaged(path):
                said = json.loads(path.read_text())
                if said["key"] == key:
                    return [(str(name), float(error)) for name, error in said["curve"]]
        self.progress("selecting signals", 0, most)
        curve = fit.select_signals(
            self.material.worlds, self.material.fold, most=most, num_steps=options.selection_steps,
            on_signal=lambda done: self.progress("selecting signals", done, most),
        )  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"key": key, "curve": curve}))
        return curve

    def value_system(self, names: tuple[str, ...]) -> ValueSystem:
        """The value system over these signals."""
        what, total = f"value system of {_counted(names)}", 2 * self.options.training_steps
        kept = self._kept("value", names)
        if kept is not None:
            return value_of(kept, names, self.material.rounds.steps)
        self.progress(what, 0, total)
        value = fit.fit_value_system(
            self.material.worlds, names, self.material.fold, num_steps=self.options.training_steps,
            seed=self.options.seed, on_step=lambda done: self.progress(what, done, total),
        )  # fmt: skip
        self._keep("value", names, value_arrays(value))
        return value

    def predictors(self, value: ValueSystem) -> list[Predictor]:
        """Predictors of its margins: one without each fold, and one of all rounds."""
        names, steps, total = value.names, self.material.rounds.steps, self.options.training_steps
        what = f"predictor of {_counted(names)}"
        kept = self._kept("predictors", names)
        if kept is not None:
            return [predictor_of(kept, names, steps, str(number)) for number in range(self.options.folds + 1)]
        wanted = fit.margins(value, self.material.worlds, self.material.fold)
        self.progress(what, 0, total)
        predictors = fit.fit_predictors(
            self.material.worlds, names, wanted, self.material.fold, num_steps=total, seed=self.options.seed,
            on_step=lambda done: self.progress(what, done, total),
        )  # fmt: skip
        arrays = [predictor_arrays(predictor, str(number)) for number, predictor in enumerate(predictors)]
        self._keep("predictors", names, {name: array for each in arrays for name, array in each.items()})
        return predictors

    def _kept(self, what: str, names: Sequence[str]) -> dict[str, NDArray[Any]] | None:
        path = self._path(what, names)
        if not path.exists():
            return None
        with damaged(path):
            return read_arrays(path)

    def _keep(self, what: str, names: Sequence[str], arrays: dict[str, NDArray[Any]]) -> None:
        save(self._path(what, names), arrays, {"signals": list(names)})

    def _path(self, what: str, names: Sequence[str]) -> Path:
        return self.folder / f"{what}-{self._key(names)[:16]}.safetensors"

    def _key(self, what: Any) -> str:
        rounds, options = self.material.rounds, attrs.asdict(self.options)
        said = [attrs.asdict(manifest) for manifest in self.material.manifests]
        content = json.dumps([what, FORMAT, said, len(rounds), float(rounds.signals.sum()), options], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)} signal{'s' if len(names) > 1 else ''}"
