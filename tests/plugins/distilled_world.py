"""A synthetic world of replayed rounds, in which the best policy is known."""

import numpy as np

from treegraft_plugins.schedulers.distilled import trajectories
from treegraft_plugins.schedulers.distilled.fit import Setup
from treegraft_plugins.schedulers.distilled.signals import CANDIDATES
from treegraft_plugins.schedulers.distilled.trajectories import Rounds

SETUP = Setup("small", "middle", width=10, max_nodes=63)
SPEAKS = list(CANDIDATES).index("selected_score")
"""The one signal that says anything: above zero, a call at the first step brings four tokens; else nothing does."""


def rounds(num_rounds: int = 60, steps: int = 2, num_reports: int = 3, gain: int = 4, seed: int = 0) -> Rounds:
    """Rounds in which the best policy is to call at the first step where the signal is above zero, and never else."""
    rng = np.random.default_rng(seed)
    shape = (num_rounds, 2**steps)
    signals = rng.normal(size=(num_rounds, trajectories.num_states(steps), len(CANDIDATES)))
    helps = signals[:, 0, SPEAKS] > 0
    signals[:, :, SPEAKS] = np.where(helps, 1.0, -1.0)[:, None] * rng.uniform(0.5, 1.5, (num_rounds, 1))
    calls = trajectories.schedules(steps)
    accepted = np.where(helps[:, None] & calls[:, 0], 1 + gain, 1) + rng.integers(0, 2, shape)
    ranks = np.where(np.arange(trajectories.MAX_RANKS) < accepted[..., None], np.arange(trajectories.MAX_RANKS) + 1, 0)
    return Rounds(
        steps=steps,
        report=np.array([f"pair x {number % num_reports}" for number in range(num_rounds)]),
        category=np.array([("code", "maths")[number % 2] for number in range(num_rounds)]),
        temperature=np.zeros(num_rounds, np.float32),
        num_prompt_tokens=rng.integers(20, 200, num_rounds),
        context=rng.integers(200, 300, num_rounds),
        signals=signals.astype(np.float32),
        rows=np.broadcast_to(np.where(calls, 10, 0), (*shape, steps)).copy(),
        missed=np.zeros(shape, np.int64),
        drafted=np.ones((*shape, steps), np.bool_),
        num_nodes=np.full(shape, 200),
        ranks=ranks,
        expected=np.broadcast_to(np.log1p(trajectories.BUDGETS), (*shape, len(trajectories.BUDGETS))).astype(
            np.float32
        ),
    )
