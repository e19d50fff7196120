"""Replayed rounds: all 2^D schedules from one committed prefix, as labels that no clock has touched.

A schedule is D decisions, one a step: call the middle, or let the small source draft. As a number it has the first
decision in its highest bit. The state before step t depends on the first t decisions alone, so that a round has
2^D - 1 states: state 2^t - 1 + h, where h is the number that those t decisions make.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from treegraft.statistics import CostModel
from treegraft.tree import Bools, Floats, Ints

BUDGETS = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 63, 96, 128)
"""The budgets (non-root nodes) whose expected accepted tokens are recorded, as far as a pipeline's own B goes."""
MAX_RANKS = 24
"""Accepted nodes of one tree that are recorded; longer paths are cut."""
IDLE_ROUNDS = 100
"""Rounds without a call that a middle is taken to have to catch up with where never calling it is best."""


def num_states(steps: int) -> int:
    """Decision states of a round."""
    return 2**steps - 1


def schedules(steps: int) -> Bools:
    """bool [2^D, D]: all schedules, in the order of their numbers."""
    numbers = np.arange(2**steps)
    return (numbers[:, None] >> np.arange(steps - 1, -1, -1)) & 1 == 1


def states_of(steps: int) -> Ints:
    """int [2^D, D]: the state before each decision of each schedule."""
    numbers, step = np.arange(2**steps)[:, None], np.arange(steps)
    return 2**step - 1 + (numbers >> (steps - step))


def histories(steps: int) -> list[tuple[bool, ...]]:
    """By state, the decisions that lead to it."""
    return [
        tuple(bool(number >> (step - 1 - i) & 1) for i in range(step))
        for step in range(steps)
        for number in range(2**step)
    ]


@attrs.frozen(eq=False)
class Rounds:
    """N replayed rounds of one model pair.

    Attributes:
        steps: D.
        report: str [N], what a round is grouped by: pair x dataset. Folds never split one.
        category: str [N], for results by kind of text.
        temperature: float32 [N], of the continuation.
        num_prompt_tokens: int [N].
        context: int [N], committed tokens.
        signals: float32 [N, 2^D - 1, 15], the candidates before each decision, in the order of `CANDIDATES`.
        rows: int32 [N, 2^D, D], rows forwarded by each step of each schedule.
        missed: int32 [N, 2^D], emitted tokens that the middle has not processed after the round (verifying all of B):
            its next call takes them along.
        drafted: bool [N, 2^D, D], whether the step drafted below anything.
        num_nodes: int32 [N, 2^D], non-root nodes of the finished tree.
        ranks: int32 [N, 2^D, MAX_RANKS], the ranks by path score (1 is the best node below the root) of the nodes
            that the reference continuation follows, from the top; 0 beyond the last.
        expected: float32 [N, 2^D, len(BUDGETS)], expected accepted tokens of the best nodes, by budget.
    """

    steps: int
    report: NDArray[np.str_]
    category: NDArray[np.str_]
    temperature: NDArray[np.float32]
    num_prompt_tokens: Ints
    context: Ints
    signals: NDArray[np.float32]
    rows: Ints
    missed: Ints
    drafted: Bools
    num_nodes: Ints
    ranks: Ints
    expected: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.report)

    def take(self, index: Ints | Bools) -> "Rounds":
        """The rounds of `index`."""
        return attrs.evolve(self, **{name: getattr(self, name)[index] for name in COLUMNS})

    @classmethod
    def joined(cls, parts: Iterable["Rounds"]) -> "Rounds":
        """Several sets as one; all of them have the same D."""
        parts = list(parts)
        return cls(
            parts[0].steps, **{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
        )

    def accepted(self, budget: Ints) -> Ints:
        """int [N, 2^D]: accepted tokens (without the bonus) where the best `budget` [N, 2^D] nodes are verified."""
        return ((self.ranks > 0) & (self.ranks <= np.asarray(budget)[..., None])).sum(-1)

    def source_ms(self, costs: CostModel, small: str, middle: str) -> Floats:
        """Drafting latency (ms) [N, 2^D] under a cost table."""
        calls = schedules(self.steps)
        called, skipped = costs.source_ms(middle, self.rows), costs.source_ms(small, self.rows)
        return np.where(self.drafted, np.where(calls, called, skipped), 0.0).sum(-1)


COLUMNS = tuple(field.name for field in attrs.fields(Rounds) if field.name != "steps")


@attrs.frozen(eq=False)
class Outcome:
    """What every schedule of every round comes to under one cost table.

    Attributes:
        emitted: float [N, 2^D], tokens with the bonus.
        ms: float [N, 2^D], modelled latency of the whole round, and of what the middle will have to catch up with.
        never_ms: float [N], latency of never calling the middle if no other round calls it either: then it never
            catches up.
        wake_ms: float [N], what a call takes longer that is the first in `IDLE_ROUNDS`.
        plain_ms, target_ms, middle_ms, missed_ms: float [N], the runtime context: forwards of one row and of B + 1
            rows, a middle step of `width` rows, and one more row of it, which every token is that it missed.
    """

    emitted: Floats
    ms: Floats
    never_ms: Floats
    wake_ms: Floats
    plain_ms: Floats
    target_ms: Floats
    middle_ms: Floats
    missed_ms: Floats

    def take(self, index: Ints | Bools) -> "Outcome":
        """The rounds of `index`."""
        return Outcome(**{field.name: getattr(self, field.name)[index] for field in attrs.fields(Outcome)})

    def along(self, schedule: Ints) -> tuple[Floats, Floats]:
        """Emitted tokens and latencies (ms), each [N], where round n follows `schedule[n]`."""
        rows = np.arange(len(self.emitted))
        return self.emitted[rows, schedule], self.ms[rows, schedule] if schedule.any() else self.never_ms

    def rate(self, schedule: Ints) -> float:
        """Emitted tokens per ms where round n follows `schedule[n]`."""
        emitted, ms = self.along(schedule)
        return float(emitted.sum() / ms.sum())

    def fixed_rates(self) -> Floats:
        """float [2^D]: emitted tokens per ms of every fixed schedule."""
        ms = self.ms.sum(0)
        ms[0] = self.never_ms.sum()
        rates: Floats = self.emitted.sum(0) / ms
        return rates

    def best_fixed(self) -> int:
        """The number of the best fixed schedule."""
        return int(self.fixed_rates().argmax())

    def oracle(self) -> Ints:
        """int [N]: in hindsight, the schedules that together make the most tokens per ms.

        Dinkelbach: a round's best schedule at rate r maximises emitted - r * ms; r is raised until it stands.
        """
        rate = float(self.fixed_rates().max())
        chosen = np.full(len(self.emitted), self.best_fixed())
        while True:
            best = (self.emitted - rate * self.ms).argmax(1)
            raised = self.rate(best)
            if raised <= rate * (1 + 1e-12):
                return chosen
            chosen, rate = best, raised


def outcome(
    rounds: Rounds, costs: CostModel, *, small: str, middle: str, width: int, max_nodes: int, adaptive: bool
) -> Outcome:
    """Label replayed rounds under a cost table.

    Args:
        rounds: N of them.
        costs: latencies (ms).
        small, middle: names of the sources.
        width: W of the middle.
        max_nodes: B.
        adaptive: the budget is the `gain_over_cost` rule at the better endpoint's rate, instead of all of B.
    """
    context = rounds.context
    plain_ms, target_ms = np.array([costs.target_ms([1, max_nodes + 1], int(tokens)) for tokens in context]).T
    step_ms, wider_ms = costs.source_ms(middle, [width, 2 * width]).tolist()
    middle_ms, missed_ms = (np.full(len(rounds), ms) for ms in (step_ms, (wider_ms - step_ms) / width))
    drafting = rounds.source_ms(costs, small, middle)
    # Every token that the middle has not processed is a row of a later call: charged to the round that left it.
    catching_up = costs.source_ms(middle, width + rounds.missed) - step_ms
    wake_ms = costs.source_ms(middle, width + IDLE_ROUNDS * rounds.missed[:, 0]) - step_ms
    full = np.minimum(rounds.num_nodes, max_nodes)

    def under(budget: Ints) -> Outcome:
        forward = np.stack(
            [costs.target_ms(nodes + 1, int(tokens)) for nodes, tokens in zip(budget, context, strict=True)]
        )
        ms = drafting + forward
        return Outcome(
            rounds.accepted(budget) + 1.0, ms + catching_up, ms[:, 0], wake_ms, plain_ms, target_ms, middle_ms,
            missed_ms,
        )  # fmt: skip

    if not adaptive:
        return under(full)
    # The rule compares with what the time could earn otherwise: settled by a few passes from plain decoding's rate.
    grid = np.array([nodes for nodes in BUDGETS if nodes <= max_nodes])
    forward = np.stack([costs.target_ms(grid + 1, int(tokens)) for tokens in context])
    rate = plain_rate = 1.0 / float(forward[:, 0].mean())
    for _ in range(3):
        worth = rounds.expected[..., : len(grid)] - rate * forward[:, None, :]
        found = under(np.minimum(grid[worth.argmax(-1)], full))
        rate = max(float(found.fixed_rates()[[0, -1]].max()), plain_rate)
    return found


def walk(rounds: Rounds, decide: Any) -> Ints:
    """int [N]: the schedules that decisions make, round by round and step by step.

    Args:
        rounds: N of them.
        decide: of (step t, states [N]) -> bool [N], whether to call the middle.
    """
    number = np.zeros(len(rounds), dtype=np.int64)
    for step in range(rounds.steps):
        called = decide(step, 2**step - 1 + number)
        number = 2 * number + np.asarray(called, dtype=np.int64)
    return number


def folds(reports: Sequence[str] | NDArray[np.str_], num_folds: int) -> Ints:
    """int [N]: a fold for each round; a report is never split, and folds are filled evenly, largest reports first.

    Raises:
        ValueError: fewer reports than folds.
    """
    names, inverse, counts = np.unique(np.asarray(reports), return_inverse=True, return_counts=True)
    if len(names) < num_folds:
        raise ValueError(
            f"{len(names)} reports ({', '.join(names)}) cannot fill {num_folds} folds without splitting one"
        )
    fold_of, sizes = np.zeros(len(names), dtype=np.int64), np.zeros(num_folds, dtype=np.int64)
    for report in np.argsort(-counts, kind="stable"):
        fold_of[report] = sizes.argmin()
        sizes[fold_of[report]] += counts[report]
    return fold_of[inverse]


def decisions(steps: int) -> Iterator[tuple[int, bool, tuple[bool, ...], int]]:
    """Every (state, action, suffix) of a round with the number of the schedule it makes: D * 2^D of them."""
    for state, history in enumerate(histories(steps)):
        rest = steps - len(history) - 1
        for called in (False, True):
            for suffix in range(2**rest):
                flags = tuple(bool(suffix >> (rest - 1 - i) & 1) for i in range(rest))
                bits = (*history, called, *flags)
                yield state, called, flags, sum(int(bit) << (steps - 1 - i) for i, bit in enumerate(bits))
