"""A block-diffusion drafter: one pass over the target's hidden states fills the next places, and a tree is read off."""

from abc import abstractmethod
from typing import ClassVar, Literal, Self

import attrs
import numpy as np
import torch
from attrs.validators import optional

from treegraft.errors import ModelError
from treegraft.interfaces import Drafter, DraftRequest, ModelSpec, Observation, TargetModel, Wants
from treegraft.tree import Expansion
from treegraft_plugins import options
from treegraft_plugins.blocktree import SHAPES, asks_for_root, drafted, drawn_chain
from treegraft_plugins.hf.block import Marginals, check_target, hidden_of
from treegraft_plugins.hf.cache import SlotCache
from treegraft_plugins.hf.dflash.model import DFlashDraftModel, draft_config
from treegraft_plugins.hf.engine import latency_identity
from treegraft_plugins.hf.loading import load_network, model_name


@attrs.define(eq=False)
class _BlockDrafter(Drafter):
    """A network, its cache, and its one pass a round, at the root; subclasses make proposals of what that says."""

    model: ModelSpec | DFlashDraftModel

    def __attrs_post_init__(self) -> None:
        self.network, self._where = _network(self.model)
        self.wants = Wants(hidden_layers=tuple(layer + 1 for layer in self.network.target_layer_ids))
        self.max_length = self.network.config.max_position_embeddings - 1  # its blocks stand wholly below
        self.model_name = model_name(self.model)
        self.identity = f"{self._way()} {latency_identity(self.network)}"
        self._target: TargetModel | None = None
        self.stop()

    @abstractmethod
    def _way(self) -> str:
        """The kind of drafter, and the options that its latency depends on."""

    @abstractmethod
    def _proposed(self, request: DraftRequest, marginals: Marginals) -> Expansion:
        """What the pass says, as proposals below the root."""

    def bind(self, target: TargetModel) -> None:
        config = self.network.config
        check_target(
            target, self._where, num_layers=config.num_target_layers, hidden_size=config.hidden_size,
            vocab_size=config.vocab_size, tokens=[self.network.mask_token_id],
        )  # fmt: skip
        self._target = target

    def start(self, observation: Observation) -> None:
        self.stop()
        self._take(observation)

    def observe(self, observation: Observation) -> None:
        self._take(observation)

    def stop(self) -> None:
        self._cache = SlotCache()
        self._num_cached = 0  # tokens whose keys and values the cache holds
        self._features: list[torch.Tensor] = []  # hidden states of the tokens behind them
        self._marginals: Marginals | None = None  # of the round's pass

    def clone(self) -> Self:
        return attrs.evolve(self, model=self.network)

    def draft(self, request: DraftRequest) -> Expansion:
        self.num_rows = 0
        if not asks_for_root(request):
            return Expansion.empty()
        self.num_rows = self.network.block_size
        if self._marginals is None:
            self._marginals = self._pass(int(request.tree.token[0]))
        return self._proposed(request, self._marginals)

    def _take(self, observation: Observation) -> None:
        """Keep the features of committed tokens for the next pass."""
        self._marginals = None
        hidden = hidden_of(observation, self._where)
        if hidden is not None:
            self._features.append(hidden.to(self.network.device, self.network.dtype))

    @torch.inference_mode()
    def _pass(self, root_token: int) -> Marginals:
        """Fill the block behind the context; of both, the context's keys and values stay."""
        network, target = self.network, self._target
        if target is None:
            raise ModelError(self._where, "draft() before bind()", "Allowed: a drafter that has met its target.")
        size, device = network.block_size, network.device
        layers, width = len(network.target_layer_ids), network.config.hidden_size
        features = torch.cat([torch.zeros(0, layers, width, device=device, dtype=network.dtype), *self._features])
        num_context = self._num_cached + len(features)
        positions = torch.arange(self._num_cached, num_context + size, device=device)[None]
        tokens = torch.full((1, size), network.mask_token_id)
        tokens[0, 0] = root_token
        block = target.embed(tokens)
        hidden = network(
            block.to(device, network.dtype),
            positions[:, len(features) :],
            features[None],
            positions[:, : len(features)],
            cache=self._cache,
        )[0, 1:]
        self._cache.keep(num_context, np.zeros(0, np.int64))
        self._num_cached, self._features = num_context, []
        return Marginals.of(target.head(hidden.to(block.dtype)), hidden, self._where)


@attrs.define(eq=False)
class DFlashDrafter(_BlockDrafter):
    """Fills a block of masked tokens in one pass, conditioned on the target's hidden states of all committed tokens.

    It grows its whole tree in one `draft` at the root; below other positions it has nothing to add. The hidden states
    come from the target's own prefill and verification, so that only accepted tokens ever reach its cache; embedding
    and head are the target's.

    Args:
        model: a folder or hub id of the published layout (safetensors), `demo:dflash`, or a loaded DFlashDraftModel.
        tree: `best_first`, the best prefixes of the product of the block's marginals, or `chain`, its best tokens.
        top_k: K, candidates a place; None for as many as the tree could use (32 with an edge scorer).

    Attributes:
        network: the loaded model.

    Raises:
        ModelError: the checkpoint cannot be loaded, or was made for another target.

    Source: DFlash (z-lab); the tree is DDTree's.
    """

    tree: str = attrs.field(default="best_first", kw_only=True, validator=options.one_of(*SHAPES))
    top_k: int | None = attrs.field(default=None, kw_only=True, validator=optional(options.whole(1)))

    takes_edge_scorer: ClassVar[bool] = True

    def _way(self) -> str:
        return f"dflash {self.tree} {self.top_k}"

    def _proposed(self, request: DraftRequest, marginals: Marginals) -> Expansion:
        return drafted(
            request, len(marginals.log_probs), marginals.top, shape=self.tree, top_k=self.top_k,
            signals=marginals.signals,
        )  # fmt: skip


@attrs.define(eq=False)
class SampledDFlashDrafter(_BlockDrafter):
    """The same pass, drawn from: a token for each place of the block by its marginal, as a chain.

    For the verifier `block`, which needs to know what each token was drawn from. At high temperature more is accepted
    of such a chain than of the most probable one; in a greedy request the two are the same.

    Args:
        model: as of `dflash`.

    Attributes:
        network: the loaded model.

    Raises:
        ModelError: the checkpoint cannot be loaded, or was made for another target.

    Source: DFlash (z-lab).
    """

    proposals: ClassVar[Literal["deterministic", "sampled"]] = "sampled"

    def _way(self) -> str:
        return "dflash_sampled"

    def _proposed(self, request: DraftRequest, marginals: Marginals) -> Expansion:
        return drawn_chain(request, marginals.log_probs, signals=marginals.signals)


def _network(model: ModelSpec | DFlashDraftModel) -> tuple[DFlashDraftModel, str]:
    """The network, and what to call it in errors."""
    if isinstance(model, DFlashDraftModel):
        return model.eval(), "dflash"
    if isinstance(model, ModelSpec):
        return load_network(model, DFlashDraftModel, draft_config), f"dflash {model.path!r}"
    raise ModelError(
        "dflash", f"a {type(model).__name__}", "Allowed: what a registry file names, or a loaded DFlashDraftModel."
    )
