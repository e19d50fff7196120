"""The Medusa-type drafter: what its heads read, what it loads and refuses, and the tree it draws."""

import json

import numpy as np
import pytest
import torch
from hf.families import FAMILIES, VOCAB_SIZE
from safetensors.torch import save_file

import treegraft
from treegraft.errors import ModelError
from treegraft.interfaces import DraftRequest, ModelSpec, Observation
from treegraft.tree import DraftTree
from treegraft_plugins.hf.heads.drafter import HeadsDrafter
from treegraft_plugins.hf.heads.model import ARCHITECTURE, HeadsDraftModel, heads_config
from treegraft_plugins.hf.target import HFCausalLMTarget

HIDDEN, LAYERS = 32, 3
SETTINGS = {
    "architectures": [ARCHITECTURE], "num_heads": 3, "hidden_size": HIDDEN, "num_target_layers": LAYERS,
    "vocab_size": VOCAB_SIZE,
}  # fmt: skip
TEXT = [5, 9, 11, 40, 22]


def network(seed=0, **changes):
    """Random heads in float64 with weights far from zero."""
    model = HeadsDraftModel(heads_config({**SETTINGS, **changes}, "test")).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.fixture(scope="module")
def target():
    return HFCausalLMTarget(FAMILIES["llama"](), self_check=False)


def observed(target, tokens):
    with torch.no_grad():
        states = target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return Observation(np.array(tokens), hidden=states[LAYERS][0][:, None])


def request(root, *, max_nodes=8, max_depth=10, branching=8, positions=(0,), tree=None):
    return DraftRequest(
        tree or DraftTree.rooted(root), np.array(positions, dtype=np.int64), branching, max_nodes, max_depth,
        VOCAB_SIZE, np.array([root]),
    )  # fmt: skip


def bound(target, model=None, **options):
    drafter = HeadsDrafter(model or network(), **options)
    drafter.bind(target)
    return drafter


@torch.no_grad()
def expected_marginals(target, tokens, root):
    """log_probs [L, V] by the definition: h + silu(W_k [h ; e]), through the target's head."""
    hidden = observed(target, tokens).hidden[-1, 0]
    joined = torch.cat([hidden, target.model.get_input_embeddings()(torch.tensor(root))])
    rows = [hidden + torch.nn.functional.silu(head.weight @ joined) for head in network().heads]
    return target.model.lm_head(torch.stack(rows)).log_softmax(-1).numpy()


def test_each_head_reads_the_last_hidden_state_and_the_root(target):
    drafter = bound(target, tree="chain")
    drafter.start(observed(target, TEXT))
    expansion = drafter.draft(request(60))
    expected = expected_marginals(target, TEXT, 60)
    assert expansion.token.tolist() == expected.argmax(-1).tolist()
    np.testing.assert_allclose(expansion.log_prob, expected.max(-1), atol=1e-5)
    assert expansion.anchor.tolist() == [0, -1, -2] and drafter.num_rows == 1


def test_start_and_observe_in_turn_say_what_start_alone_says(target):
    seen = observed(target, TEXT)
    drafter, other = bound(target), bound(target)
    other.start(seen)
    drafter.start(Observation(seen.tokens[:2], hidden=seen.hidden[:2]))
    drafter.draft(request(11))
    drafter.observe(Observation(seen.tokens[2:], hidden=seen.hidden[2:]))
    first, second = drafter.draft(request(60)), other.draft(request(60))
    assert np.array_equal(first.token, second.token) and np.array_equal(first.log_prob, second.log_prob)


def test_untrained_heads_say_what_the_target_itself_says(target):
    drafter = bound(target, HeadsDraftModel(heads_config(SETTINGS, "test")).double(), tree="chain")
    drafter.start(observed(target, TEXT))
    with torch.no_grad():
        own = target.model(torch.tensor([TEXT])).logits[0, -1].argmax().item()
    assert drafter.draft(request(60)).token.tolist() == [own] * 3


def test_it_has_nothing_to_add_elsewhere_after_one_token_or_without_room(target):
    drafter = bound(target)
    drafter.start(Observation(np.zeros(0, np.int64)))
    assert len(drafter.draft(request(60))) == 0
    drafter.start(observed(target, TEXT))
    tree = DraftTree.rooted(60).append(drafter.draft(request(60, max_nodes=3)), 0, (True,))
    for asked in (request(60, tree=tree, positions=(1, 2)), request(60, positions=()), request(60, max_depth=0)):
        assert len(drafter.draft(asked)) == 0 and drafter.num_rows == 0


def written(folder, settings=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SETTINGS, **(settings or {})}))
    save_file({name: tensor.float() for name, tensor in network().state_dict().items()}, folder / "model.safetensors")
    return ModelSpec(str(folder))


def test_a_checkpoint_loads_and_drafts_in_a_pipeline(tmp_path, target):
    drafter = HeadsDrafter(written(tmp_path / "heads"))
    pipeline = treegraft.load("medusa_heads", "costs={use: fixed}", models={"target": target, "heads": drafter})
    result = pipeline.generate(TEXT, 12)
    plain = treegraft.load("plain", models={"target": target}).generate(TEXT, 12)
    assert not result.faults and result.token_ids == plain.token_ids
    assert result.source_calls["heads"] >= result.num_rounds - 1 > 0


@pytest.mark.parametrize(
    "settings, message",
    [({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"), ({"num_heads": None}, "without num_heads")],
)
def test_a_configuration_that_is_none_of_it_is_refused(settings, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        HeadsDrafter(written(tmp_path / "heads", settings))


@pytest.mark.parametrize(
    "settings, message",
    [({"num_target_layers": 36}, "layers 36 for 3"), ({"vocab_size": 9}, "vocabulary 9 for 64")],
)
def test_a_checkpoint_made_for_another_target_is_refused_with_the_mismatch(settings, message, target):
    with pytest.raises(ModelError, match=f"made for another target.*{message}"):
        HeadsDrafter(network(**settings)).bind(target)


def test_something_else_than_a_model_is_refused():
    with pytest.raises(ModelError, match="Allowed"):
        HeadsDrafter(3)
