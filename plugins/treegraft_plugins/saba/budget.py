"""The state-aware budget: the best of a grid by fitted gains and the pipeline's own costs."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs.validators import instance_of

from treegraft.interfaces import BudgetChoice, BudgetPolicy, RoundState, Setting
from treegraft.tree import DraftTree, Ints
from treegraft_plugins.budgets import ExpectedGainBudget, expected_accepted, round_ms
from treegraft_plugins.fitted import AUTO, Header, Shelf, read_arrays, read_header
from treegraft_plugins.options import whole
from treegraft_plugins.saba.model import GainModel
from treegraft_plugins.saba.signals import state_signals

FORMAT = 3
SHELF = Shelf("weights", Path(__file__).parent / "weights", "treegraft fit budget")
GRID = (*range(65), *range(80, 513, 16))
"""Budgets to choose from: all where a tree begins, so that none misses a kink of the costs, then the paper's own."""

COARSE = (0, 1, 2, 4, 6, 8, 12, 16, 24, *range(32, 513, 16))
"""Budgets that rounds are labelled and fitted at."""


def below(budgets: Sequence[int], verify_nodes: int) -> tuple[int, ...]:
    """Those of `budgets` below `verify_nodes`, and that itself."""
    return (*(nodes for nodes in budgets if nodes < verify_nodes), verify_nodes)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _ascending(policy: "SABABudget", _: Any, value: Any) -> None:
    if value is None:
        return
    allowed = f"allowed: a list of ascending ints in [0, verify_nodes], which is {policy.max_verify_nodes}."
    if not isinstance(value, tuple) or not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
        raise TypeError(f"grid: got {value!r}; {allowed}")
    inside = bool(value) and value[0] >= 0 and value[-1] <= policy.max_verify_nodes
    if not inside or any(first >= second for first, second in pairwise(value)):
        raise ValueError(f"grid: got {list(value)}; {allowed}")


@attrs.define(eq=False)
class SABABudget(BudgetPolicy):
    """Of a grid, the budget with the greatest surplus: gains by a fitted model of the round's state, costs by the
    pipeline's own cost model, less what that time could have brought otherwise, by the request's own rate.

    `treegraft fit budget` makes the weights. They serve pipelines of the same target and the same sources. A round in
    which a signal is missing, because a drafter failed or was not called, is left to the rule of `expected_gain`.

    Args:
        verify_nodes: B, most non-root nodes ever verified.
        grid: the budgets to choose from, ascending, at most B; None takes all up to 64, every 16th below B, and B.
        weights: "auto" takes shipped weights that fit the pipeline, else the rule of `expected_gain`, and says why; a
            name of shipped weights, or a file made by `treegraft fit budget`, is refused where it does not fit.

    Source: GRAFT, State-Aware Budget Allocation. There it is the round's own tokens per ms that is greatest; over many
    rounds the surplus brings more, which gives nodes to the rounds that make something of them.
    """

    max_verify_nodes: int = attrs.field(default=63, alias="verify_nodes", validator=whole(0))
    grid: tuple[int, ...] | None = attrs.field(default=None, converter=_tuple, validator=_ascending)
    weights: str = attrs.field(default=AUTO, validator=instance_of(str))
    _budgets: Ints = attrs.field(init=False)
    _rule: ExpectedGainBudget = attrs.field(init=False)
    _model: GainModel | None = attrs.field(init=False, default=None)
    _note: str = attrs.field(init=False, default="")

    def __attrs_post_init__(self) -> None:
        self._budgets = np.array(self.grid or below(GRID, self.max_verify_nodes), np.int64)
        self._rule = ExpectedGainBudget(self.max_verify_nodes)

    # -- before the first request -------------------------------------------------------------------------------------

    def bind(self, setting: Setting) -> None:
        path, why_not = SHELF.choose(self.weights, lambda header: unfit(header, setting))
        if path is None:
            self._note = f"expected_gain, because {why_not}"
            return
        arrays = {name: array.astype(np.float64) for name, array in read_arrays(path).items()}
        self._model = GainModel(tuple(read_header(path)["signals"]), arrays)
        self._note = f"weights {path.stem}; expected_gain in rounds without {', '.join(self._model.names)}"

    def note(self) -> str:
        return self._note

    # -- online -------------------------------------------------------------------------------------------------------

    def max_nodes(self, state: RoundState) -> int:
        return int(self._budgets[-1])

    def verify_nodes(self, state: RoundState, tree: DraftTree) -> int:
        return self.choose(state, tree).nodes

    def choose(self, state: RoundState, tree: DraftTree) -> BudgetChoice:
        if self._model is None:
            return self._rule.choose(state, tree)
        x = state_signals(state, tree, self._model.names)
        if np.isnan(x).any():
            return self._rule.choose(state, tree)
        # Of budgets that the tree cannot fill, the first is all of it.
        budgets = np.minimum(self._budgets, len(tree) - 1)
        gain = self._model(x, expected_accepted(tree, self.max_verify_nodes)[budgets])
        cost_ms = round_ms(state, budgets)
        best = int((gain - state.statistics.rate(state.position) * cost_ms).argmax())
        return BudgetChoice(int(budgets[best]), float(gain[best]), float(cost_ms[best]))


def described(setting: Setting) -> dict[str, Any]:
    """What of a pipeline its rounds' gains depend on, as a header says it."""
    return {
        "target": setting.target,
        "vocabulary": setting.vocab_size,
        "steps": setting.steps,
        "verify_nodes": setting.verify_nodes,
        "sources": {
            name: [source.model, source.width, source.branching, source.rank, source.edges]
            for name, source in setting.sources.items()
        },
    }


def unfit(header: Header, setting: Setting) -> str | None:
    """Why weights do not suit a pipeline, or None."""
    if (header.get("kind"), header.get("format")) != ("saba", FORMAT):
        return f"of {header.get('kind')} in format {header.get('format')}, not of saba in format {FORMAT}"
    for name, value in described(setting).items():
        if value is not None and value != header.get(name):
            return f"fitted for {name} {header.get(name)!r}, not {value!r}"
    return None
