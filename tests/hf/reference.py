"""Random trees, and what plain forwards of whole sequences say about them."""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from treegraft.tree import DraftTree, Expansion, Ints


def random_tree(rng: np.random.Generator, root: int, num_nodes: int, vocab_size: int) -> DraftTree:
    """A tree of up to `num_nodes` nodes (twins merge); nodes grow below any earlier one, siblings in any order."""
    tree = DraftTree.rooted(root)
    for _ in range(num_nodes - 1):
        child = (int(rng.integers(vocab_size)), float(-rng.random()))
        tree = tree.append(Expansion.from_rows({int(rng.integers(len(tree))): [child]}), 0, [True])
    return tree


def random_chain(rng: np.random.Generator, root: int, num_nodes: int, vocab_size: int) -> DraftTree:
    """A tree of one branch."""
    tree = DraftTree.rooted(root)
    for row in range(num_nodes - 1):
        tree = tree.append(Expansion.from_rows({row: [(int(rng.integers(vocab_size)), -0.5)]}), 0, [True])
    return tree


def plain_logits(model: PreTrainedModel, committed: Ints, tree: DraftTree) -> torch.Tensor:
    """[N, V]: for every node the logits after `committed` and its path, by a forward of that whole sequence alone."""
    rows = [np.concatenate([committed, tree.token[tree.path(row)]]) for row in range(len(tree))]
    return torch.stack([last_logits(model, row) for row in rows])


@torch.inference_mode()
def last_logits(model: PreTrainedModel, tokens: Ints) -> torch.Tensor:
    """[V]: the logits after `tokens`, without a cache."""
    return model(input_ids=torch.tensor(tokens)[None], use_cache=False).logits[0, -1]


def leaf_path(tree: DraftTree, rng: np.random.Generator) -> Ints:
    """Rows below the root, down to a random one of the last leaves: seldom the first branch."""
    return np.array(tree.path(int(rng.choice(np.flatnonzero(tree.leaves())[-3:])))[1:], np.int64)


def generated(model: PreTrainedModel, prompt: list[int], max_new_tokens: int, **options: Any) -> list[int]:
    """The new tokens of transformers' own greedy generation."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, **options
    )
    return output[0, len(prompt) :].tolist()
