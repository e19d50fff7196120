"""Sources, states and requests with nothing but what the part under test reads."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from treegraft.interfaces import DraftRequest, Limits, RoundState, Setting, Source, SourceSetting
from treegraft.tree import DraftTree


def bare_source(index: int = 0, num_sources: int = 2) -> Source:
    """Source `index` of some; it overrules the scores of those up to itself."""
    nothing: Any = None
    return Source(
        name=f"source{index}", index=index, drafter=nothing, selector=nothing, graft_policy=nothing, width=4,
        branching=4, rank=index, rescore=False, overrules=tuple(other <= index for other in range(num_sources)),
    )  # fmt: skip


def bare_state(num_steps: int = 0, tree: DraftTree | None = None) -> RoundState:
    """A round in which that many steps are behind."""
    anything: Any = None
    return RoundState(
        num_prompt_tokens=1, position=0, limits=Limits(steps=5, verify_nodes=63, max_depth=100), sources={},
        steps=(anything,) * num_steps, tree=tree or DraftTree.rooted(0), statistics=anything,
    )  # fmt: skip


def bare_setting(names: Sequence[str]) -> Setting:
    """A pipeline with sources of these names."""
    sources = {name: SourceSetting("", width=10, branching=10, rank=rank) for rank, name in enumerate(names)}
    return Setting(target="", vocab_size=None, sources=sources, steps=5, verify_nodes=63)


def request(
    committed: Sequence[int],
    tree: DraftTree | None = None,
    positions: Sequence[int] = (0,),
    branching: int = 10,
    max_nodes: int = 163,
    max_depth: int = 100,
    vocab_size: int = 10_000,
) -> DraftRequest:
    """A request below `positions` of a tree rooted at the last committed token."""
    tokens = np.array(committed, np.int64)
    return DraftRequest(
        tree=tree or DraftTree.rooted(int(tokens[-1])), positions=np.array(positions, np.int64), branching=branching,
        max_nodes=max_nodes, max_depth=max_depth, vocab_size=vocab_size, committed=tokens,
    )  # fmt: skip
