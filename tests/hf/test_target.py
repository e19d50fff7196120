"""The target over every family: rules T1 to T3, what the self-check catches, refusals by name, models left alone."""

import copy

import numpy as np
import pytest
import torch
import transformers
from hf.families import FAMILIES, VOCAB_SIZE, WINDOW, build
from hf.reference import leaf_path, plain_logits, random_tree

from treegraft.errors import ModelError, RequestError
from treegraft.interfaces import Wants
from treegraft.tree import DraftTree
from treegraft_plugins.hf.engine import TreeEngine
from treegraft_plugins.hf.masks import MaskLayout
from treegraft_plugins.hf.probe import relative_error
from treegraft_plugins.hf.target import HFCausalLMTarget


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return HFCausalLMTarget(FAMILIES[request.param]())


def limit(target):
    """Eager attention takes its softmax in float32, whatever the model's precision."""
    return 1e-9 if target.model.config._attn_implementation == "sdpa" else 1e-6


def rounds_of(target, num_prompt, num_rounds=4):
    """Random rounds after a random prompt: what is committed, the tree, and the target's logits for it."""
    rng = np.random.default_rng(num_prompt)
    prompt = rng.integers(0, VOCAB_SIZE, num_prompt)
    target.prefill([prompt], Wants())
    committed, root = prompt[:-1], int(prompt[-1])
    for _ in range(num_rounds):
        tree = random_tree(rng, root, 12, VOCAB_SIZE)
        yield committed, tree, target.score([tree])[0].tensor
        path = leaf_path(tree, rng)
        target.commit([path])
        committed = np.concatenate([committed, tree.token[[0, *path]]])
        root = int(rng.integers(VOCAB_SIZE))


@pytest.mark.parametrize("num_prompt", [1, 2 * WINDOW])
def test_t1_rows_equal_forwards_along_each_path(target, num_prompt):
    for committed, tree, logits in rounds_of(target, num_prompt):
        assert relative_error(logits, plain_logits(target.model, committed, tree)) < limit(target)


def test_t2_score_after_commits_equals_score_after_a_fresh_prefill(target):
    fresh = HFCausalLMTarget(target.model, self_check=False)
    for committed, tree, logits in rounds_of(target, 9):
        fresh.prefill([np.append(committed, tree.token[0])], Wants())
        assert relative_error(logits, fresh.score([tree])[0].tensor) < limit(target)


def test_t3_scoring_twice_without_a_commit_is_equal(target):
    for _, tree, logits in rounds_of(target, 3, num_rounds=2):
        assert torch.equal(logits, target.score([tree])[0].tensor)


def test_a_lent_head_gives_the_forwards_logits_or_none_is_lent(target):
    prompt = np.arange(3, 12)
    target.prefill([prompt], Wants(hidden_layers=(target.model.config.num_hidden_layers,)))
    scores = target.score([random_tree(np.random.default_rng(0), 1, 6, VOCAB_SIZE)])[0]
    scales = target.model.config.model_type in {"gemma2", "cohere"}  # which cap or scale their logits afterwards
    if scales:
        with pytest.raises(NotImplementedError, match="scales or caps"):
            target.head(scores.hidden_states)
    else:
        assert relative_error(target.head(scores.hidden_states)[:, 0], scores.tensor) < limit(target)


def test_embeddings_are_lent(target):
    assert target.embed(torch.tensor([[1, 2, 3]])).shape == (1, 3, target.model.get_input_embeddings().weight.shape[1])


def test_prefill_observes_all_but_the_last_token():
    target = HFCausalLMTarget(FAMILIES["llama"]())
    (observation,) = target.prefill([np.arange(10)], Wants(num_top=4))
    assert observation.tokens.tolist() == list(range(9))
    assert observation.top_ids.shape == (9, 4)
    (observation,) = target.prefill([np.array([5])], Wants(num_top=4))
    assert len(observation.tokens) == len(observation.top_ids) == 0


def test_one_sequence_at_a_time():
    target = HFCausalLMTarget(FAMILIES["llama"]())
    with pytest.raises(RequestError, match="2 at once"):
        target.prefill([np.arange(3), np.arange(4)], Wants())


# -- the self-check ---------------------------------------------------------------------------------------------------


class SeesSiblings(TreeEngine):
    """Every node sees all nodes before it."""

    def forward(self, tokens, positions, visible, hidden_layers=()):
        return super().forward(tokens, positions, np.tri(*visible.shape, self.num_slots, dtype=bool), hidden_layers)


class CountsSlots(TreeEngine):
    """Positions are slots, as in a plain sequence."""

    def forward(self, tokens, positions, visible, hidden_layers=()):
        slots = self.num_committed + self.num_slots + np.arange(len(tokens))
        return super().forward(tokens, slots, visible, hidden_layers)


class CommitsASibling(TreeEngine):
    """The last accepted node's sibling is kept in its place."""

    def commit(self, slots):
        super().commit([*slots[:-1], slots[-1] - 1])


class CropsOnly(TreeEngine):
    """The first slots are kept, whichever were accepted."""

    def commit(self, slots):
        super().commit(np.arange(len(slots)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("faulty", [SeesSiblings, CountsSlots, CommitsASibling, CropsOnly])
def test_the_self_check_catches_planted_faults_in_every_precision(faulty, dtype, monkeypatch):
    model = FAMILIES["llama"]().to(dtype)
    HFCausalLMTarget(model)
    monkeypatch.setattr("treegraft_plugins.hf.target.TreeEngine", faulty)
    with pytest.raises(ModelError, match="LlamaForCausalLM: self-check failed"):
        HFCausalLMTarget(model)
    assert HFCausalLMTarget(model, self_check=False).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_self_check_catches_a_window_counted_in_slots(attention, monkeypatch):
    model = build("Mistral", {"sliding_window": 4, "head_dim": 8})
    model.set_attn_implementation(attention)
    HFCausalLMTarget(model)
    masks = MaskLayout.masks

    def by_slots(self, visible, positions, key_positions, dtype, device):
        num_keys, num_rows = len(key_positions), len(positions)
        return masks(self, visible, np.arange(num_keys)[-num_rows:], np.arange(num_keys), dtype, device)

    monkeypatch.setattr(MaskLayout, "masks", by_slots)
    with pytest.raises(ModelError, match="self-check failed"):
        HFCausalLMTarget(model)


def test_the_self_check_catches_a_forward_that_fails(monkeypatch):
    model = FAMILIES["llama"]()
    monkeypatch.setattr(MaskLayout, "of", classmethod(lambda cls, config: cls({"full_attention": None}, keyed=True)))
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: its forward fails under a tree mask \(AttributeError"):
        HFCausalLMTarget(model)


def test_the_self_check_costs_a_few_rows():
    model, rows = FAMILIES["llama"](), []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: rows.append(output.shape[:2].numel()))
    HFCausalLMTarget(model)
    assert len(rows) <= 5
    assert sum(rows) <= 40


def test_half_precision_says_that_rounding_may_differ():
    assert HFCausalLMTarget(FAMILIES["llama"]()).lossless_note is None
    assert HFCausalLMTarget(FAMILIES["llama"]().float()).lossless_note is None
    assert "bfloat16" in HFCausalLMTarget(FAMILIES["llama"]().bfloat16()).lossless_note


# -- refusals ---------------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def refused(model, match):
    with pytest.raises(ModelError, match=match) as caught:
        HFCausalLMTarget(model.eval())
    assert str(caught.value).startswith(type(model).__name__)


def test_recurrent_models_are_refused():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8)
    refused(transformers.MambaForCausalLM(config), "recurrent state")


def test_short_convolutions_are_refused():
    config = transformers.Lfm2Config(
        **SMALL, intermediate_size=48, num_key_value_heads=2, layer_types=["conv", "full_attention"]
    )
    refused(transformers.Lfm2ForCausalLM(config), "short convolutions")


def test_linear_attention_is_refused():
    config = transformers.Qwen3NextConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=2, head_dim=8, moe_intermediate_size=16, num_experts=4,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    refused(transformers.Qwen3NextForCausalLM(config), "linear_attention layers")


def test_chunked_attention_is_refused():
    config = transformers.Llama4TextConfig(
        **SMALL, intermediate_size=48, intermediate_size_mlp=48, num_key_value_heads=2, head_dim=8, num_local_experts=2
    )
    refused(transformers.Llama4ForCausalLM(config), "chunked_attention layers")


def test_encoder_decoders_are_refused():
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    refused(transformers.T5ForConditionalGeneration(config), "encoder-decoder")


def test_alibi_is_refused():
    config = transformers.FalconConfig(**SMALL, alibi=True, new_decoder_architecture=False)
    refused(transformers.FalconForCausalLM(config), "alibi")


def test_forwards_without_positions_are_refused():
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    refused(transformers.BloomForCausalLM(config), "no position_ids")


def test_attention_that_cannot_express_a_tree_is_refused():
    model = FAMILIES["llama"]()
    model.set_attn_implementation("flex_attention")
    refused(model, r"'flex_attention'.*\n.*set_attn_implementation\(\"sdpa\"\)")


def test_a_model_in_training_mode_is_refused_and_left_in_it():
    model = FAMILIES["llama"]().train()
    with pytest.raises(ModelError, match=r"LlamaForCausalLM.*training mode"):
        HFCausalLMTarget(model)
    assert model.training


# -- the caller's model -----------------------------------------------------------------------------------------------


def state(model):
    """All that a caller could see change: attributes, configurations, hooks, weights."""
    attributes = {
        name: {key: repr(value) for key, value in vars(module).items() if not key.startswith("__")}
        for name, module in model.named_modules()
    }
    settings = (model.config.to_dict(), model.generation_config.to_dict(), model.config._attn_implementation)
    return copy.deepcopy((attributes, settings, {name: p.clone() for name, p in model.state_dict().items()}))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_loaded_model_is_left_as_it_was(name):
    model = FAMILIES[name]()
    before = state(model)
    target = HFCausalLMTarget(model)
    assert target.model is model
    for _ in rounds_of(target, 20):
        pass
    target.score([DraftTree.rooted(3)])
    target.reset()
    after = state(model)
    assert before[:2] == after[:2]
    assert all(torch.equal(before[2][key], after[2][key]) for key in before[2])
