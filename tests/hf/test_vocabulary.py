"""Two vocabularies in one pipeline: padding, tokenizers of equal size, and drafting over what two of them share.

Whatever the drafter thinks an id means, the text is the target's own; where it can be translated, guesses still hit.
"""

import numpy as np
import pytest
import torch
from hf.families import FAMILIES, VOCAB_SIZE, build, middle_of
from hf.reference import generated
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import treegraft
from treegraft.errors import ModelError
from treegraft.interfaces import DraftRequest, Observation
from treegraft.registry import packaged_registry
from treegraft.tree import DraftTree, Expansion
from treegraft_plugins.hf.drafter import HFCausalLMDrafter
from treegraft_plugins.hf.target import HFCausalLMTarget
from treegraft_plugins.hf.vocabulary import SharedTexts

ALWAYS = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 16}")
OVER_SHARED = "sources.middle.draft.vocabulary=intersection"
WORDS = ["<unk>", *(f"w{index}" for index in range(1, VOCAB_SIZE))]
PROMPT = [7, 41, 3, 18, 7, 41, 3, 29]
NUM_TOKENS = 12


def tokenizer_of(words):
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def run(target, middle, *overrides, name="all_middle"):
    pipeline = treegraft.load(
        name, *ALWAYS, *overrides, models={"target": target, "middle": middle}, registry=packaged_registry()
    )
    result = pipeline.generate(PROMPT, NUM_TOKENS, keep_rounds=True)
    assert result.faults == []
    accepted = sum(number * count for number, count in result.accepted_histogram.items())
    drafted = {
        int(token)
        for record in result.rounds
        for step in record.state.steps
        for token in step.expansion.token
    }  # fmt: skip
    return result.token_ids, accepted, drafted


@pytest.fixture(scope="module")
def model():
    return FAMILIES["llama"]()


@pytest.fixture(scope="module")
def expected(model):
    return generated(model, PROMPT, NUM_TOKENS)


def permuted(model, order):
    """The same model with its ids renamed: what was id `order[i]` is now i."""
    other = middle_of(model, noise=0.0)
    with torch.no_grad():
        for layer in (other.get_input_embeddings(), other.get_output_embeddings()):
            layer.weight.copy_(layer.weight[torch.as_tensor(order)])
    return other


@pytest.fixture(scope="module")
def order():
    """A renaming that leaves <unk> where it is."""
    return [0, *(1 + np.random.default_rng(3).permutation(VOCAB_SIZE - 1)).tolist()]


# -- one tokenizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [60, 72])
def test_one_tokenizer_padded_to_two_sizes_drafts_below_the_smaller_and_never_padding(model, expected, size):
    """The drafter is the target with rows cut off or added; the tokenizer ends before either."""
    tokenizer = tokenizer_of(WORDS[:58])
    drafter = build("Llama", {"vocab_size": size})
    rows = min(size, VOCAB_SIZE)
    weights = model.state_dict()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            source = weights[name]
            (parameter[:rows] if parameter.shape != source.shape else parameter).copy_(
                source[:rows] if parameter.shape != source.shape else source
            )
    tokens, accepted, drafted = run((model, tokenizer), (drafter, tokenizer))
    assert tokens == expected and accepted > 0
    assert drafted and max(drafted) < 58


@pytest.mark.parametrize("size", [60, 72])
def test_two_sizes_without_tokenizers_are_refused(model, size):
    with pytest.raises(ModelError, match=f"a drafter of {size} tokens for a target of {VOCAB_SIZE}"):
        run(model, build("Llama", {"vocab_size": size}))


def test_what_the_target_emits_is_not_limited_to_its_tokenizer(model, expected):
    """`generate` may emit ids that only pad the embedding, and so does a pipeline: the distribution is the target's."""
    tokenizer = tokenizer_of(WORDS[: min(expected[2:])])
    tokens, _, drafted = run((model, tokenizer), (middle_of(model), tokenizer))
    assert tokens == expected
    assert not drafted & set(expected[2:])


def test_equal_sizes_with_two_ids_swapped_are_refused_by_name(model):
    swapped = [*WORDS[:7], WORDS[8], WORDS[7], *WORDS[9:]]
    with pytest.raises(ModelError, match=r"(?s)token 7 is 'w8' to the drafter and 'w7' to the target.*intersection"):
        run((model, tokenizer_of(WORDS)), (middle_of(model), tokenizer_of(swapped)))


# -- two tokenizers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all_middle", "treegraft_fixed"])
def test_a_drafter_of_renamed_ids_is_as_good_as_one_of_the_same_ids(model, expected, order, name):
    same = run((model, tokenizer_of(WORDS)), (middle_of(model, noise=0.0), tokenizer_of(WORDS)), name=name)
    renamed = (permuted(model, order), tokenizer_of([WORDS[index] for index in order]))
    tokens, accepted, drafted = run((model, tokenizer_of(WORDS)), renamed, OVER_SHARED, name=name)
    assert tokens == expected == same[0]
    assert accepted == same[1] > 0
    assert drafted == same[2]


def test_only_tokens_that_both_have_are_drafted_whatever_the_target_emits(model, expected, order):
    """Two thirds of the words mean something else to the drafter, so most of what is emitted it has no token for."""
    words = [word if index % 3 == 0 else f"other{word}" for index, word in enumerate(WORDS)]
    drafter = (permuted(model, order), tokenizer_of([words[index] for index in order]))
    assert run((model, tokenizer_of(WORDS)), drafter, OVER_SHARED, name="treegraft_fixed")[0] == expected
    middles = run((model, tokenizer_of(WORDS)), drafter, OVER_SHARED)
    assert middles[0] == expected and middles[2] and all(token % 3 == 0 for token in middles[2])


def test_intersection_needs_two_tokenizers(model):
    with pytest.raises(ModelError, match="intersection without two tokenizers"):
        run(model, middle_of(model), OVER_SHARED)


class Stub:
    def __init__(self, vocab_size, tokenizer):
        self.vocab_size, self.tokenizer = vocab_size, tokenizer


def letters_and(words, letters):
    """A tokenizer that splits what it does not know into letters."""
    vocabulary = {text: index for index, text in enumerate(["<unk>", *letters, *words])}
    merges = [tuple(word) for word in words]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges)), unk_token="<unk>")


def test_a_token_that_only_the_target_has_is_read_in_pieces_and_scores_are_exact(model):
    """Target ids: letters, "ab", "cd"; the drafter has neither pair but "ef", and its letters have other ids."""
    target = Stub(12, letters_and(["ab", "cd"], "abcdef"))
    own = letters_and(["ef"], "fedcba")
    mapping = SharedTexts.between(own, VOCAB_SIZE, target)
    a, b, c, ab, cd = target.tokenizer.convert_tokens_to_ids(["a", "b", "c", "ab", "cd"])
    assert mapping.context(np.array([a, ab, c, cd])).tolist() == own.convert_tokens_to_ids([*"aabccd"])
    assert mapping.own(np.array([a, ab, c])).tolist() == [own.convert_tokens_to_ids("a"), -1, 4]
    assert mapping.context(np.array([11])).tolist() == [own.unk_token_id], "a padding id has no text"

    drafter = HFCausalLMDrafter((model, own), vocabulary="intersection")
    drafter.bind(target)
    committed = [a, ab, c]
    for root, path in ((cd, []), (a, [b]), (ab, [])):
        committed.append(root)
        tree = DraftTree.rooted(root).append(Expansion([0, 0], [b, ab], [-0.5, -0.6]), 0, [True])
        history = np.array(committed)
        ask = DraftRequest(tree, np.zeros(0, np.int64), 3, 9, 4, 12, history)
        rescored = drafter.rescore(tree, np.arange(3), ask)
        assert rescored.rows.tolist() == [1], "`ab` is no token of the drafter"
        with torch.inference_mode():
            plain = model(torch.tensor([mapping.context(history).tolist()])).logits[0, -1].log_softmax(-1).numpy()
        np.testing.assert_allclose(rescored.log_prob, plain[mapping.own(np.array([b]))], atol=1e-9)
        drafted = drafter.draft(DraftRequest(tree, np.array([0]), 3, 9, 4, 12, history))
        np.testing.assert_allclose(drafted.log_prob, plain[mapping.own(drafted.token)], atol=1e-9)
        assert len(drafted) == 3
        drafter.observe(Observation(np.array([root, *path])))
        committed += path


def test_a_clone_translates_too(model, order):
    renamed = (permuted(model, order), tokenizer_of([WORDS[index] for index in order]))
    models_ = {"target": HFCausalLMTarget((model, tokenizer_of(WORDS))), "middle": renamed}
    pipeline = treegraft.load("all_middle", *ALWAYS, OVER_SHARED, models=models_, registry=packaged_registry())
    one, other = (each.generate(PROMPT, 6) for each in (pipeline, pipeline.clone()))
    assert (one.token_ids, one.accepted_histogram) == (other.token_ids, other.accepted_histogram)
