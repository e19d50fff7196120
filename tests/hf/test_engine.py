"""The engine equals plain forwards, however the tree grows and whatever path is committed."""

import numpy as np
import pytest
import torch
from hf.families import FAMILIES, MAX_LENGTH, VOCAB_SIZE, WINDOW, build
from hf.reference import last_logits, leaf_path, plain_logits, random_chain, random_tree

from treegraft.interfaces import Wants
from treegraft.mask import ancestor_mask
from treegraft_plugins.hf.cache import SlotLayer
from treegraft_plugins.hf.engine import TreeEngine

KINDS = ("llama", "mistral_window", "gemma3")  # one tensor; one with a window; a dict by layer type


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return FAMILIES[request.param]()


def tokens_of(rng, num_tokens):
    return rng.integers(0, VOCAB_SIZE, num_tokens)


def grow(engine, tree, cuts):
    """Forward the tree's rows in several calls, cut at `cuts`; all logits [N, V]."""
    seen, where = ancestor_mask(tree), tree.depth + engine.num_committed
    parts = []
    for start, end in zip((0, *cuts), (*cuts, len(tree)), strict=True):
        logits, hidden = engine.forward(tree.token[start:end], where[start:end], seen[start:end, :end])
        assert hidden is None
        parts.append(logits)
    return torch.cat(parts)


def close(found, expected, limit=1e-11):
    return (found - expected).abs().max() < limit


@pytest.mark.parametrize("num_prompt", [0, 1, 5, 250])
def test_trees_grown_over_several_forwards_and_rounds_equal_plain_forwards(model, num_prompt):
    rng = np.random.default_rng(num_prompt)
    engine, committed = TreeEngine(model), tokens_of(rng, num_prompt)
    engine.prefill(committed, Wants())
    for _ in range(4):
        tree = random_tree(rng, int(rng.integers(VOCAB_SIZE)), 14, VOCAB_SIZE)
        assert close(grow(engine, tree, cuts=(1, 4, 9)), plain_logits(model, committed, tree))
        assert engine.num_slots == len(tree)
        rows = np.array([0, *leaf_path(tree, rng)])
        engine.commit(rows)
        committed = np.concatenate([committed, tree.token[rows]])
        assert (engine.num_committed, engine.num_slots) == (len(committed), 0)
    assert len(committed) > WINDOW  # the window was passed


def test_after_commits_every_layer_of_the_cache_equals_a_fresh_prefill(model):
    rng = np.random.default_rng(7)
    engine, fresh = TreeEngine(model), TreeEngine(model)
    committed = tokens_of(rng, 2 * WINDOW)
    engine.prefill(committed, Wants())
    for rows in ([0, 2, 3, 7], [4, 1], [0, 1, 2], [11]):  # slots need not ascend: order is the caller's
        tree = random_tree(rng, 5, 30, VOCAB_SIZE)
        chain = random_chain(rng, 5, len(rows), VOCAB_SIZE)
        engine.forward(*_scattered(chain, tree, rows, engine.num_committed))
        engine.commit(np.array(rows))
        committed = np.concatenate([committed, chain.token])
    fresh.prefill(committed, Wants())
    assert len(engine._cache.layers) == len(fresh._cache.layers) == model.config.num_hidden_layers
    for ours, theirs in zip(engine._cache.layers, fresh._cache.layers, strict=True):
        assert ours.length == theirs.length == len(committed)
        for name in ("keys", "values"):
            assert close(*(getattr(layer, name)[..., : layer.length, :] for layer in (ours, theirs)))


def _scattered(chain, other, rows, start):
    """Tokens, positions and mask of `other`'s nodes, with the nodes of `chain` written over the slots `rows`."""
    num_slots = max(len(other), max(rows) + 1)
    tokens, where = np.resize(other.token, num_slots), np.full(num_slots, start, np.int64)
    seen = np.eye(num_slots, dtype=bool)
    tokens[rows], where[rows] = chain.token, start + chain.depth
    seen[np.ix_(rows, rows)] = ancestor_mask(chain)
    return tokens, where, seen


def test_an_empty_commit_drops_the_tree(model):
    rng = np.random.default_rng(3)
    engine, committed = TreeEngine(model), tokens_of(rng, 12)
    engine.prefill(committed, Wants())
    tree = random_tree(rng, 1, 9, VOCAB_SIZE)
    first = grow(engine, tree, cuts=())
    engine.commit(np.zeros(0, np.int64))
    assert (engine.num_committed, engine.num_slots) == (12, 0)
    assert torch.equal(first, grow(engine, tree, cuts=()))


def test_a_lone_row_equals_the_same_row_among_others(model):
    """A lone row that sees everything is forwarded without a mask."""
    rng = np.random.default_rng(4)
    engine, committed = TreeEngine(model), tokens_of(rng, 5 * WINDOW)
    engine.prefill(committed, Wants())
    logits, _ = engine.forward(np.array([9]), np.array([len(committed)]), np.ones((1, 1), bool))
    assert close(logits[0], last_logits(model, [*committed, 9]))


def test_prefill_in_chunks_collects_what_is_wanted():
    """300 tokens are two chunks; windows are passed within and across them."""
    model = FAMILIES["gemma3"]()
    tokens = tokens_of(np.random.default_rng(0), 300)
    observation = TreeEngine(model).prefill(tokens, Wants(num_top=3, hidden_layers=(0, 2, 3)))
    with torch.inference_mode():
        output = model(torch.tensor(tokens)[None], output_hidden_states=True, use_cache=False)
    log_probs, ids = output.logits[0].log_softmax(-1).topk(3)
    assert np.array_equal(observation.tokens, tokens)
    assert np.array_equal(observation.top_ids, ids.numpy())
    assert np.allclose(observation.top_log_probs, log_probs.numpy(), atol=1e-5)
    assert observation.hidden.shape == (300, 3, 32)
    assert close(observation.hidden, torch.stack([output.hidden_states[i][0] for i in (0, 2, 3)], dim=1))


def test_prefill_of_nothing_observes_nothing():
    engine = TreeEngine(FAMILIES["llama"]())
    observation = engine.prefill(np.zeros(0, np.int64), Wants(num_top=3))
    assert observation.top_ids.shape == observation.top_log_probs.shape == (0, 3)
    assert engine.prefill(np.zeros(0, np.int64), Wants()).top_ids is None
    assert engine.num_committed == 0


@pytest.mark.parametrize(("wants", "most"), [(Wants(), 1), (Wants(num_top=2), 256)])
def test_the_head_never_sees_the_whole_prompt(wants, most):
    model = FAMILIES["llama"]()
    rows = []
    model.lm_head.register_forward_hook(lambda _module, inputs, _output: rows.append(inputs[0].shape[1]))
    TreeEngine(model).prefill(tokens_of(np.random.default_rng(0), 600), wants)
    assert len(rows) == 3
    assert max(rows) == most


def test_forward_returns_the_hidden_states_asked_for():
    model = FAMILIES["qwen3"]()
    engine = TreeEngine(model)
    engine.prefill(np.arange(10), Wants())
    logits, hidden = engine.forward(np.array([3]), np.array([10]), np.ones((1, 1), bool), hidden_layers=(1, 3))
    with torch.inference_mode():
        expected = model(torch.tensor([[*range(10), 3]]), output_hidden_states=True).hidden_states
        assert close(model.lm_head(hidden[:, 1]), logits)  # the last hidden states are what the head reads
    assert close(hidden[0], torch.stack([expected[1][0, -1], expected[3][0, -1]]))


def test_a_prefix_of_the_slots_is_committed_without_moving_anything(monkeypatch):
    moved = []
    monkeypatch.setattr(SlotLayer, "pick", lambda self, slots, start: moved.append((slots.tolist(), start)))
    engine = TreeEngine(FAMILIES["llama"]())
    engine.prefill(np.arange(10), Wants())
    grow(engine, random_tree(np.random.default_rng(0), 1, 8, VOCAB_SIZE), cuts=())
    engine.commit(np.array([0, 1, 2]))
    assert not moved
    grow(engine, random_tree(np.random.default_rng(0), 1, 8, VOCAB_SIZE), cuts=())
    engine.commit(np.array([0, 1, 4]))
    assert moved == [([13 + 4], 13 + 2)] * 3  # of each layer, the one slot that is not in place


def test_the_cache_grows_by_doubling_and_stays_where_it_is_otherwise():
    engine, tree = TreeEngine(FAMILIES["llama"]()), random_tree(np.random.default_rng(0), 1, 30, VOCAB_SIZE)
    engine.prefill(np.zeros(200, np.int64), Wants())
    layer = engine._cache.layers[0]
    assert layer.keys.shape[-2] == 256
    place = layer.keys.data_ptr()
    grow(engine, tree, cuts=(3,))
    assert layer.keys.data_ptr() == place
    grow(engine, tree, cuts=(3,))
    assert layer.length == 200 + 2 * len(tree) > 256 == layer.keys.shape[-2] / 2


def test_reset_forgets_everything():
    engine = TreeEngine(FAMILIES["llama"]())
    engine.prefill(np.arange(10), Wants())
    engine.reset()
    assert (engine.num_committed, engine.num_slots, engine._cache.get_seq_length()) == (0, 0, 0)


def test_max_length_is_what_the_model_has():
    assert TreeEngine(FAMILIES["gpt2"]()).max_length == MAX_LENGTH  # n_positions there
    assert TreeEngine(FAMILIES["llama"]()).max_length == MAX_LENGTH


def test_with_longrope_max_length_ends_where_frequencies_change():
    """Beyond, the longest position of a forward changes what the others compute: chunks and trees would differ."""
    half = [1.0, 1.0, 1.0, 1.0]
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": half, "long_factor": [4 * f for f in half],
        "original_max_position_embeddings": 64, "partial_rotary_factor": 1.0,
    }  # fmt: skip
    model = build("Phi3", {"rope_parameters": rope, "original_max_position_embeddings": 64})
    assert TreeEngine(model).max_length == 64
    tokens = tokens_of(np.random.default_rng(0), 65)
    short, long = (model(torch.tensor(tokens[:n])[None]).logits[0, 10] for n in (64, 65))
    assert not close(short, long, 1e-3)
