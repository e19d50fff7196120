"""A transformers causal LM as the target."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TypeVar

import torch

from treegraft.errors import RequestError
from treegraft.interfaces import ModelSpec, Observation, TargetModel, Wants
from treegraft.mask import ancestor_mask, positions
from treegraft.sampling import SamplingOptions, SamplingRules, Scores
from treegraft.tree import DraftTree, Ints
from treegraft_plugins.hf import rules
from treegraft_plugins.hf.audit import teacher_force
from treegraft_plugins.hf.cache import KeysValues, Past
from treegraft_plugins.hf.engine import TreeEngine, latency_identity
from treegraft_plugins.hf.loading import Loadable, load_causal_lm, model_name
from treegraft_plugins.hf.probe import check_trees, head_is_all, refuse_unserved

T = TypeVar("T")


class HFCausalLMTarget(TargetModel):
    """A causal LM under tree masks, through its own forward; a loaded model is left as it was.

    Args:
        model: what to load, a loaded model, or one with its tokenizer.
        self_check: compare tree forwards with plain ones on this very model before the first use.

    Raises:
        ModelError: the model cannot be loaded, or cannot be served, or fails the self-check.
    """

    def __init__(self, model: Loadable, self_check: bool = True):
        self.model, self.tokenizer = load_causal_lm(model)
        self.path = model.path if isinstance(model, ModelSpec) else ""
        refuse_unserved(self.model)
        self._engine = TreeEngine(self.model)
        self._hidden_layers: tuple[int, ...] = ()
        self._past: Past | None = None
        self._chunk_size: int | None = None
        self.vocab_size, self.max_length = self._engine.vocab_size, self._engine.max_length
        self.num_layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        self.model_name = model_name(model)
        self.device, self.identity = self._engine.device, latency_identity(self.model)
        dtype = str(self.model.dtype).removeprefix("torch.")
        if torch.finfo(self.model.dtype).bits < 32:
            self.lossless_note = (
                f"the target runs in {dtype}, where near-ties round differently in a one-row and a many-row forward: "
                "output may differ from plain decoding by rounding, and not with dtype=float32"
            )
        if self_check:
            check_trees(self._engine)

    def prefill(self, prompts: Sequence[Ints], wants: Wants) -> list[Observation]:
        prompt = _only(prompts, "prompts")
        if self.model.training:
            refuse_unserved(self.model)  # since it was loaded
        self._hidden_layers = wants.hidden_layers
        past, chunk_size, self._past, self._chunk_size = self._past, self._chunk_size, None, None
        return [self._engine.prefill(prompt[:-1], wants, past, chunk_size)]

    def prepare(self, past: Past | None, chunk_size: int | None = None) -> None:
        """Tell the next `prefill` what a cache holds already, and how many tokens a forward may take."""
        self._past, self._chunk_size = past, chunk_size

    def committed(self) -> list[KeysValues]:
        """Keys and values [1, heads, T, dim] of every layer for the T committed tokens; views, as long as they last."""
        return self._engine.committed()

    def score(self, trees: Sequence[DraftTree]) -> list[Scores]:
        tree, engine = _only(trees, "trees"), self._engine
        if engine.num_slots:  # scored before and not committed
            engine.commit(())
        where = positions(tree, engine.num_committed)
        return [Scores(*engine.forward(tree.token, where, ancestor_mask(tree), self._hidden_layers))]

    def commit(self, paths: Sequence[Ints]) -> None:
        self._engine.commit([0, *_only(paths, "paths").tolist()])

    def teacher_force(self, tokens: Ints, start: int) -> Iterator[Scores]:
        return teacher_force(self.model, tokens, start)

    def reset(self) -> None:
        self._engine.reset()
        self.prepare(None)

    def clone(self) -> "HFCausalLMTarget":
        return HFCausalLMTarget((self.model, self.tokenizer), self_check=False)

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.get_input_embeddings()(ids.to(self._engine.device))

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._head_is_all:
            raise NotImplementedError(
                f"{type(self.model).__name__} lends no head: its forward scales or caps the logits after it"
            )
        head = self.model.get_output_embeddings()
        return head(hidden.to(head.weight.device))

    @cached_property
    def _head_is_all(self) -> bool:
        return head_is_all(self.model)

    def sampling_rules(self, prompt: Ints, options: SamplingOptions, max_new_tokens: int) -> SamplingRules:
        ids = torch.tensor(prompt, device=self._engine.device)[None]
        return rules.generation_rules(self.model, self.tokenizer, ids, options, max_new_tokens)


def _only(values: Sequence[T], what: str) -> T:
    if len(values) != 1:
        raise RequestError(f"hf_causal_lm {what}", f"{len(values)} at once", "Allowed: one sequence at a time.")
    return values[0]
