"""Requests from end to end over toy models: ends, limits, faults, figures."""

import threading
import warnings

import attrs
import numpy as np
import pytest
import torch
from exactness.toy_block import DrawnTableBlockDrafter, TableBlockDrafter
from hf.named_pipelines import for_any_models

import treegraft
from treegraft import Drafter, DrafterWarning, Expansion, Generation, PipelineBusyError, RequestError, Wants
from treegraft.testing import FaultyDrafter, MarkovTarget, ScriptedDrafter, TableDrafter, markov_table

V = 20
NAMES = for_any_models()
FIXED = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}")
SMALLER = ("sources.middle.width=2", "sources.middle.branching=3")
PROMPT = [0, 1, 2]


def counting_table() -> np.ndarray:
    """After t, most probably t + 1; every other token is possible."""
    table = np.random.default_rng(0).normal(size=(V, V))
    table[np.arange(V), (np.arange(V) + 1) % V] = 4.0
    return table


def counting(num_tokens: int) -> list[int]:
    """The greedy continuation of PROMPT."""
    return [(3 + i) % V for i in range(num_tokens)]


REFERENCE = [*PROMPT, *counting(60)]
HARMLESS = ("empty", "siblings")
FAULTS = ("raises", "none", "nan", "positive", "vocabulary", "negative", "anchor", "loop", "deep", "crowded", "writes")


def others(name: str) -> dict[str, Drafter]:
    """What the pipeline `name` drafts with beside the middle, by the name of the model."""
    table = counting_table()
    block = DrawnTableBlockDrafter(table, num_places=2) if name == "dflash_sampled" else TableBlockDrafter(table)
    return {"small": TableDrafter(table), "dflash": block, "heads": TableBlockDrafter(table)}


def loaded(drafter: Drafter, *overrides: str, name: str = "all_middle", **options: object) -> treegraft.Pipeline:
    models = {"target": MarkovTarget(counting_table(), **options), "middle": drafter}
    return treegraft.load(name, *FIXED, *SMALLER, *overrides, models=models)


def accepted(generation: Generation) -> int:
    return sum(kept * count for kept, count in generation.accepted_histogram.items())


# -- drafters good and bad --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "accepted_per_round"),
    [
        (ScriptedDrafter(REFERENCE), 5),
        (ScriptedDrafter(REFERENCE, num_right=0), 0),
        (ScriptedDrafter(REFERENCE, num_right=2), 2),
        (ScriptedDrafter(REFERENCE, rank=1), 5),
        (ScriptedDrafter(REFERENCE, rank=2), 3),  # in a tree two nodes wide, its turn comes every other step
        (TableDrafter(counting_table()), 5),
    ],
)
def test_what_is_right_in_the_draft_is_accepted_and_nothing_else(drafter, accepted_per_round):
    generation = loaded(drafter).generate(PROMPT, max_new_tokens=30, keep_rounds=True)
    assert generation.token_ids == counting(30)
    assert all(len(record.verdict.path) == accepted_per_round for record in generation.rounds[:-1])
    assert generation.num_rounds == -(-30 // (accepted_per_round + 1))


# -- how a request ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", range(1, 14))
def test_eos_at_every_position_of_a_block(end):
    """Blocks are six tokens here: the EOS stands at each place of two of them, the bonus token's included."""
    eos = counting(end)[-1]
    generation = loaded(ScriptedDrafter(REFERENCE), eos_ids={eos}).generate(PROMPT, max_new_tokens=40)
    assert generation.token_ids == counting(end) and generation.finish_reason == "eos"
    assert generation.num_rounds == -(-end // 6)
    assert accepted(generation) == end - end // 6


def test_eos_on_a_rejected_branch_ends_nothing():
    """Token 0 is drafted as the favourite sibling everywhere, and verified, and never emitted."""
    drafter = ScriptedDrafter(REFERENCE, rank=1)
    generation = loaded(drafter, eos_ids={0}).generate(PROMPT, max_new_tokens=15, keep_rounds=True)
    assert any((record.pruned.token[1:] == 0).any() for record in generation.rounds)
    assert generation.token_ids == counting(15) and generation.finish_reason == "length"


def test_without_eos_a_request_runs_to_its_length():
    generation = loaded(ScriptedDrafter(REFERENCE)).generate(PROMPT, max_new_tokens=50)
    assert generation.token_ids == counting(50) and generation.finish_reason == "length"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("prompt", [[2], PROMPT])
def test_every_pipeline_emits_as_many_tokens_as_asked_for(name, max_new_tokens, prompt):
    models = {"target": MarkovTarget(counting_table()), "middle": TableDrafter(counting_table())}
    pipeline = treegraft.load(name, *FIXED, models=models | others(name))
    generation = pipeline.generate(prompt, max_new_tokens=max_new_tokens)
    assert generation.token_ids == counting(max_new_tokens) and generation.finish_reason == "length"
    assert generation.target_calls == generation.num_rounds <= max_new_tokens
    assert not generation.faults


@pytest.mark.parametrize("room", [0, 1, 2, 9])
def test_the_targets_context_ends_a_request(room):
    pipeline = loaded(ScriptedDrafter(REFERENCE), max_length=len(PROMPT) + room)
    generation = pipeline.generate(PROMPT, max_new_tokens=40)
    assert generation.token_ids == counting(room) and generation.finish_reason == "context_limit"
    if room:
        shorter = pipeline.generate(PROMPT, max_new_tokens=room)
        assert shorter.token_ids == counting(room) and shorter.finish_reason == "length"


def test_a_prompt_beyond_the_targets_context_is_refused():
    with pytest.raises(RequestError, match="prompt: 3 tokens"):
        loaded(ScriptedDrafter(REFERENCE), max_length=2).generate(PROMPT)


@attrs.define(eq=False)
class MeasuredDrafter(ScriptedDrafter):
    """Notes the position of the deepest token it is asked to draft below."""

    deepest: int = -1

    def draft(self, request):
        depths = request.tree.depth[request.positions]
        self.deepest = max([self.deepest, *(len(request.committed) - 1 + depths).tolist()])
        assert (depths < request.max_depth).all()
        return super().draft(request)


def test_beyond_a_drafters_context_the_request_goes_on_without_it():
    drafter = MeasuredDrafter(REFERENCE, max_length=12)
    generation = loaded(drafter).generate(PROMPT, max_new_tokens=20)
    assert generation.token_ids == counting(20) and generation.finish_reason == "length"
    assert drafter.deepest == 11, "its last position is used, and none beyond"
    assert not generation.faults and accepted(generation) == 5 + 4
    assert generation.num_rounds == 2 + 9


# -- faulty drafters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("healthy_calls", [0, 3, 7])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_drafter_is_left_out_and_the_output_is_right(fault, healthy_calls):
    """One warning that names it, for the rest of the request; the next request tries it again."""
    drafter = FaultyDrafter(fault, healthy_calls)
    pipeline = loaded(drafter)
    for _ in range(2):
        with pytest.warns(DrafterWarning, match=r"sources\.middle") as caught:
            generation = pipeline.generate(PROMPT, max_new_tokens=12)
        assert len(caught) == 1
        assert generation.token_ids == counting(12)
        assert [found["source"] for found in generation.faults] == ["middle"]
        assert generation.faults[0]["error"] in str(caught[0].message)
        assert drafter.num_calls == healthy_calls + 1


@pytest.mark.parametrize("fault", HARMLESS)
def test_what_is_no_fault(fault):
    """An empty expansion is an answer, and equal siblings are one node."""
    drafter = FaultyDrafter(fault)
    generation = loaded(drafter).generate(PROMPT, max_new_tokens=12)
    assert generation.token_ids == counting(12) and not generation.faults
    assert drafter.num_calls > 1


def test_the_other_sources_go_on():
    """A fault in the middle of a round: the step counts, the tree stays, and the other drafter takes over."""
    pipeline = loaded(FaultyDrafter("raises"), "sources.middle.rescore=false", name="treegraft_fixed")
    with pytest.warns(DrafterWarning, match=r"sources\.middle"):
        generation = pipeline.generate([*PROMPT, *counting(V + 5)], max_new_tokens=12)
    assert generation.token_ids == [(8 + i) % V for i in range(12)]
    assert [found["source"] for found in generation.faults] == ["middle"]
    assert generation.source_calls["small"] > 0 and accepted(generation) > 0


@pytest.mark.parametrize("method", ["start", "observe", "stop", "rescore"])
def test_a_fault_outside_draft(method):
    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    drafter = type("Broken", (TableDrafter,), {method: fail})(counting_table())
    pipeline = loaded(drafter, name="treegraft_fixed" if method == "rescore" else "all_middle")
    for _ in range(2):
        with pytest.warns(DrafterWarning, match="out of order") as caught:
            generation = pipeline.generate(PROMPT, max_new_tokens=12)
        assert generation.token_ids == counting(12) and len(caught) == 1
        assert [found["source"] for found in generation.faults] == ["middle"]


@pytest.mark.parametrize(
    "change",
    [
        {"log_prob": np.array([np.nan])},
        {"log_prob": np.array([0.5])},
        {"rows": np.array([99])},
        {"log_prob": np.array([-1.0, -1.0])},
        {"processed": np.array([99])},
    ],
)
def test_a_faulty_rescoring_never_reaches_the_tree(change):
    @attrs.define(eq=False)
    class Wrong(TableDrafter):
        def rescore(self, tree, candidates, request):
            scored = super().rescore(tree, candidates, request)
            if len(tree) < 3:
                return scored
            one = attrs.evolve(scored, rows=np.array([1]), log_prob=np.array([-1.0]))
            return attrs.evolve(one, **change)

    pipeline = loaded(Wrong(counting_table()), "sources.middle.rescore=true")
    with pytest.warns(DrafterWarning, match=r"sources\.middle"):
        generation = pipeline.generate(PROMPT, max_new_tokens=12)
    assert generation.token_ids == counting(12) and len(generation.faults) == 1


# -- what drafters are told -------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class ListeningDrafter(ScriptedDrafter):
    """Keeps all that it observes, and compares it with the context it is asked to draft for."""

    wants: Wants = attrs.field(factory=lambda: Wants(num_top=3))
    seen: list[int] = attrs.field(factory=list)
    best: list[int] = attrs.field(factory=list)

    def start(self, observation):
        self.seen, self.best = [], []
        self.observe(observation)

    def observe(self, observation):
        assert observation.top_ids.shape == observation.top_log_probs.shape == (len(observation.tokens), 3)
        assert (np.diff(observation.top_log_probs) <= 0).all() and (observation.top_log_probs <= 0).all()
        self.seen += observation.tokens.tolist()
        self.best += observation.top_ids[:, 0].tolist()

    def draft(self, request):
        assert self.seen == request.committed[:-1].tolist()
        assert self.best == [(token + 1) % V for token in self.seen]
        return super().draft(request)


@pytest.mark.parametrize("prompt", [[2], PROMPT])
def test_drafters_observe_every_committed_token_but_the_root_once(prompt):
    drafter = ListeningDrafter(REFERENCE[-len(prompt) - 60 :], num_right=2)
    pipeline = loaded(drafter)
    for _ in range(2):
        generation = pipeline.generate(prompt, max_new_tokens=20)
        assert generation.token_ids == counting(20) and not generation.faults
        assert drafter.seen == [*prompt, *counting(19)]


# -- one request at a time --------------------------------------------------------------------------------------------


def test_a_second_request_is_refused_while_one_is_under_way():
    pipeline = loaded(ScriptedDrafter(REFERENCE))
    rounds = pipeline.rounds(PROMPT, max_new_tokens=30)
    next(rounds)
    for call in (pipeline.generate, lambda prompt: next(pipeline.rounds(prompt))):
        with pytest.raises(PipelineBusyError, match="second request"):
            call(PROMPT)
    refused: list[BaseException] = []

    def elsewhere() -> None:
        try:
            pipeline.generate(PROMPT)
        except PipelineBusyError as error:
            refused.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(refused) == 1
    tokens = [token for record in rounds for token in record.tokens]
    assert tokens == counting(30)[6:], "the request under way is not disturbed"
    assert pipeline.generate(PROMPT, max_new_tokens=9).token_ids == counting(9)


def test_an_abandoned_request_makes_way():
    pipeline = loaded(ScriptedDrafter(REFERENCE))
    rounds = pipeline.rounds(PROMPT, max_new_tokens=30)
    next(rounds)
    rounds.close()
    assert pipeline.generate(PROMPT, max_new_tokens=9).token_ids == counting(9)


def test_a_request_that_fails_makes_way():
    target = MarkovTarget(counting_table())
    pipeline = treegraft.load("plain", models={"target": target})
    score, calls = target.score, []

    def failing(trees):
        calls.append(trees)
        if len(calls) == 2:
            raise RuntimeError("the device is gone")
        return score(trees)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(target), "score", lambda self, trees: failing(trees))
        with pytest.raises(RuntimeError, match="the device is gone"):
            pipeline.generate(PROMPT)
    assert pipeline.generate(PROMPT, max_new_tokens=9).token_ids == counting(9)


# -- prompts and options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [PROMPT, tuple(PROMPT), torch.tensor(PROMPT), torch.tensor([PROMPT])])
def test_prompts_of_every_form(prompt):
    assert loaded(ScriptedDrafter(REFERENCE)).generate(prompt, max_new_tokens=4).token_ids == counting(4)


@pytest.mark.parametrize(
    "prompt",
    [
        [], (), torch.tensor([]), torch.zeros(2, 3, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long),
        torch.tensor([1.0]), [V], [-1], [1.0], [True], ["1"], [None], None, 7, {0: 1}, "no tokenizer", b"12",
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_honoured_are_refused(prompt):
    pipeline = loaded(ScriptedDrafter(REFERENCE))
    with pytest.raises(RequestError, match="prompt"):
        pipeline.generate(prompt)
    assert pipeline.generate(PROMPT, max_new_tokens=4).token_ids == counting(4), "and the pipeline is free"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_new_tokens", value) for value in (-1, 1.0, True, None, "4")),
        *(("temperature", value) for value in (-1.0, "hot")),
        ("seed", -1),
        ("top_p", 0.5),  # beside temperature 0
        ("stop", ["END"]),  # without a tokenizer
    ],
)
def test_options_that_cannot_be_honoured_are_refused(name, value):
    with pytest.raises(RequestError):
        loaded(ScriptedDrafter(REFERENCE)).generate(PROMPT, **{name: value})


# -- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_consistent(name):
    models = {"target": MarkovTarget(counting_table()), "middle": TableDrafter(counting_table())}
    pipeline = treegraft.load(name, *FIXED, models=models | others(name))
    generation = pipeline.generate(PROMPT, max_new_tokens=25, temperature=1.0, seed=3, keep_rounds=True)
    rounds = generation.rounds
    assert generation.num_rounds == generation.target_calls == len(rounds) > 0
    assert [token for record in rounds for token in record.tokens] == generation.token_ids
    assert len(generation.token_ids) == 25
    assert sum(generation.accepted_histogram.values()) == generation.num_rounds
    # max_depth leaves room for the bonus token, so that every round here ends with one
    assert accepted(generation) + generation.num_rounds == 25
    assert generation.emitted_per_round == pytest.approx(25 / generation.num_rounds)
    assert generation.accepted_per_round == pytest.approx(generation.emitted_per_round - 1)
    steps = [step for record in rounds for step in record.state.steps if len(step.positions)]
    assert generation.source_calls == {s.name: sum(step.source == s.name for step in steps) for s in pipeline.sources}
    for record in rounds:
        assert len(record.verdict.path) <= len(record.pruned) - 1 <= record.budget
        record.state.tree.check()
        record.pruned.check()
    latency = generation.latency_ms
    assert latency.keys() == {"target", "commit", "prefill", "sources", "framework", "total"}
    assert latency["sources"].keys() == {source.name for source in pipeline.sources}
    parts = [latency[part] for part in ("target", "commit", "prefill", "framework")] + [*latency["sources"].values()]
    assert min(parts) >= 0 and sum(parts) <= latency["total"]
    assert generation.tokens_per_second == pytest.approx(25 / latency["total"] * 1e3)
    assert generation.seed == 3 and generation.lossless and generation.lossless_note is None
    assert generation.text is None and generation.faults == [] and generation.costs


def test_rounds_are_kept_only_on_demand_and_fresh_seeds_are_reported():
    pipeline = loaded(TableDrafter(counting_table()))
    first = pipeline.generate(PROMPT, max_new_tokens=20, temperature=2.0)
    assert first.rounds is None and isinstance(first.seed, int)
    again = pipeline.generate(PROMPT, max_new_tokens=20, temperature=2.0, seed=first.seed)
    assert again.token_ids == first.token_ids
    row = pipeline.generate(PROMPT, max_new_tokens=20, temperature=2.0, seed=(first.seed, 1))
    assert row.token_ids != first.token_ids and row.seed == (first.seed, 1)


def test_healthy_requests_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded(TableDrafter(counting_table())).generate(PROMPT, max_new_tokens=10)


def test_the_trees_invariants_hold_throughout(monkeypatch):
    """With the debug switch on, every tree that is ever made is checked."""
    monkeypatch.setenv("TREEGRAFT_DEBUG", "1")
    pipeline = loaded(TableDrafter(counting_table()), name="treegraft_fixed")
    assert pipeline.generate(PROMPT, max_new_tokens=10, temperature=3.0, seed=0).num_rounds > 1


def test_expansions_with_chains_and_merges_go_through():
    """A drafter that answers with whole subtrees, some of them proposed before."""

    class Subtrees(Drafter):
        def draft(self, request):
            row, last = int(request.positions[0]), int(request.context(int(request.positions[0]))[-1])
            length = min(3, request.max_depth - int(request.tree.depth[row]))
            chain = [(last + 1 + i) % V for i in range(length)]
            return Expansion([row, *~np.arange(length - 1)], chain, [-0.1] * length)

    generation = loaded(Subtrees()).generate(PROMPT, max_new_tokens=40)
    assert generation.token_ids == counting(40) and not generation.faults
    assert max(generation.accepted_histogram) > 5, "chains reach beyond one token a step"


def test_pipelines_that_share_a_target_object_do_not_mix_their_requests():
    target = MarkovTarget(markov_table(8, seed=1))
    first, second = (treegraft.load("plain", "costs={use: fixed}", models={"target": target}) for _ in range(2))
    alone = second.generate([1, 2], 6).token_ids
    begun = first.rounds([1, 2], 6)
    next(begun)
    with pytest.raises(PipelineBusyError):
        second.generate([1, 2], 6)
    begun.close()
    assert second.generate([1, 2], 6).token_ids == alone


@pytest.mark.parametrize(
    "options", [{"stop": 5}, {"temperature": 1e-40}, {"temperature": -1}, {"prompt": b"bytes"}, {"top_k": -1}]
)
def test_what_cannot_be_honoured_is_refused_by_name(options):
    pipeline = treegraft.load("plain", "costs={use: fixed}", models={"target": MarkovTarget(markov_table(8, seed=1))})
    request = {"prompt": [1, 2], "max_new_tokens": 3} | options
    with pytest.raises(RequestError, match=next(iter(options))):
        pipeline.generate(**request)
