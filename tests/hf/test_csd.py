"""csd drafts the chain of a plain cascade, at the forwards that a cascade takes, and keeps to the rules of drafters."""

import attrs
import numpy as np
import pytest
import torch
from hf.families import FAMILIES, VOCAB_SIZE, build, middle_of
from hf.reference import generated, last_logits

import treegraft
from treegraft.errors import DrafterWarning, ModelError
from treegraft.interfaces import DraftRequest, Observation
from treegraft.registry import packaged_registry
from treegraft.testing import SAMPLED, MarkovTarget, exact_generations, markov_table, max_difference
from treegraft.testing import target_distribution as exact_target
from treegraft.tree import DraftTree, Expansion
from treegraft_plugins.drafters.ngram import NGramDrafter
from treegraft_plugins.hf.csd import CascadeDrafter

SIZES = {"middle_tokens": 4, "small_tokens": 8}
FIXED = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}")
Link = tuple[int, float]


def path_tree(tokens: list[int]) -> DraftTree:
    tree = DraftTree.rooted(tokens[0])
    for row, token in enumerate(tokens[1:]):
        tree = tree.append(Expansion([row], [token], [-0.1]), 0, [True])
    return tree


def asked(committed, tree=None, positions=(0,), branching=10, max_nodes=100, max_depth=100) -> DraftRequest:
    tree = DraftTree.rooted(committed[-1]) if tree is None else tree
    return DraftRequest(
        tree, np.array(positions, np.int64), branching, max_nodes, max_depth, VOCAB_SIZE, np.array(committed)
    )


def seen(tokens: list[int]) -> Observation:
    """What a target says that always expects the same ten tokens after a token."""
    told = np.array(tokens, np.int64)
    top_ids = (7 * told[:, None] + np.arange(10)) % VOCAB_SIZE
    return Observation(told, top_ids, np.log(np.broadcast_to(np.linspace(0.3, 0.03, 10) / 2, top_ids.shape)))


def started(committed: list[int], model=None, **options) -> CascadeDrafter:
    """A drafter that has seen all committed tokens but the root."""
    drafter = CascadeDrafter(FAMILIES["llama"]() if model is None else model, **options)
    drafter.start(seen(committed[:-1]))
    return drafter


def links_of(expansion: Expansion, position: int = 0) -> list[Link]:
    """The chain that an expansion is."""
    assert expansion.anchor.tolist() == [position, *(~above for above in range(len(expansion)))][: len(expansion)]
    return list(zip(expansion.token.tolist(), expansion.log_prob.tolist(), strict=True))


def tokens_of(links: list[Link]) -> list[int]:
    return [token for token, _ in links]


class Reference:
    """The cascade in plain loops: whole sequences forwarded without a cache, a new n-gram drafter for each question.

    Attributes:
        read: the texts that the middle has read to their end and whose last token it still holds.
        num_rows, num_forwards: of the middle in the last chain.
        agreed, refused: how many guesses the middle took, and how many times it stopped a guess.
    """

    def __init__(self, model, committed, middle_tokens, small_tokens, **small):
        self.model, self.committed, self.small = model, committed, small
        self.middle_tokens, self.small_tokens = middle_tokens, small_tokens
        self.read: set[tuple[int, ...]] = set()
        self.agreed = self.refused = 0

    def guess(self, path: list[int], limit: int) -> list[Link]:
        small, links = NGramDrafter(**self.small), []
        small.start(seen(self.committed[:-1]))
        while len(links) < limit:
            tree = path_tree([self.committed[-1], *path, *tokens_of(links)])
            found = small.draft(asked(self.committed, tree, [len(tree) - 1], 1, limit - len(links)))
            if not len(found):
                break
            links += zip(found.token.tolist(), found.log_prob.tolist(), strict=True)
        return links

    def chain(self, path: list[int]) -> list[Link]:
        """The whole chain below `path`, the tokens below the root."""
        links: list[Link] = []
        self.num_rows = self.num_forwards = 0
        while len(links) < self.middle_tokens:
            guess = tokens_of(self.guess(path + tokens_of(links), self.middle_tokens - len(links) - 1))
            text = self.committed + path + tokens_of(links)
            read = {tuple((text + guess)[:size]) for size in range(1, len(text + guess) + 1)}
            prompt_comes_first = not self.read  # by itself, and not counted
            new = {each for each in read - self.read if not prompt_comes_first or len(each) >= len(self.committed)}
            self.read |= read
            self.num_rows, self.num_forwards = self.num_rows + len(new), self.num_forwards + 1
            for guessed in [*guess, None]:
                log_probs = last_logits(self.model, text).log_softmax(-1)
                best = int(log_probs.argmax())
                links.append((best, float(log_probs[best])))
                text.append(best)
                self.agreed += best == guessed
                self.refused += guessed not in (best, None)
                if best != guessed:
                    break
        return links + self.guess(path + tokens_of(links), self.small_tokens)

    def accept(self, tokens: list[int]) -> None:
        """The target accepts all of these but the last, which is its own."""
        self.committed = self.committed + tokens
        self.read &= {tuple(self.committed[:size]) for size in range(1, len(self.committed))}


def repetitive(rng: np.random.Generator, model, num_tokens: int) -> list[int]:
    """Text of which the middle would say some parts itself, and which repeats itself."""
    text = rng.integers(0, VOCAB_SIZE, 3).tolist()
    while len(text) < num_tokens:
        text += generated(model, text, 6)
        begin = int(rng.integers(len(text) - 4))
        text += text[begin : begin + 4]
    return text[:num_tokens]


# -- what it proposes -------------------------------------------------------------------------------------------------


OPTIONS = [
    SIZES,
    {"middle_tokens": 1, "small_tokens": 3, "max_n": 1},
    {"middle_tokens": 6, "small_tokens": 0, "mode": "copy"},
    {"middle_tokens": 7, "small_tokens": 8, "fallback": False},
]


@pytest.mark.parametrize(
    ("family", "options"), [*(("llama", options) for options in OPTIONS), ("qwen2_window", SIZES), ("gpt2", SIZES)]
)
def test_tokens_scores_and_forwards_are_those_of_plain_loops(family, options):
    """Round after round, whatever was accepted of the chain, at the root and below it."""
    rng = np.random.default_rng(1)
    model, forwarded = FAMILIES[family](), []
    reference = Reference(FAMILIES[family](), repetitive(rng, model, 40), **options)
    drafter = started(reference.committed, model, **options)
    model.register_forward_pre_hook(lambda module, args, kwargs: forwarded.append(1), with_kwargs=True)
    num_guessed = 0
    for number in range(8):
        path = rng.integers(0, VOCAB_SIZE, number % 3).tolist()
        tree = path_tree([reference.committed[-1], *path])
        num_before = len(forwarded) + (number == 0)  # the prompt's own forward
        found = links_of(drafter.draft(asked(reference.committed, tree, [len(path)])), len(path))
        expected = reference.chain(path)
        assert tokens_of(found) == tokens_of(expected)
        np.testing.assert_allclose([score for _, score in found], [score for _, score in expected], atol=1e-9)
        assert drafter.num_rows == reference.num_rows
        assert len(forwarded) - num_before == reference.num_forwards
        num_guessed += len(found) - reference.middle_tokens
        accepted = (path + tokens_of(found))[: int(rng.integers(0, len(path) + len(found) + 1))]
        drafter.observe(seen([reference.committed[-1], *accepted]))
        reference.accept([*accepted, int(rng.integers(VOCAB_SIZE))])
    assert bool(num_guessed) == bool(reference.small_tokens)
    assert (reference.agreed > 0) == (reference.refused > 0) == (reference.middle_tokens > 1)


def test_the_middles_part_is_its_greedy_text_whatever_the_lookup_guesses():
    model = FAMILIES["llama"]()
    committed = repetitive(np.random.default_rng(0), model, 30)
    for options in OPTIONS:
        drafter = started(committed, model, **options | {"middle_tokens": 9, "small_tokens": 0})
        assert tokens_of(links_of(drafter.draft(asked(committed)))) == generated(model, committed, 9)


def test_behind_a_token_that_the_middle_does_not_know_the_lookup_goes_on_alone():
    committed = [70, 5, 6, 7, 70, 5]  # 70 lies beyond the middle's embedding
    drafter = started(committed, mode="copy", small_tokens=3)
    request = attrs.evolve(asked(committed), vocab_size=100)
    assert tokens_of(links_of(drafter.draft(request))) == [6, 7, 70]
    assert drafter.num_rows == 0


# -- the rules of drafters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", range(14))
def test_d1_to_d6_of_a_chain_too_long_the_beginning_is_drafted(limit):
    committed = repetitive(np.random.default_rng(3), FAMILIES["llama"](), 40)
    tree = path_tree([committed[-1], 9, 4])
    whole = links_of(started(committed, **SIZES).draft(asked(committed, tree, [1])), position=1)
    assert len(whole) == 12
    for limits in ({"max_nodes": limit}, {"max_depth": limit}):
        request = asked(committed, tree, [1, 0], branching=1, **limits)
        before = tree.nodes.tobytes()
        expansion = started(committed, **SIZES).draft(request)
        request.check(expansion)
        request.check_depths(expansion.depths(tree))
        room = limit if "max_nodes" in limits else max(limit - 1, 0)
        found = links_of(expansion, position=1)
        assert tokens_of(found) == tokens_of(whole)[:room]
        np.testing.assert_allclose([score for _, score in found], [score for _, score in whole][:room], atol=1e-9)
        assert tree.nodes.tobytes() == before


def test_d7_d8_d10_d13_how_the_tokens_came_in_makes_no_difference():
    model = FAMILIES["llama"]()
    committed = repetitive(np.random.default_rng(5), model, 40)
    expected = tokens_of(links_of(started(committed, model).draft(asked(committed))))
    piecewise = started(committed[:11], model)
    piecewise.draft(asked(committed[:11]))  # something to forget, or to keep
    piecewise.observe(seen(committed[10:30]))
    piecewise.observe(seen(committed[30:-1]))
    again = started(repetitive(np.random.default_rng(6), model, 25), model)
    again.stop()
    again.start(seen(committed[:-1]))
    for drafter in (piecewise, again):
        checkpoint = drafter.checkpoint()
        first = drafter.draft(asked(committed))
        num_rows = drafter.num_rows
        drafter.restore(checkpoint)
        second = drafter.draft(asked(committed))
        assert tokens_of(links_of(first)) == tokens_of(links_of(second)) == expected
        assert np.array_equal(first.log_prob, second.log_prob) and drafter.num_rows == num_rows > 0


def test_what_the_next_round_must_take_in_is_what_the_middle_has_not_read():
    """Of a chain all accepted, that is its own last token, which nobody had to read, and the lookup's."""
    committed = repetitive(np.random.default_rng(7), FAMILIES["llama"](), 40)
    drafter = started(committed, **SIZES)
    chain = tokens_of(links_of(drafter.draft(asked(committed))))
    assert len(chain) == 12
    longer = [*committed, *chain, 3]
    assert drafter.num_missed(np.array(longer)) == 1 + 8
    drafter.observe(seen([committed[-1], *chain]))
    drafter.draft(asked(longer))
    fresh = started(longer, **SIZES)
    fresh.draft(asked(longer))
    assert drafter.num_rows == fresh.num_rows + 1 + 8


def test_d9_d11_without_positions_or_with_one_token_of_prompt():
    drafter = CascadeDrafter(FAMILIES["llama"]())
    drafter.start(seen([]))
    assert len(drafter.draft(asked([3], positions=()))) == 0 and drafter.num_rows == 0
    assert tokens_of(links_of(drafter.draft(asked([3])))) == generated(FAMILIES["llama"](), [3], 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"middle_tokens": 0}, "middle_tokens: got 0; allowed: an int >= 1."),
        ({"small_tokens": -1}, "small_tokens: got -1; allowed: an int >= 0."),
        ({"max_n": 0}, "max_n: got 0; allowed: an int >= 1."),
        ({"mode": "both"}, "mode: got 'both'; allowed: one of mix, copy, top_tokens."),
        ({"fallback": 1}, "fallback: got 1; allowed: true or false."),
        ({"self_check": 1}, "self_check: got 1; allowed: true or false."),
        ({"vocabulary": "other"}, "'vocabulary' must be in"),
    ],
)
def test_what_is_not_allowed_is_refused_before_a_model_is_loaded(options, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        CascadeDrafter(None, **options)
    assert str(caught.value.args[0]).startswith(message)


# -- in pipelines -----------------------------------------------------------------------------------------------------


def load(target, middle, *overrides):
    models = {"target": target, "middle": middle}
    return treegraft.load("csd", *FIXED, *overrides, models=models, registry=packaged_registry())


def steps_of(generation):
    return [step for record in generation.rounds for step in record.state.steps if len(step.positions)]


def test_a_round_drafts_one_chain_and_accepts_from_both_parts():
    model = FAMILIES["llama"]()
    prompt = repetitive(np.random.default_rng(0), model, 60)
    pipeline = load(model, middle_of(model))
    generation = pipeline.generate(prompt, 60, keep_rounds=True)
    assert generation.token_ids == generated(model, prompt, 60)
    assert generation.source_calls["cascade"] == len(steps_of(generation)) <= generation.num_rounds
    assert all(np.array_equal(step.tree.parent, np.arange(-1, len(step.tree) - 1)) for step in steps_of(generation))
    depths = {len(record.verdict.path) for record in generation.rounds}
    assert min(depths) < 2 < max(depths)


@pytest.mark.parametrize("calibration", ["on", "off"])
def test_its_output_has_exactly_the_targets_distribution(calibration):
    """The registry's own test has a table in the place of the model: this one has a model of three tokens."""
    table = markov_table(3, 2, seed=3)
    tiny = {"vocab_size": 3, "hidden_size": 16, "num_hidden_layers": 1, "bos_token_id": None, "eos_token_id": None}
    middle = build("Llama", {**tiny, "pad_token_id": None})
    pipeline = load(MarkovTarget(table), middle, f"calibration={calibration}")
    for prompt in ([0, 1, 2, 0, 1], [2]):
        found: dict[tuple[int, ...], float] = {}
        num_accepted = 0
        for weight, generation in exact_generations(pipeline, prompt, 3, SAMPLED):
            assert not generation.faults
            output = tuple(generation.token_ids)
            found[output] = found.get(output, 0.0) + weight
            num_accepted += sum(kept * count for kept, count in generation.accepted_histogram.items())
        assert max_difference(found, exact_target(pipeline.target, prompt, 3, SAMPLED)) < 1e-9
        assert num_accepted > 0


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_at_the_middles_context_limit_it_falls_silent_and_the_text_goes_on(family):
    absent = {"num_key_value_heads": None, "intermediate_size": None} if family == "GPT2" else {}
    target = build(family, absent)
    middle = build(family, {"max_position_embeddings": 32, **absent})  # learnt positions: one beyond would raise
    prompt = repetitive(np.random.default_rng(1), target, 20)
    generation = load(target, middle).generate(prompt, 30, keep_rounds=True)
    assert generation.token_ids == generated(target, prompt, 30)
    assert (generation.faults, generation.finish_reason) == ([], "length")
    for record in generation.rounds:
        assert bool(record.state.steps) == (record.state.position < 32)
        assert record.state.position + record.state.tree.depth.max() <= max(32, record.state.position)


def test_a_middle_that_breaks_is_named_and_left_out():
    target, middle = FAMILIES["llama"](), FAMILIES["llama"]()
    with torch.no_grad():
        middle.lm_head.weight.fill_(float("nan"))
    pipeline = load(target, middle, "sources.cascade.draft.self_check=false")
    with pytest.warns(DrafterWarning, match=r"sources\.cascade.*NaN"):
        generation = pipeline.generate([5, 6, 5], 12)
    assert generation.token_ids == generated(target, [5, 6, 5], 12)
    assert [fault["source"] for fault in generation.faults] == ["cascade"]


def test_a_middle_of_another_vocabulary_is_refused():
    with pytest.raises(ModelError, match="a drafter of 48 tokens for a target of 64"):
        load(FAMILIES["llama"](), build("Llama", {"vocab_size": 48}))


def test_a_clone_shares_the_weights_and_no_state():
    model = FAMILIES["llama"]()
    pipeline = load(model, middle_of(model), "sources.cascade.draft.middle_tokens=3")
    prompt = repetitive(np.random.default_rng(2), model, 30)
    one, rounds = pipeline.clone(), pipeline.rounds(prompt, 30)
    next(rounds)
    results = [each.generate(prompt, 30) for each in (one, one.clone())]
    rounds.close()
    results.append(pipeline.generate(prompt, 30))
    assert results[0].accepted_histogram == results[1].accepted_histogram == results[2].accepted_histogram
    drafters = [each.sources[0].drafter for each in (pipeline, one)]
    assert drafters[0]._middle._engine.model is drafters[1]._middle._engine.model
    assert drafters[0].identity == drafters[1].identity and drafters[1].middle_tokens == 3


def test_identity_names_what_latency_depends_on():
    model = FAMILIES["llama"]()
    options = [{}, {"middle_tokens": 3}, {"small_tokens": 3}, {"max_n": 3}]
    assert len({CascadeDrafter(model, **each).identity for each in options}) == 4
