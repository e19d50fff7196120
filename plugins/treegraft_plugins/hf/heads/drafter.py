"""A Medusa-type drafter: a small head for each of the next places, and a tree read off what they say."""

from typing import ClassVar

import attrs
import torch
from attrs.validators import optional

from treegraft.errors import ModelError
from treegraft.interfaces import Drafter, DraftRequest, ModelSpec, Observation, TargetModel, Wants
from treegraft.tree import Expansion
from treegraft_plugins import options
from treegraft_plugins.blocktree import SHAPES, asks_for_root, drafted
from treegraft_plugins.hf.block import Marginals, check_target, hidden_of
from treegraft_plugins.hf.engine import latency_identity
from treegraft_plugins.hf.heads.model import HeadsDraftModel, heads_config
from treegraft_plugins.hf.loading import load_network, model_name


@attrs.define(eq=False)
class HeadsDrafter(Drafter):
    """Says what stands at the next places from the target's last hidden state and the root, one small head for each.

    It grows its whole tree in one `draft` at the root; below other positions, and after a one-token prompt, it has
    nothing to add.

    Args:
        model: a folder or hub id (safetensors), `demo:heads`, or a loaded HeadsDraftModel.
        tree: `best_first`, the best prefixes of the product of the heads' marginals, or `chain`, their best tokens.
        top_k: K, candidates a place; None for as many as the tree could use (32 with an edge scorer).

    Attributes:
        network: the loaded model.

    Raises:
        ModelError: the checkpoint cannot be loaded, or was made for another target.

    Source: Medusa (Cai et al. 2024); the tree is best-first, as DDTree's.
    """

    model: ModelSpec | HeadsDraftModel
    tree: str = attrs.field(default="best_first", kw_only=True, validator=options.one_of(*SHAPES))
    top_k: int | None = attrs.field(default=None, kw_only=True, validator=optional(options.whole(1)))

    takes_edge_scorer: ClassVar[bool] = True

    def __attrs_post_init__(self) -> None:
        self.network, self._where = _network(self.model)
        self.wants = Wants(hidden_layers=(self.network.config.num_target_layers,))
        self.model_name = model_name(self.model)
        self.identity = f"heads {self.tree} {self.top_k} {latency_identity(self.network)}"
        self._target: TargetModel | None = None
        self.stop()

    def bind(self, target: TargetModel) -> None:
        config = self.network.config
        check_target(
            target, self._where, num_layers=config.num_target_layers, hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
        )  # fmt: skip
        self._target = target

    def start(self, observation: Observation) -> None:
        self.stop()
        self.observe(observation)

    def observe(self, observation: Observation) -> None:
        hidden = hidden_of(observation, self._where)
        if hidden is not None:
            self._hidden, self._marginals = hidden[-1, 0], None

    def stop(self) -> None:
        self._hidden: torch.Tensor | None = None  # of the token before the root
        self._marginals: Marginals | None = None  # of the round's pass

    def clone(self) -> "HeadsDrafter":
        return attrs.evolve(self, model=self.network)

    def draft(self, request: DraftRequest) -> Expansion:
        self.num_rows = 0
        if not asks_for_root(request) or self._hidden is None:
            return Expansion.empty()
        self.num_rows = 1
        if self._marginals is None:
            self._marginals = self._pass(self._hidden, int(request.tree.token[0]))
        return drafted(
            request, self.network.config.num_heads, self._marginals.top, shape=self.tree, top_k=self.top_k,
            signals=self._marginals.signals,
        )  # fmt: skip

    @torch.inference_mode()
    def _pass(self, last: torch.Tensor, root_token: int) -> Marginals:
        if self._target is None:
            raise ModelError(self._where, "draft() before bind()", "Allowed: a drafter that has met its target.")
        root = self._target.embed(torch.tensor(root_token))
        place = {"device": self.network.device, "dtype": self.network.dtype}
        hidden = self.network(last.to(**place), root.to(**place))
        return Marginals.of(self._target.head(hidden.to(root.dtype)), hidden, self._where)


def _network(model: ModelSpec | HeadsDraftModel) -> tuple[HeadsDraftModel, str]:
    """The network, and what to call it in errors."""
    if isinstance(model, HeadsDraftModel):
        return model.eval(), "heads"
    if isinstance(model, ModelSpec):
        return load_network(model, HeadsDraftModel, heads_config), f"heads {model.path!r}"
    raise ModelError(
        "heads", f"a {type(model).__name__}", "Allowed: what a registry file names, or a loaded HeadsDraftModel."
    )
