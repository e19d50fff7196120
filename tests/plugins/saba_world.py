"""Rounds, costs and weights for the state-aware budget."""

from pathlib import Path

import attrs
import numpy as np
from bare_parts import bare_state

from treegraft.interfaces import RoundState, Setting, SourceSetting, Statistics, StepRecord
from treegraft.statistics import AcceptanceStats
from treegraft.tree import DraftTree, Expansion
from treegraft_plugins import fitted
from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.saba.budget import FORMAT, described
from treegraft_plugins.saba.signals import DRAFTED, SIGNALS

SAID = dict(zip(DRAFTED, (0.5, 0.1, 1.5, 0.2, 0.0, 3.0), strict=True))


def drafted_state(tree: DraftTree, costs: FixedCosts, said: dict[str, float], verify_nodes: int = 63) -> RoundState:
    """A round after one step of `block`, which forwarded 8 rows and said `said`, and one in which nobody drafted."""
    state = bare_state(tree=tree)
    nothing = np.zeros(0, np.int64)
    expansion = attrs.evolve(Expansion.empty(), signals=said)
    step = StepRecord("block", tree, tree, np.array([0]), expansion, nothing, num_rows=8, latency_ms=0.0)
    idle = StepRecord("other", tree, tree, nothing, Expansion.empty(), nothing, num_rows=0, latency_ms=0.0)
    return attrs.evolve(
        state, steps=(step, idle), statistics=Statistics(costs, AcceptanceStats(2)), position=40,
        limits=attrs.evolve(state.limits, verify_nodes=verify_nodes),
    )  # fmt: skip


def setting(**changes) -> Setting:
    """A pipeline of one source."""
    sources = {"block": SourceSetting("drafter", width=1, branching=32, rank=0)}
    return attrs.evolve(Setting("target", 7, sources, steps=5, verify_nodes=63), **changes)


def arrays(num_signals: int, seed: int = 0) -> dict[str, np.ndarray]:
    """A random gain model."""
    rng = np.random.default_rng(seed)
    return {
        "mean": rng.normal(size=num_signals), "std": rng.uniform(0.5, 2.0, num_signals),
        "w1": rng.normal(size=(num_signals, 8)), "b1": rng.normal(size=8), "w2": rng.normal(size=(8, 3)),
        "b2": np.array([0.5, 2.0, -0.2]),
    }  # fmt: skip


def save(path: Path, names: tuple[str, ...] = SIGNALS, seed: int = 0, **changes) -> dict[str, np.ndarray]:
    """Weights for `setting`; returns the arrays."""
    made = arrays(len(names), seed)
    header = {"kind": "saba", "format": FORMAT, "signals": names, **described(setting())}
    fitted.save(path, made, header | changes)
    return made
