"""A causal LM of transformers as a drafter: each tree node forwarded at most once a round, kept by its path."""

from typing import Any, ClassVar

import attrs
import numpy as np
import torch
from attrs.validators import in_, optional
from numpy.typing import NDArray

from treegraft.errors import ModelError
from treegraft.interfaces import Drafter, DraftRequest, Observation, Rescoring, TargetModel, Wants
from treegraft.tree import Bools, DraftTree, Expansion, Floats, Ints
from treegraft_plugins import options
from treegraft_plugins.hf.engine import TreeEngine, latency_identity
from treegraft_plugins.hf.loading import Loadable, load_causal_lm, model_name
from treegraft_plugins.hf.probe import check_trees, refuse_unserved
from treegraft_plugins.hf.vocabulary import VOCABULARIES, SameIds, Vocabulary

_MAX_MISSED = 64  # committed tokens that may ride along with tree nodes; longer stretches are forwarded before them
_LEAST_LOG_PROB = -1e4  # (nats) stands for impossible, so that scores stay finite


@attrs.define(eq=False)
class _Round:
    """The nodes forwarded since the last commit, and what the model said after each.

    Several trees may be drafted in turn from the same root (`restore`): what one has forwarded serves the others, but
    every answer and count is as if the tree were alone.

    Attributes:
        slot_of: a node's slot in the engine, by uid.
        child_of: the same by (parent's slot, token), the root's parent being -1: how an accepted path is found again.
        logits: a row [V] for every slot.
        sees: bool [slots, slots], which slots each slot sees.
        used: bool [slots], the slots that the tree being drafted has called for; the others are a sibling tree's.
        num_rows: rows called for since the last `draft`.
    """

    slot_of: dict[int, int] = attrs.Factory(dict)
    child_of: dict[tuple[int, int], int] = attrs.Factory(dict)
    logits: list[torch.Tensor] = attrs.Factory(list)
    sees: Bools = attrs.Factory(lambda: np.zeros((0, 0), np.bool_))
    used: Bools = attrs.Factory(lambda: np.zeros(0, np.bool_))
    num_rows: int = 0
    _found: tuple[Any, Ints] | None = None  # the last answer of `slots`: rescoring and drafting ask about the same rows

    def slots(self, tree: DraftTree) -> Ints:
        """int64 [N]: the slot of every row, -1 where the tree has not called for it."""
        if self._found is None or not np.array_equal(self._found[0], tree.uid):
            slots = self.forwarded(tree.uid)
            self._found = tree.uid, np.where(np.append(self.used, False)[slots], slots, -1)
        return self._found[1]

    def forwarded(self, uids: NDArray[np.uint64]) -> Ints:
        """int64 [R]: the slots of `uids` [R], -1 for those never forwarded, be it for this tree or for a sibling."""
        get = self.slot_of.get
        return np.array([get(uid, -1) for uid in uids.tolist()], dtype=np.int64)

    def path(self, tokens: Ints) -> list[int]:
        """Slots of the longest prefix of `tokens`, which begin with the root, that the tree has called for."""
        slots, slot = [], -1
        for token in tokens.tolist():
            slot = self.child_of.get((slot, token), -1)
            if slot < 0 or not self.used[slot]:
                break
            slots.append(slot)
        return slots

    def add(self, tree: DraftTree, rows: list[int], slots: Ints, num_missed: int) -> None:
        """Take in `rows`, parents first, whose new slots stand in `slots` [N], behind `num_missed` committed tokens."""
        num_old, num_new = len(self.sees), num_missed + len(rows)
        sees = np.zeros((num_old + num_new, num_old + num_new), np.bool_)
        sees[:num_old, :num_old] = self.sees
        if num_missed:
            sees[:num_missed, :num_missed] = np.tri(num_missed, dtype=np.bool_)
        parent_slots = np.where(tree.parent[rows] < 0, -1, slots[tree.parent[rows]])
        columns = (slots[rows], parent_slots, tree.token[rows], tree.uid[rows])
        for slot, parent_slot, token, uid in zip(*(column.tolist() for column in columns), strict=True):
            # Committed tokens of this round stand right before a root.
            sees[slot] = sees[parent_slot] if parent_slot >= 0 else np.arange(len(sees)) < num_missed
            sees[slot, slot] = True
            self.slot_of[uid] = slot
            self.child_of[parent_slot, token] = slot
        self.sees = sees
        self.used = np.concatenate([self.used, np.zeros(num_new, np.bool_)])

    def use(self, slots: Ints) -> None:
        """Count what the tree calls for the first time: `slots` and all they see, missed tokens included."""
        called = self.sees[slots].any(axis=0) & ~self.used
        self.used |= called
        self.num_rows += int(called.sum())

    def restore(self, used: Bools) -> None:
        """Begin another tree, of whose slots only `used`, the first of all, were called for."""
        self.used = np.concatenate([used, np.zeros(len(self.used) - len(used), np.bool_)])
        self.num_rows, self._found = 0, None


@attrs.define(eq=False)
class HFCausalLMDrafter(Drafter):
    """Proposes the most probable next tokens of a causal LM, and scores what others proposed.

    A node's keys, values and logits are kept by its path, so between two commits it is forwarded once at most, whatever
    happens to the tree. Of an accepted path the forwarded part stays in the cache. Committed tokens that the model has
    not seen, accepted from others or after an idle stretch, go along with the next call's nodes. The prompt is
    forwarded by the first call, before its nodes; neither it nor other long stretches are counted in `num_rows`.

    Args:
        model: what to load, a loaded model, or one with its tokenizer; its weights may be shared, its cache is the
            drafter's own.
        rescore_limit: R, forward only the best R of the unprocessed candidates (and their ancestors) when rescoring;
            None forwards all.
        temperature: divides the logits; 1.0 drafts from the model's own distribution, whatever the target's sampling.
        vocabulary: "same" needs one tokenizer for both models (embeddings may be padded to two sizes) and refuses two
            that differ; "intersection" drafts over the tokens that two tokenizers share, matched by their texts.
        self_check: compare tree forwards with plain ones on this very model before the first use.

    Raises:
        ModelError: the model cannot be loaded, or cannot be served, or fails the self-check.

    Source: TreeGraft, "middle drafter"; one forward a call instead of the whole tree.
    """

    model: Loadable
    rescore_limit: int | None = attrs.field(default=None, kw_only=True, validator=optional(options.whole(1)))
    temperature: float = attrs.field(default=1.0, kw_only=True, validator=options.number(1e-3))
    vocabulary: str = attrs.field(default="same", kw_only=True, validator=in_(tuple(VOCABULARIES)))
    self_check: bool = attrs.field(default=True, kw_only=True, validator=options.switch)

    rescores: ClassVar[bool] = True

    def __attrs_post_init__(self) -> None:
        model, self._tokenizer = load_causal_lm(self.model)
        refuse_unserved(model)
        self._engine = TreeEngine(model)
        if self.self_check:
            check_trees(self._engine)
        self.max_length = self._engine.max_length
        self.model_name = model_name(self.model)
        self.identity = f"hf_causal_lm {self.rescore_limit} {latency_identity(model)}"
        self._vocabulary: Vocabulary = SameIds(self._engine.vocab_size, self._engine.vocab_size)
        self._round, self._num_observed = _Round(), 0

    # -- the request's course -----------------------------------------------------------------------------------------

    def bind(self, target: TargetModel) -> None:
        between = VOCABULARIES[self.vocabulary].between
        self._vocabulary = between(self._tokenizer, self._engine.vocab_size, target)

    def start(self, observation: Observation) -> None:
        # The prompt is forwarded by the first call: a drafter that is never called costs nothing.
        self.stop()
        self._num_observed = len(observation.tokens)

    def observe(self, observation: Observation) -> None:
        if self._engine.num_slots:
            num_missed = self._engine.num_slots - len(self._round.slot_of)
            missed = np.flatnonzero(self._round.used[:num_missed])  # all of them, or none if no call needed any
            self._engine.commit(np.concatenate([missed, np.array(self._round.path(observation.tokens), np.int64)]))
        self._round = _Round()
        self._num_observed += len(observation.tokens)

    def stop(self) -> None:
        self._engine.reset()
        self._round = _Round()

    def clone(self) -> "HFCausalLMDrafter":
        return attrs.evolve(self, model=(self._engine.model, self._tokenizer), self_check=False)

    def checkpoint(self) -> Bools:
        return self._round.used.copy()

    def restore(self, checkpoint: Bools) -> None:
        self._round.restore(checkpoint)

    def num_missed(self, committed: NDArray[np.int64]) -> int:
        called_for = len(self._round.path(committed[self._num_observed : -1]))
        if called_for:
            num_missed = len(committed) - 1 - self._num_observed - called_for
        elif self._engine.num_committed:
            num_missed = len(self._vocabulary.context(committed)) - 1 - self._engine.num_committed
        else:
            return 0
        return num_missed if num_missed <= _MAX_MISSED else (num_missed - 1) % _MAX_MISSED + 1

    # -- drafting -----------------------------------------------------------------------------------------------------

    def rescore(self, tree: DraftTree, candidates: Ints, request: DraftRequest) -> Rescoring:
        slots = self._round.slots(tree)
        wanted = candidates[(slots[candidates] < 0) & (tree.depth[candidates] < request.max_depth)]
        if self.rescore_limit is not None and len(wanted) > self.rescore_limit:
            order = np.lexsort((wanted, tree.depth[wanted], -tree.path_score[wanted]))
            wanted = wanted[order[: self.rescore_limit]]
        self._process(tree, wanted, slots, request.committed)
        self.num_rows = self._round.num_rows

        token = self._vocabulary.own(tree.token)
        # What it can judge without a forward and has not scored itself, by proposing it or in an earlier call.
        is_new = (slots[tree.parent[1:]] >= 0) & (token[1:] >= 0) & (tree.scorer[1:] != request.source)
        rows = 1 + np.flatnonzero(is_new)
        log_prob = self._edge_log_probs(slots[tree.parent[rows]], token[rows])
        return Rescoring(rows, log_prob, candidates[slots[candidates] >= 0])

    def draft(self, request: DraftRequest) -> Expansion:
        tree = request.tree
        slots = self._round.slots(tree)
        positions = request.positions[tree.depth[request.positions] < request.max_depth]
        self._process(tree, positions, slots, request.committed)
        self.num_rows, self._round.num_rows = self._round.num_rows, 0

        positions = positions[slots[positions] >= 0]
        num_children = min(request.branching, request.max_nodes)
        if not len(positions) or num_children < 1:
            return Expansion.empty()
        token, log_prob = self._best_children(slots[positions], num_children, request.vocab_size)
        anchor = np.repeat(positions, len(token) // len(positions))
        if len(anchor) > request.max_nodes:
            best = np.argsort(-(tree.path_score[anchor] + log_prob), kind="stable")[: request.max_nodes]
            best.sort()
            anchor, token, log_prob = anchor[best], token[best], log_prob[best]
        return Expansion(anchor, token, log_prob)

    # -- forwarding ---------------------------------------------------------------------------------------------------

    def _process(self, tree: DraftTree, wanted: Ints, slots: Ints, committed: NDArray[np.int64]) -> None:
        """Call for `wanted` rows and ancestors, as far as the tree has not; `slots` [N] is completed in place.

        Those that no sibling tree has called for are forwarded.
        """
        if (slots[wanted] >= 0).all():
            return
        context, token = self._vocabulary.context(committed), self._vocabulary.own(tree.token)
        token[0] = context[-1]  # of a root that the drafter reads as several tokens, the others are context
        rows = self._unprocessed(tree, wanted, slots, context, token)
        if not rows:
            return
        slots[rows] = self._round.forwarded(tree.uid[rows])
        new = [row for row in rows if slots[row] < 0]
        if new:
            self._forward(tree, new, slots, context, token)
        self._round.use(slots[rows])

    def _forward(self, tree: DraftTree, rows: list[int], slots: Ints, context: Ints, token: Ints) -> None:
        """Forward `rows`, parents first, behind the committed tokens that the model has not seen."""
        missed = self._missed(context)
        root_position = len(context) - 1
        first = self._engine.num_slots + len(missed)
        slots[rows] = np.arange(first, first + len(rows))
        self._round.add(tree, rows, slots, len(missed))
        logits, _ = self._engine.forward(
            np.concatenate([missed, token[rows]]),
            root_position + np.concatenate([np.arange(-len(missed), 0), tree.depth[rows]]),
            self._round.sees[self._engine.num_slots :],
        )
        self._round.logits.extend(logits)

    def _unprocessed(self, tree: DraftTree, wanted: Ints, slots: Ints, context: Ints, token: Ints) -> list[int]:
        """The rows to call for, ascending: unprocessed ones among `wanted` and their ancestors.

        `context` and `token` [N] are the committed and the tree's tokens in the drafter's ids. What the model cannot
        take, be it for its vocabulary or its length, is left out with all below it.
        """
        if (context[self._engine.num_committed :] >= self._engine.vocab_size).any():
            return []
        takes = token >= 0
        if self.max_length is not None:
            takes &= tree.depth < self.max_length - len(context) + 1
        if not takes.all():
            for row, parent in enumerate(tree.parent.tolist()):
                takes[row] &= row == 0 or takes[parent]
        parent, slot, rows = tree.parent.tolist(), slots.tolist(), set()
        for row in wanted[takes[wanted]].tolist():
            while row >= 0 and slot[row] < 0 and row not in rows:
                rows.add(row)
                row = parent[row]
        return sorted(rows)

    def _missed(self, context: Ints) -> Ints:
        """Committed tokens that the round's first forward must take along; long stretches are forwarded here."""
        engine = self._engine
        if engine.num_slots:
            return context[:0]
        missed = context[engine.num_committed : -1]
        if engine.num_committed == 0 and len(missed):
            engine.prefill(missed, Wants())
            return missed[:0]
        while len(missed) > _MAX_MISSED:
            chunk, missed = missed[:_MAX_MISSED], missed[_MAX_MISSED:]
            positions = np.arange(engine.num_committed, engine.num_committed + len(chunk))
            engine.forward(chunk, positions, np.tri(len(chunk), dtype=np.bool_))
            engine.commit(np.arange(len(chunk)))
        return missed

    # -- reading ------------------------------------------------------------------------------------------------------

    def _log_probs(self, slots: list[int]) -> torch.Tensor:
        """Log-softmax rows [len(slots), V] in float32 or better."""
        logits = torch.stack([self._round.logits[slot] for slot in slots])
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        return (logits if self.temperature == 1 else logits / self.temperature).log_softmax(-1)

    def _edge_log_probs(self, parent_slots: Ints, token: Ints) -> Floats:
        """float64 [R]: log probabilities of `token` [R], each after the node in its `parent_slots` [R]."""
        if not len(token):
            return np.zeros(0)
        used = np.zeros(self._engine.num_slots, np.bool_)
        used[parent_slots] = True
        log_probs = self._log_probs(np.flatnonzero(used).tolist())
        index = np.cumsum(used)[parent_slots] - 1
        index, token = (torch.as_tensor(column, device=log_probs.device) for column in (index, token))
        return _finite(log_probs[index, token].double().cpu().numpy())

    def _best_children(self, slots: Ints, num_children: int, vocab_size: int) -> tuple[Ints, Floats]:
        """The best children of each of `slots` [P]: the target's ids and log probabilities [P * m].

        m is `num_children`, or less where there are fewer tokens to propose.
        """
        scores = self._vocabulary.proposable(self._log_probs(slots.tolist()), vocab_size)
        log_prob, token = scores.topk(min(num_children, scores.shape[-1]))
        # One transfer: float64 holds token ids exactly.
        token, log_prob = torch.stack([token.double(), log_prob.double()]).flatten(1).cpu().numpy()
        return self._vocabulary.proposed(token.astype(np.int64)), _finite(log_prob)


def _finite(log_prob: Floats) -> Floats:
    if np.isnan(log_prob).any():
        raise ModelError(
            "hf_causal_lm", "the model's logits are NaN", None, "Check its weights; float16 may overflow: try float32."
        )
    return np.maximum(log_prob, _LEAST_LOG_PROB)
