"""A collection over toy models: `python collecting_toy.py DIR` makes it, a line on stdout for each step."""

import sys
from functools import cache
from pathlib import Path

import treegraft
from treegraft.replay import ReplayTarget
from treegraft.testing import MarkovTarget, TableDrafter, markov_table
from treegraft_plugins.schedulers.distilled.collect import Manifest, Progress, Text, collect, prompts_hash
from treegraft_plugins.schedulers.distilled.fit import Setup
from treegraft_plugins.schedulers.distilled.signals import CANDIDATES

V = 6
SMALLER = ("sources.small.width=2", "sources.small.branching=2", "sources.middle.width=2", "sources.middle.branching=2")
TEXTS = [Text("a/1", "a", "code", (0, 1, 2, 0, 1)), Text("b:2", "b", "maths", (3, 4, 3))]
TEMPERATURES = (0.0, 1.0)
NUM_TOKENS = 16


@cache
def pipelines():
    """A pipeline upon a toy target, and the same one upon what replays it."""
    target = MarkovTarget(markov_table(V, seed=4))
    middle = TableDrafter(markov_table(V, seed=4) + 0.6 * markov_table(V, seed=9))
    return tuple(
        treegraft.load(
            "treegraft", "costs={use: fixed}", "budget={use: fixed, verify_nodes: 8}", "steps=2", *SMALLER,
            models={"target": each, "middle": middle},
        )
        for each in (target, ReplayTarget(target))
    )  # fmt: skip


def manifest(**changes) -> Manifest:
    said = {
        "target": "toy", "middle": "table", "small": "", "vocab_size": V,
        "setup": Setup("small", "middle", width=2, max_nodes=8),
        "pipeline": {"calibration": "on", "sources": {"small": {"rank": 0}, "middle": {"rank": 1}}}, "steps": 2,
        "max_new_tokens": NUM_TOKENS, "every": 1, "temperatures": TEMPERATURES, "seed": 3, "signals": tuple(CANDIDATES),
        "prompts": prompts_hash(TEXTS), "costs": {"target": 1.0, "sources": {"small": 0.0, "middle": 0.5}},
        "versions": {"treegraft": "0"},
    }  # fmt: skip
    return Manifest(**(said | changes))


def collect_into(folder: Path, progress: Progress = lambda *step: None, **changes) -> None:
    live, replayed = pipelines()
    collect(live, replayed, TEXTS, manifest(**changes), folder, progress)


if __name__ == "__main__":
    collect_into(Path(sys.argv[1]), lambda *step: print(*step, flush=True))
