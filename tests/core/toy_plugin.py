"""A plugin of toys, one or two of every kind: what composition is tested with, in place of the built-ins."""

from typing import ClassVar

import attrs
import numpy as np
from attrs.validators import ge

import treegraft
from treegraft.testing import MarkovTarget, TableDrafter, markov_table

TABLE = markov_table(5, order=1)
REGISTRY = """
models:
  target: {path: toy:target, dtype: float64}
  middle: toy:middle
  other: ${models.middle}
pipelines:
  toys:
    abstract: true
    steps: 3
    target: {use: toy_target, model: target}
    budget: {use: toy, verify_nodes: 9}
    pruner: {use: toy}
    verifier: {use: toy_match}
    costs: {use: toy}
  one:
    extends: toys
    sources:
      small:
        draft: {use: toy_lookup, max_n: 3}
        select: {use: toy}
        graft: {use: toy}
        width: 4
    scheduler: {use: toy, pattern: [small]}
  two:
    extends: one
    sources:
      middle:
        draft: {use: toy_model, model: middle, rescore_limit: 32}
        select: {use: toy}
        graft: {use: toy}
        rank: 1
        rescore: true
    scheduler: {use: toy, pattern: [middle, small]}
"""
"""A registry of toy pipelines: one source, and two."""

MADE: list[tuple[str, object]] = []
"""(class name, model) of every toy that was given a model, in the order of construction."""


@attrs.define(eq=False)
class ToyTarget(MarkovTarget):
    model: object = None
    table: np.ndarray = attrs.field(factory=lambda: TABLE)

    def __attrs_post_init__(self):
        MADE.append((type(self).__name__, self.model))
        if getattr(self.model, "path", "").startswith("broken"):
            raise OSError(f"cannot read {self.model.path}")
        super().__attrs_post_init__()


@attrs.define(eq=False, kw_only=True)
class ToyDrafter(TableDrafter):
    model: object
    rescore_limit: int | None = None
    table: np.ndarray = attrs.field(factory=lambda: TABLE)

    def __attrs_post_init__(self):
        MADE.append((type(self).__name__, self.model))


@attrs.define(eq=False)
class ToyLookup(treegraft.Drafter):
    max_n: int = attrs.field(default=4, validator=ge(1))

    def draft(self, request):
        return treegraft.Expansion.from_rows({row: [(0, -1.0)] for row in request.positions.tolist()})


@attrs.define(eq=False)
class ToyBlock(ToyLookup):
    takes_edge_scorer: ClassVar[bool] = True


@attrs.define(eq=False)
class ToySampler(ToyLookup):
    proposals: ClassVar[str] = "sampled"


class ToySelector(treegraft.PositionSelector):
    def candidates(self, tree, source):
        return np.flatnonzero(~tree.visited_by(source.index))


class ToyGraft(treegraft.GraftPolicy):
    keeps_existing = True

    def graft(self, tree, expansion, source):
        return tree.append(expansion, source.index, source.overrules)


@attrs.define
class ToyScheduler(treegraft.Scheduler):
    pattern: list[str]

    def bind(self, setting):
        for name in self.pattern:
            if name not in setting.sources:
                raise treegraft.ComposeError("pattern", f"no source named {name!r}.")

    def decide(self, state):
        return self.pattern[len(state.steps) % len(self.pattern)] if self.pattern else None


@attrs.define
class ToyBudget(treegraft.BudgetPolicy):
    max_verify_nodes: int = attrs.field(default=7, alias="verify_nodes", validator=ge(0))

    def max_nodes(self, state):
        return self.max_verify_nodes

    def verify_nodes(self, state, tree):
        return min(self.max_verify_nodes, len(tree) - 1)


class ToyPruner(treegraft.Pruner):
    def prune(self, tree, num_nodes):
        keep = np.zeros(len(tree), bool)
        keep[tree.ranked()[: num_nodes + 1]] = True
        return keep


class ToyEdges(treegraft.EdgeScorer):
    def score(self, parents, children, log_prob):
        return np.zeros((*parents.shape, children.shape[1]))


@attrs.define
class ToyCosts(treegraft.CostModel):
    target: float = 1.0

    def target_ms(self, rows, context):
        return np.full_like(np.asarray(rows, float), self.target)

    def source_ms(self, name, rows):
        return np.zeros_like(np.asarray(rows, float))

    def table(self):
        return {"target": self.target}


class ToyVerifier(treegraft.Verifier):
    lossless = False
    accepts = frozenset({"deterministic", "sampled"})

    def verify(self, tree, scores, sampler):
        return treegraft.Verdict(np.array([], np.int32), sampler.next(0), sampler.stop_reason)


@treegraft.hookimpl
def treegraft_register(register):
    from treegraft.verify import BlockVerifier, MatchVerifier
    from treegraft_plugins.budgets import FixedBudget

    register("toy_target", ToyTarget)
    register("toy_model", ToyDrafter)
    register("toy_lookup", ToyLookup)
    register("toy_block", ToyBlock)
    register("toy_sampler", ToySampler)
    register("toy", ToySelector)
    register("toy", ToyGraft)
    register("toy", ToyScheduler)
    register("toy", ToyBudget)
    register("toy", ToyPruner)
    register("toy", ToyEdges)
    register("toy", ToyCosts)
    register("toy", ToyVerifier)
    register("toy_match", MatchVerifier)
    register("toy_block_verifier", BlockVerifier)
    register("toy_whole", FixedBudget)
