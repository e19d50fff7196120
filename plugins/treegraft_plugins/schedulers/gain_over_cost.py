"""Calls whichever source is expected to earn more tokens than its time is worth, from this request's own statistics."""

import attrs
import numpy as np

from treegraft.interfaces import RoundState, Scheduler, Source
from treegraft.statistics import OptionStats
from treegraft_plugins.options import number


@attrs.frozen
class GainOverCostScheduler(Scheduler):
    """Call source s at step t when its average gain there exceeds what its time could earn otherwise. No fitting.

    The gain is the growth of the tree's worth (`treegraft.statistics.best_budget`: expected accepted tokens of the
    best nodes, their verification paid for): its average for each unit of probability mass drafted below, times the
    mass that the source finds in this tree. Rounds after an acceptance are averaged apart from the others: what can
    be guessed comes in runs. The time's worth is the request's own rate of emitted tokens per ms.
    Among several sources the one with the greatest surplus is called; where none has any, growth stops, before the
    first step for the whole round.

    An option never tried is expected to bring a token a unit of mass (optimism in the face of uncertainty); one given
    up is probed now and then, so that no choice is absorbing.

    Args:
        probe_share: most of the throughput that all probes together may cost.

    Source: TreeGraft asks when to call; this rule is treegraft's own.
    """

    probe_share: float = attrs.field(default=0.03, validator=number(0.0))

    def decide(self, state: RoundState) -> str | None:
        step = len(state.steps)
        sources = list(state.sources.values())
        surplus = {source.name: self._surplus(state, source, step) for source in sources}
        best = max(surplus, key=lambda name: surplus[name])
        most = max(surplus[best], 0.0)
        for name in surplus:
            if (name != best or not most) and self._due(state, name, step, lost=most - surplus[name]):
                return name
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

    def _due(self, state: RoundState, name: str, step: int, lost: float) -> bool:
        """Whether this option was left out for so long that a probe, which loses so many tokens, is affordable."""
        acceptance = state.statistics.acceptance
        option = acceptance.options.get((name, step, acceptance.is_hot))
        waited = acceptance.num_rounds - (option.last_round if option is not None else 0)
        # Halved from step to step, so that the shares of all steps add up to no more than the whole.
        share = self.probe_share / (len(state.sources) * 2.0 ** (step + 1))
        return lost <= waited * share * acceptance.round_ms * state.statistics.rate(state.position)


def _mass(state: RoundState, source: Source) -> float:
    """Probability mass of the nodes that `source` would draft below in the tree so far."""
    scores = state.tree.path_score[source.selector.candidates(state.tree, source)]
    return float(np.exp(np.sort(scores)[-source.width :]).sum())
