"""What a fit came to: Markdown and plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from treegraft.statistics import CostModel
from treegraft.tree import Floats, Ints
from treegraft_plugins.schedulers.distilled import fit, trajectories
from treegraft_plugins.schedulers.distilled.collect import Manifest
from treegraft_plugins.schedulers.distilled.fit import Predictor, Setup, World
from treegraft_plugins.schedulers.distilled.offline import Fitted
from treegraft_plugins.schedulers.distilled.trajectories import Rounds

RATIOS = (2.0, 4.0, 8.0, 16.0)
BOOTSTRAPS = 1000


@attrs.frozen
class Line:
    """Modelled throughput of one report, or of all, under one cost table: emitted tokens per ms, as ratios.

    Attributes:
        report: its name, "all" for all of them.
        costs: what the table is called.
        num_rounds: labelled.
        of_best_fixed: the scheduler's, as a share of the best fixed schedule's.
        over_endpoint: over the better endpoint's, less one; with its 95 % interval over rounds.
        best_over_endpoint: what the best fixed schedule has over the better endpoint.
        oracle_over_endpoint: what choosing every round's schedule in hindsight has.
        calls: share of calls by step [D].
        best: the best fixed schedule, a 1 where it calls.
        learned: "always" or "never" where that is all it does, else "".
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
    rounds: Rounds, setup: Setup, tables: Sequence[tuple[str, CostModel, bool]], follow: Any, by: Any = None
) -> list[Line]:
    """How a scheduler does on labelled rounds, report by report and over all.

    Args:
        rounds: N of them.
        setup: of the pipeline.
        tables: (name, cost table, whether the budget adapts).
        follow: of a World of these rounds -> int [N], the schedules it takes.
        by: str [N] to group by; the rounds' reports by default.
    """
    found = []
    groups = rounds.report if by is None else by
    for name, costs, adaptive in tables:
        place = fit.world(rounds, setup, costs, adaptive)
        taken = follow(place)
        names = sorted(set(groups.tolist()))
        for report in [*names, "all"] if len(names) > 1 else names:
            kept = np.ones(len(rounds), np.bool_) if report == "all" else groups == report
            found.append(_line(report, name, place, taken, np.flatnonzero(kept)))
    return found


def _line(report: str, costs: str, place: World, taken: Ints, kept: Ints) -> Line:
    steps, result = place.rounds.steps, place.result
    emitted, ms = result.emitted[kept], result.ms[kept]
    own = (emitted[np.arange(len(kept)), taken[kept]], ms[np.arange(len(kept)), taken[kept]])
    fixed = emitted.sum(0) / ms.sum(0)
    endpoint = int((0, len(fixed) - 1)[int(fixed[[0, -1]].argmax())])
    rate = own[0].sum() / own[1].sum()
    inside = attrs.evolve(result, emitted=emitted, ms=ms)
    called = trajectories.schedules(steps)[taken[kept]]
    always, never = (taken[kept] == len(fixed) - 1).all(), (taken[kept] == 0).all()
    return Line(
        report=report,
        costs=costs,
        num_rounds=len(kept),
        of_best_fixed=float(rate / fixed.max()),
        over_endpoint=float(rate / fixed[endpoint] - 1),
        interval=_interval(own, (emitted[:, endpoint], ms[:, endpoint])),
        best_over_endpoint=float(fixed.max() / fixed[endpoint] - 1),
        oracle_over_endpoint=float(inside.rate(inside.oracle()) / fixed[endpoint] - 1),
        calls=tuple(called.mean(0).tolist()),
        best="".join("01"[int(flag)] for flag in trajectories.schedules(steps)[int(fixed.argmax())]),
        learned="always" if always else "never" if never else "",
    )


def _interval(own: tuple[Floats, Floats], other: tuple[Floats, Floats], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval, over rounds, of one rate over another, less one."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(own[0]), (BOOTSTRAPS, len(own[0])))
    ratios = (own[0][rows].sum(1) / own[1][rows].sum(1)) / (other[0][rows].sum(1) / other[1][rows].sum(1)) - 1
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def tables_for(manifest: Manifest, ratios: Sequence[float] = RATIOS) -> list[tuple[str, CostModel, bool]]:
    """Flat tables at some ratios t_target / t_middle, and the machine's own."""
    flat: list[tuple[str, CostModel, bool]] = [
        (f"flat, ratio {ratio:g}", fit.flat_costs(manifest.setup, ratio), False) for ratio in ratios
    ]
    return [*flat, ("as measured", manifest.cost_model, True)]


def out_of_fold(predictors: Sequence[Predictor], fold: Ints) -> Any:
    """What `lines` follows: the predictors that have not seen a round's fold."""
    return lambda place: fit.follow(place, fit.out_of_fold(predictors, place, fold))


def whole(predictor: Predictor) -> Any:
    """What `lines` follows: one predictor, for rounds that it has not seen."""
    return lambda place: fit.follow(place, predictor(fit.state_inputs(place, predictor.names)))


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


def write_report(fitted: Fitted, folder: Path) -> Path:
    """Write `report.md` and its plots; returns the Markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    text = ["# A fitted scheduler", ""]
    found: list[Line] = []
    for number, manifest in enumerate(fitted.manifests):
        kept = np.flatnonzero(fitted.owner == number)
        follow = out_of_fold(fitted.predictors, fitted.fold[kept])
        found += lines(fitted.rounds.take(kept), manifest.setup, tables_for(manifest), follow)
    learned = {line.learned for line in found if line.report == "all" or len({each.report for each in found}) == 1}
    if learned and "" not in learned:
        text += [
            f"**It has learned nothing but {' and '.join(sorted(learned))}**: no decision depends on the tree.",
            "",
        ]
    text += _setting(fitted)
    text += ["## Modelled throughput, out of fold", "", *table(found), ""]
    text += _selection(fitted)
    text += ["## Out-of-fold errors of the value system", "", "Relative to always guessing the mean (1.0).", ""]
    text += [f"- {name}: {error:.3f}" for name, error in fitted.errors.items()] + [""]
    text += ["## Is the margin's sign right?", "", *_reliability(fitted), ""]
    path = folder / "report.md"
    path.write_text("\n".join(text))
    _plots(fitted, found, folder)
    return path


def _setting(fitted: Fitted) -> list[str]:
    header = fitted.weights.header
    pairs = ", ".join(" + ".join(pair) for pair in header.pairs)
    return [
        f"{len(fitted.rounds)} rounds of {pairs}, {len(set(fitted.rounds.report))} reports in {fitted.fold.max() + 1} "
        f"folds; D = {header.steps}, W = {header.width}, B = {header.max_nodes}; t_target / t_middle from "
        f"{header.ratios[0]:g} to {header.ratios[1]:g}. It reads: {', '.join(header.signals)}.",
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

    In hindsight calling is right where the best schedule that calls next makes more tokens per ms than the best one
    that skips. Decisions of single rounds are noisy: what counts is that the share rises with the margin.
    """
    points: list[tuple[float, bool]] = []
    for number, manifest in enumerate(fitted.manifests):
        kept = np.flatnonzero(fitted.owner == number)
        rounds = fitted.rounds.take(kept)
        for _, costs, adaptive in tables_for(manifest)[:-1]:
            place = fit.world(rounds, manifest.setup, costs, adaptive)
            margin = fit.out_of_fold(fitted.predictors, place, fitted.fold[kept])
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
    """float [N, 2^D - 1]: log(best throughput if the next decision is to call / to skip), as it came out."""
    steps = place.rounds.steps
    log_rate = np.log(place.result.emitted / place.result.ms)
    best = np.full((len(place.rounds), trajectories.num_states(steps), 2), -np.inf)
    for state, called, _, schedule in trajectories.decisions(steps):
        best[:, state, int(called)] = np.maximum(best[:, state, int(called)], log_rate[:, schedule])
    return best[..., 1] - best[..., 0]


def _reliability(fitted: Fitted) -> list[str]:
    rows = [f"| {margin:+.3f} | {share:.0%} | {count} |" for margin, share, count in reliability(fitted)]
    return ["| mean margin | calling was right | decisions |", "| --- | --- | --- |", *rows]


def _plots(fitted: Fitted, found: Sequence[Line], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    if fitted.curve:
        figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
        axis.plot(range(len(fitted.curve)), [error for _, error in fitted.curve], marker="o")
        axis.set_xticks(range(len(fitted.curve)), [name or "none" for name, _ in fitted.curve], rotation=40, ha="right")
        axis.set_ylabel("mean normalised out-of-fold error")
        axis.set_title(f"Selection of tree signals ({len(fitted.rounds)} rounds)")
        figure.savefig(folder / "selection.png", dpi=150)
        plt.close(figure)
    figure, axis = plt.subplots(figsize=(5, 4), layout="constrained")
    points = reliability(fitted)
    axis.plot([margin for margin, _, _ in points], [share for _, share, _ in points], marker="o")
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.set_xlabel("predicted margin (log throughput, call over skip)")
    axis.set_ylabel("share in which calling was right")
    axis.set_title("Reliability of the margin's sign, out of fold")
    figure.savefig(folder / "reliability.png", dpi=150)
    plt.close(figure)
    whole_lines = [line for line in found if line.report == "all"] or list(found)
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for line in whole_lines:
        axis.plot(range(1, len(line.calls) + 1), line.calls, marker="o", label=line.costs)
    axis.set_xlabel("step")
    axis.set_ylabel("share of rounds that call the middle")
    axis.set_xticks(range(1, fitted.rounds.steps + 1))
    axis.set_ylim(-0.02, 1.02)
    axis.legend()
    axis.set_title("Calls by step and cost ratio, out of fold")
    figure.savefig(folder / "calls.png", dpi=150)
    plt.close(figure)
