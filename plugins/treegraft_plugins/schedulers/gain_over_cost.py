"""Calls whichever source is expected to earn more tokens than its time is worth, from this request's own statistics."""

import attrs
import numpy as np

from treegraft.interfaces import RoundState, Scheduler, Source
from treegraft.statistics import OptionStats
from treegraft_plugins.options import number, whole


@attrs.frozen
class GainOverCostScheduler(Scheduler):
    """Call source s at step t when its average gain there exceeds what its time could earn otherwise. No fitting.

    The gain is the growth of the tree's worth (`treegraft.statistics.best_budget`: expected accepted tokens of the
    best nodes, their verification paid for): its average for each unit of probability mass drafted below, times the
    mass that the source finds in this tree. Rounds after an acceptance are averaged apart from the others: what can
    be guessed comes in runs. The time's worth is the request's own rate of emitted tokens per ms.
    Among several sources the one with the greatest surplus is called; where none has any, growth stops, before the
    first step for the whole round.

    The first rounds try, in turn, the strongest source at step 1 with the cheapest after it, and the cheapest alone.
    Later an option not taken is probed now and then, so that no choice is absorbing.

    Args:
        first_rounds: rounds of trying.
        probe_share: most of the time that all probes together may take.

    Source: TreeGraft asks when to call; this rule is treegraft's own.
    """

    first_rounds: int = attrs.field(default=2, validator=whole(0))
    probe_share: float = attrs.field(default=0.03, validator=number(0.0))

    def decide(self, state: RoundState) -> str | None:
        step, acceptance = len(state.steps), state.statistics.acceptance
        sources = list(state.sources.values())
        strongest = max(sources, key=lambda source: source.rank)
        cheapest = min(sources, key=lambda source: source.rank)
        if acceptance.num_rounds < self.first_rounds:
            strong_first = step == 0 and acceptance.num_rounds % 2 == 0
            return strongest.name if strong_first else cheapest.name
        surplus = {source.name: self._surplus(state, source, step) for source in sources}
        best = max(surplus, key=lambda name: surplus[name])
        for source in sources:
            if source.name != best or surplus[best] <= 0:
                if self._due(state, source, step):
                    return source.name
        return best if surplus[best] > 0 else None

    def _surplus(self, state: RoundState, source: Source, step: int) -> float:
        """Expected gain less the worth of the time (tokens)."""
        gain, cost_ms = self._expected(state, source, step)
        return gain - state.statistics.rate(state.position) * cost_ms

    def _expected(self, state: RoundState, source: Source, step: int) -> tuple[float, float]:
        """Expected gain (tokens) and latency (ms) of calling `source` at `step`."""
        costs, hot = state.statistics.costs, state.statistics.acceptance.is_hot
        tried = [
            (other_hot != hot, abs(other_step - step), other_step, option)
            for (name, other_step, other_hot), option in state.statistics.acceptance.options.items()
            if name == source.name
        ]
        option = min(tried, key=lambda row: row[:3])[-1] if tried else OptionStats(num_rows=source.width)
        cost_ms = float(costs.source_ms(source.name, np.rint(option.num_rows)))
        return (option.gain * _mass(state, source) if option.gain > 0 else 0.0), cost_ms

    def _due(self, state: RoundState, source: Source, step: int) -> bool:
        """Whether this option was left out for so long that a probe is within its share of the time."""
        acceptance = state.statistics.acceptance
        option = acceptance.options.get((source.name, step, acceptance.is_hot))
        waited = acceptance.num_rounds - (option.last_round if option is not None else 0)
        _, cost_ms = self._expected(state, source, step)
        # Halved from step to step, so that the shares of all steps add up to no more than the whole.
        share = self.probe_share / (len(state.sources) * 2.0 ** (step + 1))
        return waited * share * acceptance.round_ms >= cost_ms


def _mass(state: RoundState, source: Source) -> float:
    """Probability mass of the nodes that `source` would draft below in the tree so far."""
    scores = state.tree.path_score[source.selector.candidates(state.tree, source)]
    return float(np.exp(np.sort(scores)[-source.width :]).sum())
