"""The offline path: replayed rounds -> value system -> margins -> predictor.

Four heads, {skip, call} x {accepted tokens, log latency}, are fitted to the state, the action's branch and the rest of
the schedule. Out of fold, so that a maximum over noisy predictions is not biased upwards, they give for every state the
best surplus that either action can still come to: tokens, less what the time could have brought otherwise. The
difference is the margin, which a predictor learns from the state alone.

Source: TreeGraft, section 4 and appendix B; there the margin is the ratio of each round's own throughputs, by which a
round that can bring little is worth any time.
"""

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from treegraft.statistics import CostModel
from treegraft.tree import Floats, Ints
from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.schedulers.distilled import trajectories
from treegraft_plugins.schedulers.distilled.networks import Networks, Normaliser, train
from treegraft_plugins.schedulers.distilled.signals import CANDIDATES, NUM_RUNTIME, progress, runtime, suffix_flags
from treegraft_plugins.schedulers.distilled.trajectories import Outcome, Rounds

RATIOS = (1.0, 40.0)
"""Smallest and largest t_target / t_middle that is fitted for."""
MAX_MARGIN = 1.0  # tokens
MAX_JITTER = 0.5  # of the logarithm of a rate
MAX_SELECTION_ROWS, MAX_JUDGED_ROWS = 150_000, 20_000
Done = Callable[[int], None]
"""Called with how much is done."""


@attrs.frozen
class Setup:
    """The pipeline that the rounds were replayed under, by what decides and costs are told of it.

    Attributes:
        small, middle: names of the sources.
        width: W of the middle.
        max_nodes: B.
    """

    small: str
    middle: str
    width: int
    max_nodes: int


@attrs.frozen(eq=False)
class World:
    """Rounds under one cost table.

    Attributes:
        rounds: N of them.
        result: what their schedules come to.
        rate: float [N], emitted tokens per ms that time is worth in the text of each round.
    """

    rounds: Rounds
    result: Outcome
    rate: Floats


def sampled_costs(measured: FixedCosts | None, setup: Setup, num: int, seed: int = 0) -> list[tuple[CostModel, bool]]:
    """Cost tables over the fitted range, half of them flat as on a GPU and half of the measured shape.

    Args:
        measured: this machine's own table, for the shapes; None for flat ones alone.
        setup: names and sizes.
        num: how many; ratios t_target / t_middle are spread evenly over `RATIOS` on a logarithmic scale.
        seed: of speeds and of the small source's share.

    Returns:
        (table, whether the budget adapts to it) of each.
    """
    rng = np.random.default_rng(seed)
    low, high = np.log(RATIOS)
    tables: list[tuple[CostModel, bool]] = []
    for place in (np.arange(num) + rng.random(num)) / num:
        target_ms = float(np.exp(rng.uniform(np.log(2.0), np.log(2000.0))))
        middle_ms = target_ms / float(np.exp(low + place * (high - low)))
        small_ms = target_ms * float(np.exp(rng.uniform(np.log(1e-4), np.log(5e-2))))
        shaped = measured is not None and len(tables) % 2 == 1
        tables.append((_scaled(measured if shaped else None, setup, target_ms, middle_ms, small_ms), shaped))
    return tables


def _scaled(shape: FixedCosts | None, setup: Setup, target_ms: float, middle_ms: float, small_ms: float) -> FixedCosts:
    """A table with these latencies at B + 1 rows, and at `width` rows of a step."""
    if shape is None:
        return FixedCosts(target=target_ms, sources={setup.small: small_ms, setup.middle: middle_ms})
    target, middle = shape.target.table(), shape.sources[setup.middle].table()
    by_target = target_ms / float(shape.target_ms(setup.max_nodes + 1, 0))
    by_middle = middle_ms / float(shape.source_ms(setup.middle, setup.width))
    return FixedCosts(
        target={rows: ms * by_target for rows, ms in target.items()},
        sources={setup.small: small_ms, setup.middle: {rows: ms * by_middle for rows, ms in middle.items()}},
    )


def flat_costs(setup: Setup, ratio: float, small_share: float = 1e-3) -> FixedCosts:
    """A flat table, as on a GPU, with t_target / t_middle = `ratio`."""
    return _scaled(None, setup, 100.0, 100.0 / ratio, 100.0 * small_share)


def world(rounds: Rounds, setup: Setup, costs: CostModel, adaptive: bool) -> World:
    """Replayed rounds and what their schedules come to under `costs`."""
    result = trajectories.outcome(
        rounds, costs, small=setup.small, middle=setup.middle, width=setup.width, max_nodes=setup.max_nodes,
        adaptive=adaptive,
    )  # fmt: skip
    return World(rounds, result, _rates(rounds, result))


def _rates(rounds: Rounds, result: Outcome) -> Floats:
    """float [N]: what the best fixed schedule emits per ms in rounds of the same report and temperature."""
    rate = np.empty(len(rounds))
    for report in np.unique(rounds.report):
        for temperature in np.unique(rounds.temperature):
            own = (rounds.report == report) & (rounds.temperature == temperature)
            if own.any():
                rate[own] = result.take(own).fixed_rates().max()
    return rate


def jittered(place: World, seed: int) -> World:
    """The same rounds where time is worth something else: a request's rate is not known beforehand, and varies."""
    factor = np.exp(np.random.default_rng(seed).uniform(-MAX_JITTER, MAX_JITTER, len(place.rate)))
    return attrs.evolve(place, rate=place.rate * factor)


def joined(places: Sequence[World]) -> World:
    """Several worlds as one."""
    results = [place.result for place in places]
    columns = {
        field.name: np.concatenate([getattr(result, field.name) for result in results])
        for field in attrs.fields(Outcome)
    }
    rate = np.concatenate([place.rate for place in places])
    return World(Rounds.joined([place.rounds for place in places]), Outcome(**columns), rate)


def state_inputs(place: World, names: Sequence[str]) -> Floats:
    """float [N, 2^D - 1, 5 + 2 + D + S]: the state before every decision, with the signals of `names`."""
    rounds, result = place.rounds, place.result
    chosen = [list(CANDIDATES).index(name) for name in names]
    columns = [rounds.num_prompt_tokens, result.target_ms, result.middle_ms, place.rate]
    around = np.array([runtime(*row) for row in zip(*columns, strict=True)])
    inside = np.array([progress(history, rounds.steps) for history in trajectories.histories(rounds.steps)])
    shape = (len(rounds), len(inside))
    return np.concatenate(
        [
            np.broadcast_to(around[:, None], (*shape, around.shape[1])),
            np.broadcast_to(inside, (*shape, inside.shape[1])),
            rounds.signals[:, :, chosen],
        ],
        axis=-1,
    )


@attrs.frozen(eq=False)
class _Branch:
    """The decisions of one action: by row of a round, the state, the rest of the schedule, and the whole of it."""

    state: Ints
    suffix: Floats
    schedule: Ints

    @classmethod
    def of(cls, steps: int, called: bool) -> "_Branch":
        rows = [row for row in trajectories.decisions(steps) if row[1] == called]
        return cls(
            np.array([state for state, *_ in rows]),
            np.array([suffix_flags(flags, steps) for _, _, flags, _ in rows]),
            np.array([schedule for *_, schedule in rows]),
        )


@attrs.frozen(eq=False)
class ValueSystem:
    """The four heads: accepted tokens and log latency, where the next decision is to skip and where it is to call.

    Attributes:
        names: the tree signals it reads.
        normaliser: of its inputs.
        scale: float32 [2, 2], mean and deviation of the two targets.
        skip, call: heads of an action; network k of each target was fitted without fold k (rows [2 * folds]).
    """

    names: tuple[str, ...]
    steps: int
    normaliser: Normaliser
    scale: NDArray[np.float32]
    skip: Networks
    call: Networks

    def quality(self, state: Floats, rate: Floats, fold: Ints | None = None) -> Floats:
        """float [N, 2^D - 1, 2]: for every state the best surplus still in reach, by action (skip, call).

        A surplus (tokens) is what the round emits, less what its time could have brought otherwise: the throughput of
        the whole run is greatest where rounds maximise that, and not each its own throughput.

        Args:
            state: inputs [N, 2^D - 1, I].
            rate: float [N], emitted tokens per ms that time is worth.
            fold: int [N], the fold of each round, whose networks have not seen it; None takes the folds' average.
        """
        best = np.full((*state.shape[:2], 2), -np.inf)
        for action, heads in enumerate((self.skip, self.call)):
            branch = _Branch.of(self.steps, bool(action))
            x = self.normaliser(_with_suffix(state, branch))
            surplus = self._surplus(heads.predict(x.reshape(-1, x.shape[-1])), x.shape[:2], rate, fold)
            for row, at in enumerate(branch.state):
                best[:, at, action] = np.maximum(best[:, at, action], surplus[:, row])
        return best

    def margin(self, state: Floats, history: Sequence[bool], rate: float) -> float:
        """The margin of one state [I], searched anew: the failed ablation of using the value system online."""
        step, best = len(history), []
        for heads in (self.skip, self.call):
            rest = trajectories.schedules(self.steps - step - 1)
            suffixes = np.array([suffix_flags(suffix, self.steps) for suffix in rest.tolist()])
            x = self.normaliser(np.concatenate([np.broadcast_to(state, (len(rest), len(state))), suffixes], axis=1))
            best.append(float(self._surplus(heads.predict(x), (1, len(rest)), np.array([rate]), None).max()))
        return best[1] - best[0]

    def _surplus(self, out: NDArray[np.float32], shape: tuple[int, ...], rate: Floats, fold: Ints | None) -> Floats:
        out = out.reshape(2, -1, *shape)  # target, fold, round, decision
        if fold is None:
            accepted, log_ms = out.mean(1)
        else:
            accepted, log_ms = out[:, fold, np.arange(shape[0])]
        accepted = accepted * self.scale[0, 1] + self.scale[0, 0]
        log_ms = log_ms * self.scale[1, 1] + self.scale[1, 0]
        surplus: Floats = np.maximum(accepted, 0.0) + 1.0 - rate[:, None] * np.exp(log_ms)
        return surplus


def _with_suffix(state: Floats, branch: _Branch) -> Floats:
    """Inputs of the heads [N, R, I + D + 1]: the state of every decision row, and the rest of its schedule."""
    inputs = state[:, branch.state]
    return np.concatenate([inputs, np.broadcast_to(branch.suffix, (*inputs.shape[:2], branch.suffix.shape[1]))], -1)


def targets(place: World) -> Floats:
    """float [2, N, 2^D]: accepted tokens, log latency."""
    return np.stack([place.result.emitted - 1.0, np.log(place.result.ms)])


def fit_value_system(
    worlds: Sequence[World],
    names: Sequence[str],
    fold: Ints,
    *,
    num_steps: int = 2500,
    seed: int = 0,
    on_step: Done = lambda done: None,
) -> ValueSystem:
    """Fit the heads, each network without one fold.

    Args:
        worlds: the same rounds under several cost tables.
        names: tree signals to read.
        fold: int [N], the fold of each round.
        num_steps: of training, for each action.
        seed: of training.
        on_step: called with the steps done, 2 * num_steps in all.
    """
    steps, num_folds = worlds[0].rounds.steps, int(fold.max()) + 1
    state = np.concatenate([state_inputs(place, names) for place in worlds])
    wanted = np.concatenate([targets(place) for place in worlds], axis=1)
    scale = np.stack([wanted.mean((1, 2)), np.maximum(wanted.std((1, 2)), 1e-3)], 1).astype(np.float32)
    wanted = (wanted - scale[:, :1, None]) / scale[:, 1:, None]
    folds = np.tile(fold, len(worlds))
    heads, normaliser = [], None
    for called in (False, True):
        branch = _Branch.of(steps, called)
        x = _with_suffix(state, branch)
        normaliser = normaliser or Normaliser.of(x.reshape(-1, x.shape[-1]))
        rows = normaliser(x).reshape(-1, x.shape[-1])
        y = wanted[:, :, branch.schedule].reshape(2, -1).repeat(num_folds, 0).astype(np.float32)
        kept = folds[None] != np.arange(num_folds)[:, None]
        weight = np.tile(kept.repeat(len(branch.state), 1), (2, 1)).astype(np.float32)
        before = len(heads) * num_steps
        heads.append(
            train(rows, y, weight, num_steps=num_steps, seed=seed, on_step=lambda done, b=before: on_step(b + done))
        )
    assert normaliser is not None
    return ValueSystem(tuple(names), steps, normaliser, scale, *heads)


def errors(system: ValueSystem, worlds: Sequence[World], fold: Ints) -> dict[str, float]:
    """Out-of-fold errors of both branches, relative to what always guessing the mean would make (1.0).

    Returns:
        "accepted", "latency", "throughput" and their mean, "error".
    """
    state = np.concatenate([state_inputs(place, system.names) for place in worlds])
    wanted = np.concatenate([targets(place) for place in worlds], axis=1)
    folds = np.tile(fold, len(worlds))
    squared: dict[str, list[Floats]] = {"accepted": [], "latency": [], "throughput": []}
    spread: dict[str, list[Floats]] = {name: [] for name in squared}
    for called, heads in ((False, system.skip), (True, system.call)):
        branch = _Branch.of(system.steps, called)
        x = system.normaliser(_with_suffix(state, branch))
        out = heads.predict(x.reshape(-1, x.shape[-1])).reshape(2, -1, *x.shape[:2])
        out = out[:, folds, np.arange(len(state))] * system.scale[:, 1:, None] + system.scale[:, :1, None]
        truth = wanted[:, :, branch.schedule]
        values = zip(squared, ((out[0], truth[0]), (out[1], truth[1]), (_log_rate(out), _log_rate(truth))), strict=True)
        for name, (guess, true) in values:
            squared[name].append(((guess - true) ** 2).ravel())
            spread[name].append(((true - true.mean()) ** 2).ravel())
    share = {
        name: float(np.sqrt(np.concatenate(squared[name]).mean() / max(np.concatenate(spread[name]).mean(), 1e-12)))
        for name in squared
    }
    return {**share, "error": sum(share.values()) / len(share)}


def _log_rate(values: Floats) -> Floats:
    return np.log1p(np.maximum(values[0], 0.0)) - values[1]


def select_signals(
    worlds: Sequence[World], fold: Ints, *, most: int, num_steps: int = 250, on_signal: Done = lambda done: None
) -> list[tuple[str, float]]:
    """Forward selection among the candidates by the mean out-of-fold error of both branches.

    Smaller networks than the final ones judge the candidates, all of them and all folds side by side, on a sample of
    the rows.

    Args:
        worlds: the same rounds under several cost tables.
        fold: int [N], the fold of each round.
        most: how many to select.
        num_steps: of training.
        on_signal: called with how many are selected.

    Returns:
        (signal, error once it is added), in the order of selection; the first entry is ("", error without any).
    """
    steps, num_folds, names = worlds[0].rounds.steps, int(fold.max()) + 1, list(CANDIDATES)
    state = np.concatenate([state_inputs(place, names) for place in worlds])
    wanted = np.concatenate([targets(place) for place in worlds], axis=1)
    mean, std = wanted.mean((1, 2)), np.maximum(wanted.std((1, 2)), 1e-3)
    folds = np.tile(fold, len(worlds))
    first = NUM_RUNTIME + 2 + steps
    rng = np.random.default_rng(0)
    branches = []
    for called in (False, True):
        branch = _Branch.of(steps, called)
        x = _with_suffix(state, branch)
        rows = Normaliser.of(x.reshape(-1, x.shape[-1]))(x).reshape(-1, x.shape[-1])
        y = ((wanted[:, :, branch.schedule] - mean[:, None, None]) / std[:, None, None]).reshape(2, -1)
        sample = rng.permutation(len(rows))[:MAX_SELECTION_ROWS]
        branches.append((rows[sample], y[:, sample].astype(np.float32), folds.repeat(len(branch.state))[sample]))

    def judge(candidates: Sequence[Sequence[int]]) -> list[float]:
        """The error of each set of signals."""
        totals = np.zeros(len(candidates))
        for rows, y, fold_of in branches:
            mask = np.ones((len(candidates), rows.shape[1]), np.float32)
            mask[:, first : first + len(names)] = 0.0
            for number, chosen in enumerate(candidates):
                mask[number, [first + signal for signal in chosen]] = 1.0
            members = [
                (number, k, head) for number in range(len(candidates)) for k in range(num_folds) for head in (0, 1)
            ]
            networks = train(
                rows,
                y[[head for *_, head in members]],
                np.stack([fold_of != k for _, k, _ in members]).astype(np.float32),
                mask=mask[[number for number, *_ in members]],
                hidden=24,
                num_steps=num_steps,
                batch=512,
            )
            judged = fold_of[:MAX_JUDGED_ROWS]
            out = networks.predict(rows[: len(judged)], mask[[number for number, *_ in members]])
            out = out.reshape(len(candidates), num_folds, 2, -1)
            own = out[:, judged, :, np.arange(len(judged))]  # row, candidate, head
            true = y[:, : len(judged)].T
            error = ((own - true[:, None]) ** 2).mean(0)
            guessed_rate, true_rate = (_log_rate(np.moveaxis(v * std + mean, -1, 0)) for v in (own, true))
            rate_error = ((guessed_rate - true_rate[:, None]) ** 2).mean(0) / max(float(true_rate.var()), 1e-12)
            totals += (np.sqrt(error).sum(1) + np.sqrt(rate_error)) / 3 / len(branches)
        return totals.tolist()

    curve = [("", judge([[]])[0])]
    chosen: list[int] = []
    while len(chosen) < min(most, len(names)):
        rest = [number for number in range(len(names)) if number not in chosen]
        scores = judge([[*chosen, number] for number in rest])
        best = int(np.argmin(scores))
        chosen.append(rest[best])
        curve.append((names[rest[best]], scores[best]))
        on_signal(len(chosen))
    return curve


def margins(system: ValueSystem, worlds: Sequence[World], fold: Ints) -> Floats:
    """float [worlds, N, 2^D - 1]: the best surplus (tokens) if called, less that if skipped; out of fold, clipped."""
    found = []
    for place in worlds:
        quality = system.quality(state_inputs(place, system.names), place.rate, fold)
        found.append(np.clip(quality[..., 1] - quality[..., 0], -MAX_MARGIN, MAX_MARGIN))
    return np.stack(found)


@attrs.frozen(eq=False)
class Predictor:
    """What decides online: state -> margin; call the middle where it is above zero.

    Attributes:
        names: the tree signals it reads.
        steps: D.
        normaliser: of the state [4 + 2 + D + S].
        weights: `w1` [I, H], `b1` [H], `w2` [H, H], `b2` [H], `w3` [H], `b3` [1].
    """

    names: tuple[str, ...]
    steps: int
    normaliser: Normaliser
    weights: Mapping[str, NDArray[np.float32]]

    def __call__(self, state: Floats) -> Floats:
        """Margins [...] of states [..., I]."""
        weights = self.weights
        hidden = np.maximum(self.normaliser(state) @ weights["w1"] + weights["b1"], 0.0)
        hidden = np.maximum(hidden @ weights["w2"] + weights["b2"], 0.0)
        return hidden @ weights["w3"] + weights["b3"][0]


def fit_predictors(
    worlds: Sequence[World],
    names: Sequence[str],
    wanted: Floats,
    fold: Ints,
    *,
    num_steps: int = 2500,
    seed: int = 0,
    on_step: Done = lambda done: None,
) -> list[Predictor]:
    """Predictors of the margins [worlds, N, 2^D - 1]: one without each fold, and at the end one of all rounds."""
    steps, num_folds = worlds[0].rounds.steps, int(fold.max()) + 1
    x = np.concatenate([state_inputs(place, names) for place in worlds])
    normaliser = Normaliser.of(x.reshape(-1, x.shape[-1]))
    rows, y = normaliser(x).reshape(-1, x.shape[-1]), wanted.reshape(1, -1).repeat(num_folds + 1, 0).astype(np.float32)
    kept = np.tile(fold, len(worlds))[None] != np.arange(num_folds + 1)[:, None]
    weight = kept.repeat(x.shape[1], 1).astype(np.float32)
    networks = train(rows, y, weight, num_steps=num_steps, seed=seed, on_step=on_step)
    layers = {name: layer.numpy() for name, layer in networks.layers.items()}
    return [
        Predictor(
            tuple(names), steps, normaliser,
            {
                "w1": layers["w1"][k], "b1": layers["b1"][k, 0], "w2": layers["w2"][k], "b2": layers["b2"][k, 0],
                "w3": layers["w3"][k, :, 0], "b3": layers["b3"][k, 0],
            },
        )
        for k in range(num_folds + 1)
    ]  # fmt: skip


def follow(place: World, margin: Floats) -> Ints:
    """int [N]: the schedule that a scheduler with these margins [N, 2^D - 1] follows in every round."""
    rows = np.arange(len(place.rounds))
    return trajectories.walk(place.rounds, lambda step, state: margin[rows, state] > 0)


def out_of_fold(predictors: Sequence[Predictor], place: World, fold: Ints) -> Floats:
    """float [N, 2^D - 1]: margins by the predictor that has not seen the round's fold."""
    state = state_inputs(place, predictors[0].names)
    margin = np.zeros(state.shape[:2])
    for k, predictor in enumerate(predictors[:-1]):
        margin[fold == k] = predictor(state[fold == k])
    return margin
