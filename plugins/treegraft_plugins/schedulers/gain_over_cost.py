"""Calls whichever source is expected to earn more tokens than its time is worth, from this request's own statistics."""

import attrs
import numpy as np

from treegraft.interfaces import RoundState, Scheduler, Source
from treegraft_plugins.options import number, whole

HALF = 0.5  # of an estimated gain, for each step between an option never tried and the one it is estimated from


@attrs.frozen
class GainOverCostScheduler(Scheduler):
    """Call source s at step t when its average gain there exceeds what its time could earn otherwise. No fitting.

    The gain is the growth of the tree's worth (`treegraft.statistics.best_budget`: expected accepted tokens of the
    best nodes, their verification paid for). The time's worth is the request's own rate of emitted tokens per ms.
    Among several sources the one with the greatest surplus is called; where none has any, growth stops, before the
    first step for the whole round.

    The first rounds try, in turn, the strongest source at step 1 with the cheapest after it, and the cheapest alone.
    Later an option not taken is probed now and then, so that no choice is absorbing.

    Args:
        first_rounds: rounds of trying.
        probe_every: rounds after which an option not taken is probed, at the earliest.
        probe_share: most of the time that all probes together may take.

    Source: TreeGraft asks when to call; this rule is treegraft's own.
    """

    first_rounds: int = attrs.field(default=4, validator=whole(0))
    probe_every: int = attrs.field(default=32, validator=whole(1))
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
        options, costs = state.statistics.acceptance.options, state.statistics.costs
        tried = [at for at in range(state.limits.steps) if (source.name, at) in options]
        if not tried:
            return 0.0, float(costs.source_ms(source.name, source.width))
        nearest = min(tried, key=lambda at: (abs(at - step), at))
        option = options[source.name, nearest]
        scale = HALF ** max(step - nearest, 0)
        return option.gain * scale, float(costs.source_ms(source.name, np.rint(option.num_rows)))

    def _due(self, state: RoundState, source: Source, step: int) -> bool:
        """Whether this option was left out for so long that a probe is within the share of time for probes."""
        acceptance = state.statistics.acceptance
        option = acceptance.options.get((source.name, step))
        last_round = option.last_round if option is not None else self.first_rounds
        _, cost_ms = self._expected(state, source, step)
        num_options = len(state.sources) * state.limits.steps
        affordable = cost_ms * num_options / max(self.probe_share * acceptance.round_ms, 1e-9)
        return acceptance.num_rounds - last_round >= max(self.probe_every, affordable)
