"""What a fit came to: Markdown and plots."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs
import numpy as np

from treegraft.statistics import CostModel
from treegraft.tree import Bools, Floats, Ints
from treegraft_plugins.schedulers.distilled import fit, trajectories
from treegraft_plugins.schedulers.distilled.collect import Manifest
from treegraft_plugins.schedulers.distilled.fit import Predictor, Setup, World
from treegraft_plugins.schedulers.distilled.offline import Fitted
from treegraft_plugins.schedulers.distilled.trajectories import Rounds
from treegraft_plugins.schedulers.distilled.weights import VALUE_ONLINE

RATIOS = (2.0, 4.0, 8.0, 16.0)
BOOTSTRAPS = 1000
Table = tuple[str, CostModel, bool]
"""What a cost table is called, the table, and whether the budget adapts to it."""
Follow = Callable[[World, Ints], Ints]
"""Of (rounds of a collection under a table, int [N] their folds) -> int [N], the schedules that are taken."""


@attrs.frozen
class Line:
    """Modelled throughput of one report, or of all, under one cost table: emitted tokens per ms, as ratios.

    Attributes:
        report: its name; of all together, the pair's.
        costs: what the table is called.
        num_rounds: labelled.
        of_best_fixed: the scheduler's, as a share of the best fixed schedule's.
        over_endpoint: over the better endpoint's, less one; with its 95 % interval over rounds.
        best_over_endpoint: what the best fixed schedule has over the better endpoint.
        oracle_over_endpoint: what choosing every round's schedule in hindsight has.
        calls: share of calls by step [D].
        best: the best fixed schedule, a 1 where it calls.
        learned: "always", "never" or a schedule where that is all it does, else "".
    """

    report: str
    costs: str
    num_rounds: int
    of_best_fixed: float
    over_endpoint: float
    interval: tuple[float, float]
    best_over_endpoint: float
    oracle_over_endpoint: float
    calls: tuple[float, ...]
    best: str
    learned: str


def lines(
    rounds: Rounds,
    setup: Setup,
    tables: Sequence[Table],
    follow: Callable[[World], Ints],
    total: str = "all",
    suffix: str = "",
) -> list[Line]:
    """How a scheduler does on labelled rounds, report by report and over all.

    Args:
        rounds: N of them.
        setup: of the pipeline.
        tables: cost tables to do it under.
        follow: of these rounds under a table -> int [N], the schedules it takes.
        total: what all reports together are called.
        suffix: put behind the name of a report.
    """
    found = []
    for name, costs, adaptive in tables:
        place = fit.world(rounds, setup, costs, adaptive)
        taken = follow(place)
        found += [
            _line(f"{report}{suffix}", name, place, taken, rounds.report == report)
            for report in sorted(set(rounds.report.tolist()))
        ]
        found.append(_line(total, name, place, taken, np.ones(len(rounds), np.bool_)))
    return found


def _line(report: str, costs: str, place: World, taken: Ints, kept: Bools) -> Line:
    steps, inside, taken = place.rounds.steps, place.result.take(kept), taken[kept]
    fixed = inside.fixed_rates()
    endpoint = int((0, len(fixed) - 1)[int(fixed[[0, -1]].argmax())])
    rate, own = inside.rate(taken), inside.along(taken)
    called = trajectories.schedules(steps)[taken]
    return Line(
        report=report,
        costs=costs,
        num_rounds=len(taken),
        of_best_fixed=float(rate / fixed.max()),
        over_endpoint=float(rate / fixed[endpoint] - 1),
        interval=_interval(own, inside.along(np.full(len(taken), endpoint))),
        best_over_endpoint=float(fixed.max() / fixed[endpoint] - 1),
        oracle_over_endpoint=float(inside.rate(inside.oracle()) / fixed[endpoint] - 1),
        calls=tuple(called.mean(0).tolist()),
        best=_schedule(steps, int(fixed.argmax())),
        learned=_learned(steps, taken),
    )


def _learned(steps: int, taken: Ints) -> str:
    """What a scheduler does that takes the same schedule in every round; "" of one that does not."""
    if (taken != taken[0]).any():
        return ""
    return {0: "never", 2**steps - 1: "always"}.get(int(taken[0]), _schedule(steps, int(taken[0])))


def _schedule(steps: int, number: int) -> str:
    """A schedule as digits, a 1 where it calls."""
    return f"{number:0{steps}b}"


def _interval(own: tuple[Floats, Floats], other: tuple[Floats, Floats], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval, over rounds, of one rate over another, less one."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(own[0]), (BOOTSTRAPS, len(own[0])))
    ratios = (own[0][rows].sum(1) / own[1][rows].sum(1)) / (other[0][rows].sum(1) / other[1][rows].sum(1)) - 1
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def tables_for(manifest: Manifest, ratios: Sequence[float] = RATIOS) -> list[Table]:
    """Flat tables at some ratios t_target / t_middle, and the machine's own."""
    flat: list[Table] = [(f"flat, ratio {ratio:g}", fit.flat_costs(manifest.setup, ratio), False) for ratio in ratios]
    return [*flat, ("as measured", manifest.cost_model, True)]


def whole(predictor: Predictor) -> Callable[[World], Ints]:
    """What `lines` follows: one predictor, for rounds that it has not seen."""
    return lambda place: fit.follow(place, lambda place: predictor(fit.state_inputs(place, predictor.names)))


def table(found: Sequence[Line]) -> list[str]:
    """A Markdown table."""
    head = (
        "report", "costs", "rounds", "of the best fixed", "over the better endpoint", "95 %", "best fixed over it",
        "oracle over it", "best", "calls by step",
    )  # fmt: skip
    rows = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for line in found:
        calls = line.learned or ", ".join(f"{share:.2f}" for share in line.calls)
        rows.append(
            f"| {line.report} | {line.costs} | {line.num_rounds} | {line.of_best_fixed:.1%} "
            f"| {line.over_endpoint:+.1%} | {line.interval[0]:+.1%} to {line.interval[1]:+.1%} "
            f"| {line.best_over_endpoint:+.1%} | {line.oracle_over_endpoint:+.1%} | {line.best} | {calls} |"
        )
    return rows


def lines_of(fitted: Fitted, follow: Follow) -> list[Line]:
    """The lines of every pair that was fitted to."""
    material, found = fitted.material, []
    folds = [material.fold[material.owner == number] for number in range(len(material.parts))]
    for manifest, numbers in _by_pair(material.manifests):
        rounds = Rounds.joined([material.parts[number] for number in numbers])
        found += _by_temperature(manifest, rounds, np.concatenate([folds[number] for number in numbers]), follow)
    return found


def _by_pair(manifests: Sequence[Manifest]) -> list[tuple[Manifest, list[int]]]:
    """The numbers of each pair's collections, behind the manifest of the first, whose cost table stands for all."""
    pairs: dict[str, tuple[Manifest, list[int]]] = {}
    for number, manifest in enumerate(manifests):
        pairs.setdefault(manifest.pair, (manifest, []))[1].append(number)
    return list(pairs.values())


def _by_temperature(manifest: Manifest, rounds: Rounds, fold: Ints, follow: Follow) -> list[Line]:
    """Lines of one pair: texts of different temperatures are no one's throughput together."""
    found = []
    for temperature in np.unique(rounds.temperature):
        own, suffix = rounds.temperature == temperature, f", temperature {temperature:g}"
        found += lines(
            rounds.take(own), manifest.setup, tables_for(manifest), partial(follow, fold=fold[own]),
            total=f"{manifest.pair}{suffix}", suffix=suffix,
        )  # fmt: skip
    return found


def _held_out(fitted: Fitted) -> list[str]:
    """What the predictor that is shipped comes to on what nothing was fitted to."""
    follow, held_out, found = whole(fitted.predictors[-1]), fitted.material.held_out, list[Line]()
    for manifest, numbers in _by_pair([manifest for manifest, _ in held_out]):
        rounds = Rounds.joined([held_out[number][1] for number in numbers])
        folds = np.zeros(len(rounds), np.int64)
        found += _by_temperature(manifest, rounds, folds, lambda place, fold: follow(place))
    return ["## Modelled throughput on what was held out", "", *table(found), ""] if found else []


def followed(fitted: Fitted) -> Follow:
    """What a fit does with rounds of folds that it has not seen."""
    if fitted.weights.header.ablation == VALUE_ONLINE:
        return lambda place, fold: fit.follow(place, lambda place: fit.margins(fitted.value, [place], fold)[0])
    return lambda place, fold: fit.follow(place, lambda place: fit.out_of_fold(fitted.predictors, place, fold))


def write_report(fitted: Fitted, folder: Path, ablations: Mapping[str, Fitted] | None = None) -> Path:
    """Write `report.md` and its plots; returns the Markdown file.

    Args:
        fitted: the fit.
        folder: where to.
        ablations: of it, by name, to compare it with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = ["# A fitted scheduler", ""]
    found = lines_of(fitted, followed(fitted))
    pairs = tuple(f"{manifest.pair}, temperature" for manifest in fitted.material.manifests)
    totals = [line for line in found if line.report.startswith(pairs)]
    learned = _learned_by_table(fitted)
    if "" not in learned:
        text += [f"**It has learned nothing but {' and '.join(sorted(learned))}**: nothing depends on the tree.", ""]
    text += _setting(fitted)
    text += ["## Modelled throughput, out of fold", "", *table(found), ""]
    text += _held_out(fitted)
    text += _ablations({"whole": fitted, **ablations}, totals) if ablations else []
    text += _selection(fitted)
    text += ["## Out-of-fold errors of the value system", "", "Relative to always guessing the mean (1.0).", ""]
    text += [f"- {name}: {error:.3f}" for name, error in fitted.errors.items()] + [""]
    text += ["## Is the margin's sign right?", "", *_reliability(fitted), ""]
    path = folder / "report.md"
    path.write_text("\n".join(text))
    _plots(fitted, totals, folder)
    return path


def _learned_by_table(fitted: Fitted) -> set[str]:
    """What the predictor that is shipped does under each of the tables; "" where that depends on the tree."""
    follow, header = whole(fitted.predictors[-1]), fitted.weights.header
    return {
        _learned(header.steps, follow(fit.world(part, manifest.setup, costs, adaptive)))
        for manifest, part in zip(fitted.material.manifests, fitted.material.parts, strict=True)
        for _, costs, adaptive in tables_for(manifest)
    }


def _ablations(arms: Mapping[str, Fitted], totals: Sequence[Line]) -> list[str]:
    """Modelled throughput of all arms, and of calling at every other step, as shares of the best fixed schedule's."""
    steps = arms["whole"].weights.header.steps
    every_other = sum(1 << (steps - 1 - step) for step in range(0, steps, 2))
    shown = {name: lines_of(each, followed(each)) for name, each in arms.items()}
    shown[_schedule(steps, every_other)] = lines_of(arms["whole"], lambda place, fold: np.full(len(fold), every_other))
    shares = {name: {(line.report, line.costs): line.of_best_fixed for line in found} for name, found in shown.items()}
    return [
        "## Ablations, out of fold", "",
        "Modelled throughput as a share of the best fixed schedule's; the time to decide is not in it.", "",
        f"| pair | costs | {' | '.join(shares)} |", "| --- " * (len(shares) + 2) + "|",
        *[
            f"| {line.report} | {line.costs} "
            f"| {' | '.join(f'{share[line.report, line.costs]:.1%}' for share in shares.values())} |"
            for line in totals
        ],
        "",
    ]  # fmt: skip


def _setting(fitted: Fitted) -> list[str]:
    header, rounds = fitted.weights.header, fitted.material.rounds
    pairs = ", ".join(" + ".join(pair) for pair in header.pairs)
    return [
        f"{len(rounds)} rounds of {pairs}: {len(set(rounds.report.tolist()))} reports in "
        f"{fitted.material.fold.max() + 1} folds. D = {header.steps}, W = {header.width}, B = {header.max_nodes}; "
        f"t_target / t_middle from {header.ratios[0]:g} to {header.ratios[1]:g}.",
        "",
        f"It reads: {', '.join(header.signals)}.",
        "",
    ]


def _selection(fitted: Fitted) -> list[str]:
    if not fitted.curve:
        return []
    rows = [f"| {name or '(none)'} | {error:.4f} |" for name, error in fitted.curve]
    return [
        "## Selection of signals", "",
        "Mean normalised out-of-fold error once a signal is added (`selection.png`).", "",
        "| signal | error |", "| --- | --- |", *rows, "",
    ]  # fmt: skip


def reliability(fitted: Fitted, num_bins: int = 8) -> list[tuple[float, float, int]]:
    """(mean margin, share of decisions in which calling was right in hindsight, how many) by bins of the margin.

    In hindsight calling is right where the best schedule that calls next has the greater surplus than the best one that
    skips. Decisions of single rounds are noisy: what counts is that the share rises with the margin.
    """
    points: list[tuple[float, bool]] = []
    material = fitted.material
    for number, (manifest, part) in enumerate(zip(material.manifests, material.parts, strict=True)):
        for _, costs, adaptive in tables_for(manifest)[:-1]:
            place = fit.world(part, manifest.setup, costs, adaptive)
            margin = fit.out_of_fold(fitted.predictors, place, material.fold[material.owner == number])
            gain = hindsight(place)
            points += zip(margin.ravel().tolist(), (gain.ravel() > 0).tolist(), strict=True)
    points.sort()
    bins = [points[len(points) * k // num_bins : len(points) * (k + 1) // num_bins] for k in range(num_bins)]
    return [
        (sum(m for m, _ in each) / len(each), sum(right for _, right in each) / len(each), len(each))
        for each in bins
        if each
    ]


def hindsight(place: World) -> Floats:
    """float [N, 2^D - 1]: surplus (tokens) if the next decision is to call, less that if to skip, as it came out."""
    steps = place.rounds.steps
    surplus = place.result.emitted - place.rate[:, None] * place.result.ms
    best = np.full((len(place.rounds), trajectories.num_states(steps), 2), -np.inf)
    for state, called, _, schedule in trajectories.decisions(steps):
        best[:, state, int(called)] = np.maximum(best[:, state, int(called)], surplus[:, schedule])
    return best[..., 1] - best[..., 0]


def _reliability(fitted: Fitted) -> list[str]:
    rows = [f"| {margin:+.3f} | {share:.0%} | {count} |" for margin, share, count in reliability(fitted)]
    return ["| mean margin | calling was right | decisions |", "| --- | --- | --- |", *rows]


def _plots(fitted: Fitted, totals: Sequence[Line], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    if fitted.curve:
        figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
        axis.plot(range(len(fitted.curve)), [error for _, error in fitted.curve], marker="o")
        axis.set_xticks(range(len(fitted.curve)), [name or "none" for name, _ in fitted.curve], rotation=40, ha="right")
        axis.set_ylabel("mean normalised out-of-fold error")
        axis.set_title(f"Selection of tree signals ({len(fitted.material.rounds)} rounds)")
        figure.savefig(folder / "selection.png", dpi=150)
        plt.close(figure)
    figure, axis = plt.subplots(figsize=(5, 4), layout="constrained")
    points = reliability(fitted)
    axis.plot([margin for margin, _, _ in points], [share for _, share, _ in points], marker="o")
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.set_xlabel("predicted margin (tokens, call over skip)")
    axis.set_ylabel("share in which calling was right")
    axis.set_title("Reliability of the margin's sign, out of fold")
    figure.savefig(folder / "reliability.png", dpi=150)
    plt.close(figure)
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    several = len(fitted.material.manifests) > 1
    for line in totals:
        label = f"{line.report}: {line.costs}" if several else line.costs
        axis.plot(range(1, len(line.calls) + 1), line.calls, marker="o", label=label)
    axis.set_xlabel("step")
    axis.set_ylabel("share of rounds that call the middle")
    axis.set_xticks(range(1, fitted.material.rounds.steps + 1))
    axis.set_ylim(-0.02, 1.02)
    axis.legend()
    axis.set_title("Calls by step and cost ratio, out of fold")
    figure.savefig(folder / "calls.png", dpi=150)
    plt.close(figure)
