"""What parts answer against their rules is refused by name, before it can reach the text."""

import attrs
import numpy as np
import pytest
import torch

import treegraft
from treegraft.errors import InvariantError
from treegraft.interfaces import (
    BudgetChoice,
    BudgetPolicy,
    Drafter,
    GraftPolicy,
    PositionSelector,
    Pruner,
    Scheduler,
    Verdict,
    Verifier,
)
from treegraft.sampling import SamplingRules, Scores, SeededDraws, TokenSampler
from treegraft.testing import MarkovTarget, TableDrafter, markov_table
from treegraft.tree import DraftTree, Expansion

V = 6
TABLE = markov_table(V, seed=3)
PROMPT = [0, 1, 2]


def loaded(drafter: Drafter | None = None) -> treegraft.Pipeline:
    models = {"target": MarkovTarget(TABLE), "middle": drafter or TableDrafter(TABLE)}
    sizes = ("sources.middle.width=2", "sources.middle.branching=3", "budget={use: fixed, verify_nodes: 5}")
    return treegraft.load("all_middle", "costs={use: fixed}", *sizes, models=models)


PLAIN = loaded().generate(PROMPT, 12, temperature=1.0, seed=1).token_ids


def generated(pipeline: treegraft.Pipeline) -> treegraft.Generation:
    return pipeline.generate(PROMPT, 12, temperature=1.0, seed=1)


def with_part(**changes):
    pipeline = loaded()
    pipeline.parts = attrs.evolve(pipeline.parts, **changes)
    return pipeline


def with_source(**changes):
    pipeline = loaded()
    pipeline.sources = [attrs.evolve(source, **changes) for source in pipeline.sources]
    return pipeline


@attrs.frozen
class Deciding(Scheduler):
    name: object

    def decide(self, state):
        return self.name


@attrs.frozen
class Allowing(BudgetPolicy):
    before: object = 5
    after: object = 5
    max_verify_nodes: int = 5

    def max_nodes(self, state):
        return self.before

    def verify_nodes(self, state, tree):
        return self.after

    def choose(self, state, tree):
        return self.after if self.after is None else BudgetChoice(self.after)


class KeepingAll(Pruner):
    def prune(self, tree, num_nodes):
        return np.ones(len(tree), np.bool_)


@attrs.frozen
class Selecting(PositionSelector):
    rows: object

    def candidates(self, tree, source):
        return self.rows


@attrs.frozen
class Grafting(GraftPolicy):
    make: object
    keeps_existing = True

    def graft(self, tree, expansion, source):
        return self.make(tree)


@attrs.frozen
class Judging(Verifier):
    """Emits `num_tokens` of the target's own, and says something else."""

    num_tokens: int
    verdict: Verdict
    lossless = True
    accepts = frozenset({"deterministic"})

    def verify(self, tree, scores, sampler):
        for _ in range(self.num_tokens):
            sampler.next(0)
        return self.verdict


NO_PATH = np.zeros(0, np.int32)


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ({"scheduler": Deciding("middel")}, r"Deciding: 'middel'\n.*C1 None, or one of the sources middle"),
        ({"scheduler": Deciding(3)}, r"Deciding: 3\n"),
        ({"budget": Allowing(before=-1)}, r"Allowing: max_nodes -1\n.*B1"),
        ({"budget": Allowing(before=float("nan"))}, r"Allowing: max_nodes nan\n"),
        (
            {"budget": Allowing(after=-1)},
            r"Allowing: -1 nodes to verify\n.*B1 an integer from 0 to max_verify_nodes, 5",
        ),
        ({"budget": Allowing(after=2.5)}, "Allowing: 2.5 nodes"),
        ({"budget": Allowing(after=None)}, "Allowing: None nodes"),
        ({"budget": Allowing(after=10**6)}, "Allowing: 1000000 nodes"),
        ({"budget": Allowing(after=2), "pruner": KeepingAll()}, r"KeepingAll: \d+ nodes kept\n.*P2 at most the 2"),
        ({"verifier": Judging(0, Verdict(NO_PATH, None))}, r"Judging: a round without a token\n.*V3"),
        ({"verifier": Judging(1, Verdict(np.array([3, 1], np.int32), 0))}, r"Judging: the path .*\n.*V2"),
        ({"verifier": Judging(1, Verdict(np.array([99], np.int32), 0))}, r"Judging: the path .*\n.*V2"),
        (
            {"verifier": Judging(1, Verdict(NO_PATH, V))},
            r"Judging: a verdict of the tokens \[6\]\n.*V2 what was emitted",
        ),
        ({"verifier": Judging(1, Verdict(NO_PATH, None))}, r"Judging: a verdict of the tokens \[\]"),
    ],
)
def test_an_answer_of_a_part_that_breaks_a_rule_ends_the_request_by_name(part, found):
    with pytest.raises(InvariantError, match=found):
        generated(with_part(**part))


@pytest.mark.parametrize(
    "rows", [np.array([99]), np.array([-1]), np.array([0, 0]), np.array([0.0]), np.array([[0]]), [0], None]
)
def test_rows_that_are_none_of_the_tree_end_the_request_by_the_selectors_name(rows):
    with pytest.raises(InvariantError, match=r"Selecting: .*\n.*S1"):
        generated(with_source(selector=Selecting(rows)))


@pytest.mark.parametrize(
    "make", [lambda tree: DraftTree.rooted(int(tree.token[0] + 1) % V), lambda tree: None, lambda tree: tree.token]
)
def test_a_graft_below_another_root_leaves_its_source_out(make):
    with pytest.warns(treegraft.DrafterWarning, match="Grafting: .* of another root"):
        result = generated(with_source(graft_policy=Grafting(make)))
    assert result.token_ids == PLAIN and result.faults[0]["source"] == "middle"


@attrs.define(eq=False)
class Writing(Drafter):
    """Changes what it was shown, by a way that numpy does not see."""

    to: str

    def draft(self, request):
        shown = request.committed if self.to == "committed" else getattr(request.tree, self.to)
        torch.from_numpy(shown).fill_(0)
        return Expansion(anchor=[0], token=[1], log_prob=[-1.0])


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("to", ["committed", "token"])
def test_what_a_drafter_writes_into_what_it_was_shown_reaches_no_text(to):
    pipeline = loaded(Writing(to))
    if to == "committed":
        assert generated(pipeline).token_ids == PLAIN
    else:
        with pytest.raises(InvariantError, match=r"written over|a verdict of the tokens"):
            generated(pipeline)


@attrs.define(eq=False)
class Drawing(Drafter):
    """Draws two tokens in a chain, and answers what `answer` makes of them."""

    answer: object = lambda drawn: drawn
    proposals = "sampled"

    def draft(self, request):
        length = min(2, request.max_depth, request.max_nodes)
        tokens, _ = request.sample(torch.zeros(length, V))
        return self.answer(Expansion([0, -1][:length], tokens, [-1.0] * length))


def drawing(drafter=None, *overrides, **parts):
    models = {"target": MarkovTarget(TABLE), "dflash": drafter or Drawing()}
    pipeline = treegraft.load("dflash_sampled", "costs={use: fixed}", *overrides, models=models)
    pipeline.parts = attrs.evolve(pipeline.parts, **parts)
    return pipeline


def first(drawn, size):
    return Expansion(drawn.anchor[:size], drawn.token[:size], drawn.log_prob[:size])


def fails(drawn):
    raise IndexError("beyond my vocabulary")


@pytest.mark.parametrize(
    ("answer", "rule"),
    [
        (lambda drawn: first(drawn, 1), "D12 sampled: all that request.sample drew"),
        (lambda drawn: Expansion.empty(), "D12 sampled"),
        (lambda drawn: attrs.evolve(drawn, token=drawn.token[::-1] + 1), "D12 sampled"),
        (lambda drawn: attrs.evolve(drawn, draft_probs=np.full((2, V), 1 / V)), "D12 no draft_probs"),
        (lambda drawn: attrs.evolve(drawn, log_prob=[-1.0, -np.inf]), "D4"),
        (lambda drawn: attrs.evolve(drawn, anchor=[0, -5]), "D1"),
        (fails, "beyond my vocabulary"),
    ],
)
def test_a_drafter_that_fails_after_it_has_drawn_ends_the_request(answer, rule):
    """To leave it out for what it drew, or to verify less than it drew, would bias the text."""
    with pytest.raises(InvariantError, match=rf"sources\.dflash: \w+ after it had drawn: (.*\n.*)?{rule}"):
        generated(drawing(Drawing(answer)))


@attrs.define(eq=False)
class Misled(Drafter):
    """Asks for draws from what are no logits."""

    logits: object
    proposals = "sampled"

    def draft(self, request):
        tokens, _ = request.sample(self.logits)
        return Expansion([0], tokens, [-1.0])


@pytest.mark.parametrize(
    ("logits", "found"),
    [
        (torch.zeros(V), rf"logits \[{V}\]"),
        (torch.zeros(1, V + 1), rf"logits \[1, {V + 1}\]"),
        (torch.full((1, V), float("nan")), rf"logits \[1, {V}\]\n.*no NaN"),
        (torch.full((1, V), -torch.inf), rf"logits \[1, {V}\]"),
        (torch.full((1, V), 1e39, dtype=torch.float64), rf"logits \[1, {V}\]"),
        (np.zeros((1, V)), "a ndarray"),
    ],
)
def test_what_are_no_logits_fail_before_anything_is_drawn_and_leave_the_drafter_out(logits, found):
    with pytest.warns(treegraft.DrafterWarning, match=f"DraftRequest.sample: {found}"):
        result = generated(drawing(Misled(logits)))
    assert len(result.token_ids) == 12 and result.faults[0]["source"] == "dflash"


def test_distributions_beside_chosen_tokens_and_draws_of_a_drafter_that_chooses_are_refused():
    class Choosing(Drafter):
        def draft(self, request):
            return Expansion([0], [1], [-1.0], np.full((1, V), 1 / V))

    class Asking(Drafter):
        def draft(self, request):
            return request.sample(torch.zeros(1, V))

    for drafter, message in ((Choosing(), "D12 no draft_probs"), (Asking(), 'Declare proposals = "sampled"')):
        with pytest.warns(treegraft.DrafterWarning, match=message):
            assert generated(loaded(drafter)).token_ids == PLAIN


def test_siblings_that_were_drawn_alike_are_their_drafters_fault():
    class Twins(Drafter):
        proposals = "sampled"

        def draft(self, request):
            tokens, _ = request.sample(torch.tensor([[0.0] + [-torch.inf] * (V - 1)] * 2))
            return Expansion([0, 0], tokens, [-1.0, -1.0])

    with pytest.raises(InvariantError, match=r"sources\.dflash: (.*\n)*.*D3 siblings distinct"):
        generated(drawing(Twins(), "sources.dflash.branching=2"))


def test_asking_for_no_draws_at_all_is_no_draw():
    class Asking(Drafter):
        proposals = "sampled"

        def draft(self, request):
            request.sample(torch.zeros(0, V))
            raise ValueError("nothing to say")

    with pytest.warns(treegraft.DrafterWarning, match="nothing to say"):
        assert len(generated(drawing(Asking())).token_ids) == 12


def test_nothing_that_was_drawn_is_left_out():
    """A drafter gets no more room than is verified, and a budget that allows less after all ends the request."""
    sizes = [
        len(record.pruned) - 1
        for most in (0, 1, 2, 5)
        for record in drawing(None, f"budget={{use: fixed, verify_nodes: {most}}}")
        .generate(PROMPT, 12, temperature=1.0, seed=1, keep_rounds=True)
        .rounds[:1]
    ]
    assert sizes == [0, 1, 2, 2]
    with pytest.raises(InvariantError, match=r"Allowing: a budget for fewer nodes than were drawn\n.*B3"):
        generated(drawing(budget=Allowing(after=1)))


@pytest.mark.parametrize("make", [lambda tree: tree, lambda tree: tree.append(Expansion([0], [1], [-1.0]), 0, [True])])
def test_a_graft_that_is_not_what_was_drawn_ends_the_request(make):
    pipeline = drawing()
    pipeline.sources = [attrs.evolve(source, graft_policy=Grafting(make)) for source in pipeline.sources]
    with pytest.raises(InvariantError, match=r"Grafting: another tree than was drawn\n.*G2"):
        generated(pipeline)


def test_what_was_drawn_is_neither_grafted_onto_nor_drawn_twice():
    """However often the schedule calls it, and whatever its selector offers."""
    pipeline = drawing(None, "scheduler={use: fixed, pattern: [dflash, dflash, dflash]}")
    result = pipeline.generate(PROMPT, 12, temperature=1.0, seed=1, keep_rounds=True)
    assert not result.faults and {len(record.state.steps) for record in result.rounds} <= {0, 1}


@attrs.define(eq=False)
class Late(Drafter):
    """Draws at its second call of a round: the first found nothing to say."""

    proposals = "sampled"
    num_calls: int = 0

    def draft(self, request):
        self.num_calls += 1
        if self.num_calls % 2:
            return Expansion.empty()
        tokens, _ = request.sample(torch.zeros(1, V))
        return Expansion([0], tokens, [-1.0])


def test_a_second_call_at_a_bare_root_goes_on_with_the_rounds_noise():
    sampler = TokenSampler(PROMPT, SamplingRules(greedy=False), SeededDraws(1), 12)
    assert sampler.proposals(0) is sampler.proposals(0) and sampler.proposals(0) is not sampler.proposals(1)
    before = sampler.proposals(0)
    sampler.begin(DraftTree.rooted(2), Scores(torch.zeros(1, V)))
    assert sampler.proposals(0) is not before
    pipeline = drawing(Late(), "scheduler={use: fixed, pattern: [dflash, dflash]}")
    pipeline.sources = [attrs.evolve(source, selector=Selecting(np.array([0]))) for source in pipeline.sources]
    result = generated(pipeline)
    assert not result.faults and result.accepted_per_round > 0
