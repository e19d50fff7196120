"""The scheduler that a value system was distilled into."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from treegraft.errors import ComposeError, SchedulerWarning
from treegraft.interfaces import RoundState, Scheduler, Setting
from treegraft_plugins.fitted import AUTO, Shelf
from treegraft_plugins.options import one_of, switch
from treegraft_plugins.schedulers.distilled.signals import progress, runtime, tree_signals
from treegraft_plugins.schedulers.distilled.weights import (
    ABLATIONS,
    VALUE_ONLINE,
    Header,
    Weights,
    read_weights,
)
from treegraft_plugins.schedulers.gain_over_cost import GainOverCostScheduler

SHELF = Shelf("scheduler.weights", Path(__file__).parent / "weights", "treegraft fit scheduler")


@attrs.define(eq=False)
class DistilledScheduler(Scheduler):
    """Calls the middle where a fitted predictor expects more tokens of that than its time would earn otherwise.

    The predictor reads the runtime (what the models cost, how fast the request has been), the round's progress and some
    signals of the tree; `treegraft fit scheduler` makes its weights. The source of the highest rank is the middle and
    the other one the small: it schedules pipelines of two sources.

    Args:
        weights: "auto" takes shipped weights that fit the pipeline's models, D, W, B and cost ratio, else the scheduler
            `gain_over_cost`, and says which and why; a name of shipped weights, or a file made by `fit scheduler`, is
            refused where it does not fit.
        ablation: one of `fit scheduler --ablations`: takes its weights, and is refused where there are none.
        mode: "predictor"; "value" searches the value system at every decision, which is slower and needs the weights
            of the ablation "value_online".
        max_calls: True caps the middle's calls of a round at t_target / t_middle, rounded down.

    Source: TreeGraft, section 4 and appendices B and C.2.
    """

    weights: str = attrs.field(default=AUTO, validator=attrs.validators.instance_of(str))
    ablation: str | None = attrs.field(default=None, validator=attrs.validators.optional(one_of(*ABLATIONS)))
    mode: str = attrs.field(default="predictor", validator=one_of("predictor", "value"))
    max_calls: bool = attrs.field(default=False, validator=switch)
    _fitted: Weights | None = attrs.field(init=False, default=None)
    _why_not: str | None = attrs.field(init=False, default=None)
    _fallback: GainOverCostScheduler = attrs.field(init=False, factory=GainOverCostScheduler)
    _name: str = attrs.field(init=False, default="")
    _small: str = attrs.field(init=False, default="")
    _middle: str = attrs.field(init=False, default="")
    _is_warned: bool = attrs.field(init=False, default=False)
    _opening: list[float] = attrs.field(init=False, factory=list)
    _priced: tuple[Any, ...] = attrs.field(init=False, default=())
    _prices: tuple[float, list[float]] = attrs.field(init=False, default=(0.0, []))

    # -- before the first request -------------------------------------------------------------------------------------

    def bind(self, setting: Setting) -> None:
        path, self._why_not = choose(self.weights, setting, self.ablation)
        if path is None:
            return
        self._small, self._middle = by_rank(setting)
        fitted = read_weights(path)
        if self.mode == "value" and fitted.value is None:
            raise ComposeError(
                "scheduler.mode", f"'value', but {path.name} holds no value system", "Allowed here: 'predictor'.",
                f"Take the weights of the ablation {VALUE_ONLINE!r}: treegraft fit scheduler --ablations.",
            )  # fmt: skip
        self._fitted, self._name, self._opening = fitted, path.stem, []

    def note(self) -> str:
        if self._fitted is None:
            return f"gain_over_cost, because {self._why_not}"
        low, high = self._fitted.header.ratios
        return f"weights {self._name}; gain_over_cost where t_target / t_middle is not within {low:g} to {high:g}"

    # -- online -------------------------------------------------------------------------------------------------------

    def decide(self, state: RoundState) -> str | None:
        if self._fitted is None or self._middle not in state.sources or self._small not in state.sources:
            return self._fallback.decide(state)
        header = self._fitted.header
        ratio, prices = self._runtime(state)
        if not prices:
            return self._fallback.decide(state)  # a table that knows of no costs is no machine's, and no news either
        if not header.ratios[0] <= ratio <= header.ratios[1]:
            self._warn(ratio, header)
            return self._fallback.decide(state)
        history = [step.source == self._middle for step in state.steps]
        if self.max_calls and sum(history) >= int(ratio):
            return self._small
        signals = self._signals(state, header.signals)
        if self._margin(prices, history, signals) > 0:
            return self._middle
        last = state.steps[-1] if state.steps else None
        if last is None or last.source != self._small or len(last.positions):
            return self._small
        # The small source has run out of nodes and will not find any: what remains to be decided is about this tree.
        later = (history + [False] * more for more in range(1, header.steps - len(history)))
        return self._small if any(self._margin(prices, each, signals) > 0 for each in later) else None

    def _runtime(self, state: RoundState) -> tuple[float, list[float]]:
        """t_target / t_middle and the runtime context as this round began, empty under a table without costs."""
        costs, middle = state.statistics.costs, state.sources[self._middle]
        priced = (state.statistics, state.statistics.acceptance.num_rounds, state.position)
        if priced != self._priced:
            plain_ms, target_ms = costs.target_ms([1, state.limits.verify_nodes + 1], state.position).tolist()
            middle_ms, wider_ms = costs.source_ms(self._middle, [middle.width, 2 * middle.width]).tolist()
            missed_ms, rate = (wider_ms - middle_ms) / middle.width, state.statistics.rate(state.position)
            self._priced, self._prices = priced, (0.0, [])
            if middle_ms > 0:
                self._prices = target_ms / middle_ms, runtime(plain_ms, target_ms, middle_ms, missed_ms, rate)
        return self._prices

    def _signals(self, state: RoundState, names: Sequence[str]) -> list[float]:
        """The tree's signals; those of a root alone, with which all rounds begin, are read once."""
        if not state.steps and self._opening:
            return self._opening
        signals = tree_signals(state, state.sources[self._middle], names)
        if not state.steps:
            self._opening = signals
        return signals

    def _margin(self, prices: Sequence[float], history: Sequence[bool], signals: Sequence[float]) -> float:
        assert self._fitted is not None
        inputs = np.array([*prices, *progress(history, self._fitted.header.steps), *signals], np.float32)
        if self.mode == "predictor":
            return float(self._fitted.predictor(inputs))
        assert self._fitted.value is not None
        return self._fitted.value.margin(inputs, history)

    def _warn(self, ratio: float, header: Header) -> None:
        if not self._is_warned:
            self._is_warned = True
            low, high = header.ratios
            warnings.warn(
                f"scheduler distilled: t_target / t_middle is {ratio:.2f}, outside {low:g} to {high:g}, for which its "
                "weights were fitted; gain_over_cost decides instead",
                SchedulerWarning,
                stacklevel=2,
            )


def by_rank(setting: Setting) -> tuple[str, str]:
    """(small, middle) of two sources."""
    small, middle = sorted(setting.sources, key=lambda name: setting.sources[name].rank)
    return small, middle


def choose(weights: str, setting: Setting, ablation: str | None = None) -> tuple[Path | None, str | None]:
    """The file of weights to use, or None and why not.

    Args:
        weights: "auto", a name of shipped weights or a file; only the first asks for those of the pipeline's own pair.
        setting: the pipeline.
        ablation: what they must have been fitted as; None takes the whole system where weights are "auto".

    Raises:
        ComposeError: named weights that do not fit, or an ablation without weights.
    """
    ranks = [source.rank for source in setting.sources.values()]
    countable = len(ranks) == 2 and len(set(ranks)) == 2
    unserved = None if countable else f"it schedules two sources of different rank, and finds ranks {ranks}"
    is_auto = weights == AUTO

    def unfit(said: Mapping[str, Any]) -> str | None:
        return unserved or _unfit(Header.of(said), setting, ablation, is_auto)

    path, why_not = (None, unserved) if is_auto and unserved else SHELF.choose(weights, unfit)
    if path is None and ablation is not None:
        raise ComposeError(
            "scheduler.ablation", f"{ablation!r}: {why_not}", "Allowed: weights that were fitted as this ablation.",
            "Fit them: treegraft fit scheduler DIR... --ablations --out NAME.safetensors; then say "
            f"scheduler.weights=NAME-{ablation}.safetensors.",
        )  # fmt: skip
    return path, why_not


def _unfit(header: Header, setting: Setting, ablation: str | None, is_auto: bool) -> str | None:
    """Why weights do not suit a pipeline, or None."""
    small, middle = (setting.sources[name] for name in by_rank(setting))
    if is_auto and (setting.target, middle.model) not in header.pairs:
        return f"fitted for {', '.join(map(' + '.join, header.pairs))}"
    if is_auto and ablation is None and header.ablation is not None:
        return "fitted as ablations"
    if header.ablation != ablation and (is_auto or ablation is not None):
        return f"fitted as {_fitted_as(header.ablation)}, not as {_fitted_as(ablation)}"
    found = {
        "small drafters of model": (small.model, header.small),
        "steps (D)": (setting.steps, header.steps),
        "width (W) of the middle": (middle.width, header.width),
        "verify_nodes (B)": (setting.verify_nodes, header.max_nodes),
    }
    for name, (value, fitted) in found.items():
        if value is not None and value != fitted:
            return f"fitted for {name} {fitted!r}, not {value!r}"
    if setting.vocab_size is not None and setting.vocab_size not in header.vocab_sizes:
        return f"fitted for vocabularies of {header.vocab_sizes} tokens, not {setting.vocab_size}"
    return None


def _fitted_as(ablation: str | None) -> str:
    return "the whole system" if ablation is None else f"the ablation {ablation}"
