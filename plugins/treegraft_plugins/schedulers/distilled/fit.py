"""The offline path: replayed rounds -> value system -> margins -> predictor.

Four heads, {skip, call} x {accepted tokens, latency}, are fitted to the state, the action's branch and the rest of the
schedule. Out of fold, so that a maximum over noisy predictions is not biased upwards, they give for every state the
best surplus that either action can still come to: tokens, less what the time could have brought otherwise. The
difference is the margin, which a predictor learns from the state alone.

Source: TreeGraft, section 4 and appendix B; there the margin is the ratio of each round's own throughputs, by which a
round that can bring little is worth any time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from treegraft.statistics import CostModel
from treegraft.tree import Bools, Floats, Ints
from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.schedulers.distilled import trajectories
from treegraft_plugins.schedulers.distilled.networks import Networks, Normaliser, train
from treegraft_plugins.schedulers.distilled.signals import (
    CANDIDATES,
    NUM_RUNTIME,
    RATIO,
    SPEED,
    progress,
    runtime,
    suffix_flags,
)
from treegraft_plugins.schedulers.distilled.trajectories import Outcome, Rounds

RATIOS = (1.0, 40.0)
"""Smallest and largest t_target / t_middle that is fitted for."""
MAX_MARGIN = 1.0  # tokens
MAX_JITTER = 0.5  # of the logarithm of a rate
SETTLED = 3  # passes until a scheduler and the rate that it reaches agree
MAX_SELECTION_ROWS, MAX_JUDGED_ROWS = 150_000, 20_000
_ZERO = np.zeros((), np.float32)
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
        idle: bool [N], whether never calling the middle is the best fixed schedule there: then a call has to bring
            what the middle takes to catch up, which regular calls need for one another anyway.
    """

    rounds: Rounds
    result: Outcome
    rate: Floats
    idle: Bools


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
    """Replayed rounds and what their schedules come to under `costs`; time earns what the best fixed schedule does."""
    result = trajectories.outcome(
        rounds, costs, small=setup.small, middle=setup.middle, width=setup.width, max_nodes=setup.max_nodes,
        adaptive=adaptive,
    )  # fmt: skip
    idle = np.zeros(len(rounds), np.bool_)
    for own in _texts(rounds):
        idle[own] = result.take(own).best_fixed() == 0
    place = World(rounds, result, 1.0 / result.plain_ms, idle)
    return earning(place, lambda own: float(result.take(own).fixed_rates().max()))


def _texts(rounds: Rounds) -> Iterator[Bools]:
    """bool [N] for each kind of text: the rounds of a report at a temperature."""
    for report in np.unique(rounds.report):
        for temperature in np.unique(rounds.temperature[rounds.report == report]):
            yield (rounds.report == report) & (rounds.temperature == temperature)


def earning(place: World, rate: Callable[[Bools], float]) -> World:
    """The same rounds where time earns what `rate` says of a kind of text, and never less than plain decoding does.

    Args:
        place: N rounds.
        rate: of bool [N], the rounds of a report at a temperature -> emitted tokens per ms.
    """
    worth = 1.0 / place.result.plain_ms
    for own in _texts(place.rounds):
        worth[own] = np.maximum(worth[own], rate(own))
    return attrs.evolve(place, rate=worth)


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
    rate, idle = (np.concatenate([getattr(place, name) for place in places]) for name in ("rate", "idle"))
    return World(Rounds.joined([place.rounds for place in places]), Outcome(**columns), rate, idle)


def state_inputs(place: World, names: Sequence[str]) -> Floats:
    """float [N, 2^D - 1, 4 + 2 + D + S]: the state before every decision, with the signals of `names`."""
    rounds, result = place.rounds, place.result
    chosen = [list(CANDIDATES).index(name) for name in names]
    columns = [result.plain_ms, result.target_ms, result.middle_ms, result.missed_ms, place.rate]
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
    """The decisions of one action, a row each of a round.

    Attributes:
        state: int [R], where it is taken.
        rest: float [R, D + 2], how the schedule goes on: the suffix, and the number of calls from here on.
        schedule: int [R], the whole of it.
        base: int [R], the one that never calls from here on.
    """

    state: Ints
    rest: Floats
    schedule: Ints
    base: Ints

    @classmethod
    def of(cls, steps: int, called: bool) -> "_Branch":
        rows = [row for row in trajectories.decisions(steps) if row[1] == called]
        left = [steps - len(history) for history in trajectories.histories(steps)]
        return cls(
            np.array([state for state, *_ in rows]),
            np.array([_rest(called, flags, steps) for _, _, flags, _ in rows]),
            np.array([schedule for *_, schedule in rows]),
            np.array([schedule >> left[state] << left[state] for state, *_, schedule in rows]),
        )

    def targets(self, place: World) -> Floats:
        """float [2, N, R]: accepted tokens beyond those of the base, and latency beyond the base's and the calls'.

        What a round's text is like stands in a schedule and in its base, and so does not blur the difference. Latency
        is in forwards of B + 1 rows; a call's is taken to be that of a step of `width` rows, the rest is to be learnt.
        """
        result = place.result
        accepted, ms = (values[:, self.schedule] - values[:, self.base] for values in (result.emitted, result.ms))
        calls_ms = self.rest[:, -1] * result.middle_ms[:, None]
        return np.stack([accepted, (ms - calls_ms) / result.target_ms[:, None]])


def _rest(called: bool, suffix: Sequence[bool], steps: int) -> list[float]:
    return [*suffix_flags(suffix, steps), float(called + sum(suffix))]


@attrs.frozen(eq=False)
class ValueSystem:
    """The four heads: accepted tokens and latency, where the next decision is to skip and where it is to call.

    Both are counted beyond what never calling from there on brings and takes.

    Attributes:
        names: the tree signals it reads.
        normaliser: of its inputs.
        scale: float32 [2], root mean square of the two targets.
        skip, call: heads of an action; network k of each target was fitted without fold k (rows [2 * folds]).
    """

    names: tuple[str, ...]
    steps: int
    normaliser: Normaliser
    scale: NDArray[np.float32]
    skip: Networks
    call: Networks

    def quality(self, state: Floats, fold: Ints | None = None) -> Floats:
        """float [N, 2^D - 1, 2]: for every state the best surplus still in reach, by action (skip, call).

        A surplus (tokens) is what the round emits, less what its time could have brought otherwise: the throughput of
        the whole run is greatest where rounds maximise that, and not each its own throughput. Here it is counted from
        that of never calling again.

        Args:
            state: inputs [N, 2^D - 1, I].
            fold: int [N], the fold of each round, whose networks have not seen it; None takes the folds' average.
        """
        best = np.full((*state.shape[:2], 2), -np.inf)
        for action, heads in enumerate((self.skip, self.call)):
            branch = _Branch.of(self.steps, bool(action))
            surplus = self._surplus(heads, _with_rest(state[:, branch.state], branch.rest), fold)
            for row, at in enumerate(branch.state):
                best[:, at, action] = np.maximum(best[:, at, action], surplus[:, row])
        return best

    def margin(self, state: Floats, history: Sequence[bool]) -> float:
        """The margin of one state [I], searched anew: the failed ablation of using the value system online."""
        best = []
        for heads in (self.skip, self.call):
            suffixes = trajectories.schedules(self.steps - len(history) - 1).tolist()
            rest = np.array([_rest(heads is self.call, suffix, self.steps) for suffix in suffixes])
            inputs = _with_rest(np.broadcast_to(state, (1, len(rest), len(state))), rest)
            best.append(float(self._surplus(heads, inputs, None).max()))
        return best[1] - best[0]

    def _surplus(self, heads: Networks, inputs: Floats, fold: Ints | None) -> Floats:
        """float [N, R], of inputs [N, R, I]."""
        x = self.normaliser(inputs)
        out = heads.predict(x.reshape(-1, x.shape[-1])).reshape(2, -1, *x.shape[:2])  # target, fold, round, decision
        out = out.mean(1) if fold is None else out[:, fold, np.arange(len(x))]
        return _surplus(out * self.scale[:, None, None], inputs)


def _with_rest(state: Floats, rest: Floats) -> Floats:
    """Inputs of the heads [N, R, I + D + 3]: states [N, R, I], how their schedules go on, and what those calls take."""
    rest = np.broadcast_to(rest, (*state.shape[:2], rest.shape[1]))
    return np.concatenate([state, rest, rest[..., -1:] * np.exp(-state[..., RATIO, None])], -1)


def _surplus(values: Floats, inputs: Floats) -> Floats:
    """Tokens beyond what the time could bring [...], of targets [2, ...] and the heads' inputs [..., I]."""
    speed, num_calls, calls_take = np.exp(inputs[..., SPEED]), inputs[..., -2], inputs[..., -1]
    return np.where(num_calls > 0, values[0] - speed * (calls_take + values[1]), 0.0)  # of the base nothing is guessed


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
    branches = [_Branch.of(steps, called) for called in (False, True)]
    wanted = [np.concatenate([branch.targets(place) for place in worlds], axis=1) for branch in branches]
    squares = [np.mean([(target[head] ** 2).mean() for target in wanted]) for head in range(2)]
    scale = np.maximum(np.sqrt(squares), 1e-3).astype(np.float32)
    folds, shares = np.tile(fold, len(worlds)), np.tile(_shares(worlds[0].rounds), len(worlds))
    heads, normaliser = [], None
    for branch, target in zip(branches, wanted, strict=True):
        x = _with_rest(state[:, branch.state], branch.rest)
        normaliser = normaliser or Normaliser.of(x.reshape(-1, x.shape[-1]))
        rows = normaliser(x).reshape(-1, x.shape[-1])
        y = (target / scale[:, None, None]).reshape(2, -1).repeat(num_folds, 0).astype(np.float32)
        kept = (folds[None] != np.arange(num_folds)[:, None]) * shares
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
        "accepted", "latency", "surplus" and their mean, "error".
    """
    state = np.concatenate([state_inputs(place, system.names) for place in worlds])
    folds = np.tile(fold, len(worlds))
    squared: dict[str, list[Floats]] = {"accepted": [], "latency": [], "surplus": []}
    spread: dict[str, list[Floats]] = {name: [] for name in squared}
    for called, heads in ((False, system.skip), (True, system.call)):
        branch = _Branch.of(system.steps, called)
        inputs = _with_rest(state[:, branch.state], branch.rest)
        x = system.normaliser(inputs)
        out = heads.predict(x.reshape(-1, x.shape[-1])).reshape(2, -1, *x.shape[:2])
        out = out[:, folds, np.arange(len(state))] * system.scale[:, None, None]
        truth = np.concatenate([branch.targets(place) for place in worlds], axis=1)
        surpluses = _surplus(out, inputs), _surplus(truth, inputs)
        values = zip(squared, ((out[0], truth[0]), (out[1], truth[1]), surpluses), strict=True)
        for name, (guess, true) in values:
            squared[name].append(((guess - true) ** 2).ravel())
            spread[name].append(((true - true.mean()) ** 2).ravel())
    share = {
        name: float(np.sqrt(np.concatenate(squared[name]).mean() / max(np.concatenate(spread[name]).mean(), 1e-12)))
        for name in squared
    }
    return {**share, "error": sum(share.values()) / len(share)}


def _shares(rounds: Rounds) -> Floats:
    """float [N], 1 on average: weights under which every report counts alike, however many rounds it has."""
    _, report, counts = np.unique(rounds.report, return_inverse=True, return_counts=True)
    shares: Floats = len(rounds) / len(counts) / counts[report]
    return shares


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
    folds = np.tile(fold, len(worlds))
    first = NUM_RUNTIME + 2 + steps
    rng = np.random.default_rng(0)
    branches = []
    for called in (False, True):
        branch = _Branch.of(steps, called)
        inputs = _with_rest(state[:, branch.state], branch.rest)
        inputs = inputs.reshape(-1, inputs.shape[-1])
        rows, fold_of = Normaliser.of(inputs)(inputs), folds.repeat(len(branch.state))
        y = np.concatenate([branch.targets(place) for place in worlds], axis=1).reshape(2, -1)
        scale = np.maximum(np.sqrt((y**2).mean(1)), 1e-3)
        sample = rng.permutation(len(rows))[:MAX_SELECTION_ROWS]
        y = (y[:, sample] / scale[:, None]).astype(np.float32)
        branches.append((rows[sample], y, scale, fold_of[sample], inputs[sample[:MAX_JUDGED_ROWS]]))

    def judge(candidates: Sequence[Sequence[int]]) -> list[float]:
        """The error of each set of signals."""
        totals = np.zeros(len(candidates))
        for rows, y, scale, fold_of, inputs in branches:
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
            guessed = _surplus(np.moveaxis(own * scale, -1, 0), inputs[:, None])
            surplus = _surplus(np.moveaxis(true * scale, -1, 0), inputs)
            surplus_error = ((guessed - surplus[:, None]) ** 2).mean(0) / max(float(surplus.var()), 1e-12)
            totals += (np.sqrt(error).sum(1) + np.sqrt(surplus_error)) / 3 / len(branches)
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
    """float [worlds, N, 2^D - 1]: the best surplus (tokens) if called, less that if skipped; out of fold, clipped.

    In an idle text a round's first call must also bring what waking the middle up takes.
    """
    is_first = np.array([not any(history) for history in trajectories.histories(system.steps)])
    found = []
    for place in worlds:
        skip, call = np.moveaxis(system.quality(state_inputs(place, system.names), fold), -1, 0)
        owed = np.where(place.idle, place.rate * place.result.wake_ms, 0.0)[:, None] * is_first
        margin = call - owed - np.maximum(skip - owed, 0.0)  # never calling again, whose surplus is 0, owes nothing
        found.append(np.clip(margin, -MAX_MARGIN, MAX_MARGIN))
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
        hidden = np.maximum(self.normaliser(state) @ weights["w1"] + weights["b1"], _ZERO)
        hidden = np.maximum(hidden @ weights["w2"] + weights["b2"], _ZERO)
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
    weight = (kept * np.tile(_shares(worlds[0].rounds), len(worlds))).repeat(x.shape[1], 1).astype(np.float32)
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


def follow(place: World, margins: Callable[[World], Floats]) -> Ints:
    """int [N]: the schedules that a scheduler takes, where time earns what it does itself, as it finds out online.

    Args:
        place: N rounds.
        margins: of them, where time earns `rate`, the margins [N, 2^D - 1].
    """
    rows, result = np.arange(len(place.rounds)), place.result
    taken = np.zeros(len(rows), np.int64)
    for _ in range(SETTLED):
        margin = margins(place)
        taken = trajectories.walk(place.rounds, lambda step, state, margin=margin: margin[rows, state] > 0)
        place = earning(place, lambda own, taken=taken: result.take(own).rate(taken[own]))
    return taken


def out_of_fold(predictors: Sequence[Predictor], place: World, fold: Ints) -> Floats:
    """float [N, 2^D - 1]: margins by the predictor that has not seen the round's fold."""
    state = state_inputs(place, predictors[0].names)
    margin = np.zeros(state.shape[:2])
    for k, predictor in enumerate(predictors[:-1]):
        margin[fold == k] = predictor(state[fold == k])
    return margin
