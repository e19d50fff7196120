"""The interfaces that plugins implement, and the values they exchange. Each contract is a numbered rule.

A class here is abstract and one level deep: subclass it, implement what is abstract, and leave the rest. Everything a
plugin is given is a value (frozen, arrays read-only); everything it does is in what it returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, ClassVar, Literal

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from treegraft.errors import InvariantError
from treegraft.sampling import ProposalSampler, SamplingOptions, SamplingRules, Scores, TokenSampler
from treegraft.statistics import AcceptanceStats, CostModel
from treegraft.tree import Bools, DraftTree, Expansion, Floats, Ints

# -- values -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class ModelSpec:
    """A model as a registry file names it; plugins that take a `model` get this, or the loaded object itself.

    Attributes:
        path: `demo:target`, `demo:middle`, a folder, a hub id, `FILE.gguf` or `ORG/REPO:FILE.gguf`.
        dtype: "auto" (float32 on a CPU, the checkpoint's own on an accelerator) or a torch dtype's name.
        device: "auto" (an accelerator where there is one) or a torch device.
        device_map: transformers' `device_map`, instead of `device`.
        attn_implementation: transformers' name of the attention kernel, None for its default.
        revision: of a hub id.
        trust_remote_code: run code that ships with the checkpoint.
    """

    path: str
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    attn_implementation: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def name(self) -> str:
        """What the model is called wherever it lies: `demo:target`, or the last part of a folder's or hub id's path."""
        return self.path if self.path.startswith("demo:") else PurePath(self.path).name


@attrs.frozen
class Wants:
    """What a drafter needs from the target's forwards.

    Attributes:
        num_top: K, how many of the target's best tokens after each committed token; 0 for none.
        hidden_layers: indices into `hidden_states` (0 is the embedding's output); empty for none.
    """

    num_top: int = 0
    hidden_layers: tuple[int, ...] = ()


@attrs.frozen(eq=False)
class Observation:
    """Tokens that have passed through the target, and what it said after each.

    The root (the last committed token) is never among them: the target has not seen it yet.

    Attributes:
        tokens: int64 [T].
        top_ids: int64 [T, K] or None, the target's best tokens *after* each token, best first.
        top_log_probs: float64 [T, K] or None, their raw log probabilities (nats).
        hidden: [T, layers, h] or None, the target's hidden states of each token.
    """

    tokens: Ints
    top_ids: Ints | None = None
    top_log_probs: Floats | None = None
    hidden: torch.Tensor | None = None


@attrs.frozen(eq=False)
class DraftRequest:
    """One drafting step's question to a drafter.

    Attributes:
        tree: the draft tree so far; the root is the last committed token.
        positions: int64 [P], rows to draft below, best first.
        branching: m, most proposals that may attach to one node.
        max_nodes: most proposals in all.
        max_depth: deepest a proposal may lie (what the token limit and the context limits still allow).
        vocab_size: V; proposals lie in [0, V).
        committed: int64 [T], every committed token, the root's included.
        edge_scorer: for one-pass drafters, or None.
        source: the asking source's index in the tree's columns; -1 for none of them.
        sampler: what a drafter of sampled proposals draws with; None for all others.
    """

    tree: DraftTree
    positions: Ints
    branching: int
    max_nodes: int
    max_depth: int
    vocab_size: int
    committed: NDArray[np.int64]
    edge_scorer: "EdgeScorer | None" = None
    source: int = -1
    sampler: ProposalSampler | None = None

    def sample(self, logits: torch.Tensor) -> tuple[Ints, Floats]:
        """A token for each row of a drafter's `logits` [N, V], drawn under the request's own temperature, top-p, ...

        Whatever is drawn must be proposed (D12): the verifier goes by what each token was drawn from.

        Returns:
            tokens int64 [N], and draft_probs float64 [N, V], the distributions that they were drawn from.

        Raises:
            InvariantError: the drafter says that it makes deterministic proposals, or the logits are none.
        """
        if self.sampler is None:
            raise InvariantError(
                "DraftRequest.sample", "a drafter of deterministic proposals", "Rule: D12 sampled proposals only.",
                'Declare proposals = "sampled".',
            )  # fmt: skip
        is_sound = isinstance(logits, torch.Tensor) and logits.ndim == 2 and logits.shape[1] == self.vocab_size
        if not is_sound or not bool(torch.isfinite(logits.float().amax(-1)).all()):
            found = f"logits {list(logits.shape)}" if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
            raise InvariantError(
                "DraftRequest.sample", found,
                f"Allowed: a tensor [N, {self.vocab_size}]; in float32 no NaN or +inf, and a finite logit in each row.",
            )  # fmt: skip
        return self.sampler.draw(logits)

    def context(self, node: int) -> NDArray[np.int64]:
        """int64 [T + depth]: all tokens up to and including `node`'s."""
        return np.concatenate([self.committed, self.tree.token[self.tree.path(node)[1:]]])

    def check(self, answer: "Expansion | Rescoring") -> None:
        """Refuse an answer that could do harm, before it can reach the tree.

        Raises:
            InvariantError: naming the rule.
        """
        if isinstance(answer, Rescoring):
            rows, log_prob = answer.rows, answer.log_prob
            given = np.concatenate([rows, answer.processed]).astype(np.uint64)
            _require(len(rows) == len(log_prob), "rescored rows and log_prob of one length")
            _require(not len(given) or given.max() < len(self.tree), "rescored and processed rows in the tree")
            finite = not len(log_prob) or (log_prob.max() <= 0 and log_prob.min() > -np.inf)
            _require(finite, "D4 rescored log_prob finite and <= 0")
            return
        _require(isinstance(answer, Expansion), "draft returns an Expansion")
        token, log_prob = answer.token, answer.log_prob
        size = len(answer)
        drawn = self.sampler is None or np.array_equal(token, self.sampler.tokens)
        _require(drawn, "D12 sampled: all that request.sample drew, in that order, and nothing else")
        _require(answer.draft_probs is None, "D12 no draft_probs: request.sample keeps them")
        _require(size == len(answer.anchor) == len(log_prob), "anchor, token and log_prob of one length")
        if not size:
            return
        # What could reach the tree and do harm; `DraftTree.append` refuses anchors that lead nowhere. As unsigned
        # numbers, so that one comparison finds what is too small and what is too large.
        _require(token.astype(np.uint64).max() < self.vocab_size, "D2 tokens in [0, vocab_size)")
        # Not a number fails either comparison.
        _require(log_prob.max() <= 0 and log_prob.min() > -np.inf, "D4 log_prob finite and <= 0")
        _require(size <= self.max_nodes, "D5 at most max_nodes proposals")
        _require(answer.anchor.min() >= -size, "D1 anchors: rows of the tree, or earlier proposals")
        _require(np.bincount(answer.anchor + size).max() <= self.branching, "D5 at most `branching` proposals a node")
        if self.sampler is not None:  # others' are merged; of what was drawn, neither could go
            siblings = set(zip(answer.anchor.tolist(), token.tolist(), strict=True))
            _require(len(siblings) == size, "D3 siblings distinct")

    def check_depths(self, depths: Ints) -> None:
        """Refuse proposals at `depths` [E] where one lies too deep.

        Raises:
            InvariantError: naming the rule.
        """
        _require(not len(depths) or depths.max() <= self.max_depth, "D5 no proposal below max_depth")


def _require(holds: "bool | np.bool_", rule: str) -> None:
    if not holds:
        raise InvariantError("Drafter", "an answer that breaks a rule", f"Rule: {rule}.")


@attrs.frozen(eq=False)
class Rescoring:
    """A drafter's own scores for nodes that others proposed.

    Attributes:
        rows: int64 [R], the rows scored (the root's score is never changed).
        log_prob: float64 [R] (nats, <= 0), this drafter's log probability of each row's token given its path.
        processed: int64 [C], the candidates that this drafter can now expand without another forward of their
            ancestors: the pool that positions are chosen from.
    """

    rows: Ints
    log_prob: Floats
    processed: Ints


@attrs.frozen(eq=False)
class Verdict:
    """What a verifier decided.

    Attributes:
        path: int32 [A], the accepted rows below the root, in order.
        bonus_token: the target's own token after the path, or None where the request ended inside the path.
        stop_reason: "eos", "stop", "length", "context_limit", or None while the request goes on.
    """

    path: Ints
    bonus_token: int | None
    stop_reason: str | None = None


@attrs.frozen
class Limits:
    """A round's limits: `steps` D, `verify_nodes` B (non-root), `max_depth` of any node."""

    steps: int
    verify_nodes: int
    max_depth: int


@attrs.frozen(eq=False)
class Source:
    """A drafter, how it takes part in the tree, and under which name.

    Attributes:
        name: the key in the pipeline's `sources`.
        index: its number in the tree's `source`, `scorer` and `visited` columns.
        drafter, selector, graft_policy: its parts.
        width: W, most positions it drafts below in one step.
        branching: m, most proposals below one node.
        rank: a source of lower rank never overwrites the score of a higher one.
        rescore: whether it scores the nodes of others before it chooses positions.
        overrules: bool [sources], the scorers whose scores it may replace.
        edge_scorer: for one-pass drafters, or None.
    """

    name: str
    index: int
    drafter: "Drafter"
    selector: "PositionSelector"
    graft_policy: "GraftPolicy"
    width: int
    branching: int
    rank: int
    rescore: bool
    overrules: tuple[bool, ...]
    edge_scorer: "EdgeScorer | None" = None


@attrs.frozen
class SourceSetting:
    """A source as its pipeline's parts may know it beforehand.

    Attributes:
        model: the name of its drafter's model, "" where it has none.
        width, branching, rank: as in Source.
        edges: the registered name of its edge scorer, "" without one.
    """

    model: str
    width: int
    branching: int
    rank: int
    edges: str = ""


@attrs.frozen
class Setting:
    """A pipeline as its parts may know it before it serves a request, and before any model is loaded.

    Attributes:
        target: the name of the target's model, "" where it has none.
        vocab_size: V, or None before the target is loaded.
        sources: by name, in order.
        steps: D.
        verify_nodes: B, or None where the budget is at fault.
    """

    target: str
    vocab_size: int | None
    sources: Mapping[str, SourceSetting]
    steps: int
    verify_nodes: int | None


@attrs.frozen(eq=False)
class StepRecord:
    """One drafting step: who, on what, what came of it, and what it took.

    Attributes:
        source: name.
        tree_before, tree: before and after the step.
        positions: int64 [P], rows of `tree_before`.
        expansion: what was proposed, log probabilities calibrated.
        rescored: int64 [R], rows whose scores the drafter recomputed.
        num_rows: rows the drafter forwarded (0 for drafters without a network).
        latency_ms: the drafter's own time.
    """

    source: str
    tree_before: DraftTree
    tree: DraftTree
    positions: Ints
    expansion: Expansion
    rescored: Ints
    num_rows: int
    latency_ms: float


@attrs.frozen
class Statistics:
    """The two statistics objects of a pipeline: `costs` outlives requests, `acceptance` begins anew with each."""

    costs: CostModel
    acceptance: AcceptanceStats

    def rate(self, context: int) -> float:
        """Emitted tokens per ms that time is worth: the request's moving average, and never below plain decoding's."""
        plain_ms = float(self.costs.target_ms(1, context))
        return max(self.acceptance.emitted_per_ms, 1.0 / plain_ms if plain_ms else 0.0)


@attrs.frozen(eq=False)
class RoundState:
    """All that schedulers, budgets and scorers may know.

    Attributes:
        num_prompt_tokens: tokens in the prompt.
        position: sequence position of the root (= tokens in the target's cache).
        limits: D, B and the depth still allowed.
        sources: by name, those that have not failed in this request.
        steps: the round's steps so far.
        tree: the tree so far.
        statistics: costs and acceptance.
    """

    num_prompt_tokens: int
    position: int
    limits: Limits
    sources: Mapping[str, Source]
    steps: tuple[StepRecord, ...]
    tree: DraftTree
    statistics: Statistics

    def after(self, step: StepRecord, sources: Mapping[str, Source]) -> "RoundState":
        """The state once `step` is done, with the `sources` that are left."""
        # Several times faster than attrs.evolve, and called at every step.
        return RoundState(
            self.num_prompt_tokens,
            self.position,
            self.limits,
            sources,
            (*self.steps, step),
            step.tree,
            self.statistics,
        )


@attrs.frozen
class BudgetChoice:
    """How many nodes to verify, and what a policy that predicts expects of it.

    Attributes:
        nodes: B, non-root nodes.
        gain: draft tokens that it expects to be accepted, or None.
        cost_ms: modelled latency of the whole round (ms), or None.
    """

    nodes: int
    gain: float | None = None
    cost_ms: float | None = None


@attrs.frozen(eq=False)
class RoundRecord:
    """A finished round: the state it ended in and what followed.

    Attributes:
        state: the round's last state; `state.tree` is the tree before pruning.
        choice: non-root nodes that the policy allowed to verify, and what it expected of them.
        pruned: the tree that was verified.
        verdict: accepted path (rows of `pruned`), bonus token, stop reason.
        tokens: the tokens emitted.
        latency_ms: where the time went (ms): target, commit, schedule, build, verify, learn.
        source_ms: each source's own time (ms).
    """

    state: RoundState
    choice: BudgetChoice
    pruned: DraftTree
    verdict: Verdict
    tokens: tuple[int, ...]
    latency_ms: Mapping[str, float]
    source_ms: Mapping[str, float]

    @property
    def budget(self) -> int:
        """Non-root nodes that the policy allowed to verify."""
        return self.choice.nodes

    @property
    def total_ms(self) -> float:
        """The whole round (ms)."""
        return sum(self.latency_ms.values()) + sum(self.source_ms.values())

    @property
    def framework_ms(self) -> float:
        """The round without the target's forward, the cache's commit and the drafters' own time (ms)."""
        return self.total_ms - self.latency_ms["target"] - self.latency_ms["commit"] - sum(self.source_ms.values())


# -- interfaces -------------------------------------------------------------------------------------------------------


class TargetModel(ABC):
    """The model whose distribution the output has. Lists run over sequences; pipelines drive one.

    Rules:
        T1. `score` rows equal the logits of one-by-one forwards along each path, up to rounding.
        T2. `commit` followed by `score` equals a fresh prefill of the longer prefix.
        T3. `score` twice without a commit is equal.
    """

    vocab_size: int
    """V, the width of a row of logits."""
    device: torch.device = torch.device("cpu")
    """Where its logits live."""
    max_length: int | None = None
    """Most tokens of prompt and output together, or None without a limit."""
    num_layers: int | None = None
    """Its hidden layers, or None where drafters need not know."""
    tokenizer: Any = None
    """The model's tokenizer (transformers' protocol), or None."""
    model_name: str = ""
    """What its model is called, as `ModelSpec.name` calls it; what fitted weights are matched by."""
    path: str = ""
    """What it was loaded from, as a registry file names it, or empty."""
    identity: str = ""
    """What its latencies depend on (model, dtype, device, versions); empty keeps measurements out of the disk cache."""
    lossless_note: str | None = None
    """Why output may differ from plain decoding by rounding (half precision), or None."""

    @abstractmethod
    def prefill(self, prompts: Sequence[Ints], wants: Wants) -> list[Observation]:
        """Forget the last request, then take in all but each prompt's last token, in chunks.

        `wants` holds for the request: `score` brings the same hidden layers.
        """

    @abstractmethod
    def score(self, trees: Sequence[DraftTree]) -> list[Scores]:
        """One forward: a row of logits for every node of every tree, on top of what is committed."""

    @abstractmethod
    def commit(self, paths: Sequence[Ints]) -> None:
        """Keep the root and the accepted path (rows below the root) of the last scored trees; drop the rest."""

    def teacher_force(self, tokens: Ints, start: int) -> Iterator[Scores]:
        """Rows after tokens[start - 1] up to tokens[-2], in order, by plain forwards over the given text.

        What an output is audited against; override it where that can be done in fewer forwards.
        """
        self.prefill([tokens[:start]], Wants())
        for token in tokens[start - 1 : -1]:
            yield self.score([DraftTree.rooted(int(token))])[0]
            self.commit([np.zeros(0, dtype=np.int64)])
        self.reset()

    def reset(self) -> None:
        """Free what a request holds."""

    def clone(self) -> "TargetModel | None":
        """Another one on the same weights, with none of the state; None where it must be made anew instead."""
        return None

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings [..., h] of `ids` [...], for drafters that share them."""
        raise NotImplementedError(f"{type(self).__name__} lends no embeddings")

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of final hidden states [..., h], for drafters that share the head."""
        raise NotImplementedError(f"{type(self).__name__} lends no head")

    def sampling_rules(self, prompt: Ints, options: SamplingOptions, max_new_tokens: int) -> SamplingRules:
        """Processors, criteria and EOS of a request: the caller's options and the model's own generation settings."""
        from treegraft_plugins.hf.rules import warpers  # transformers' classes, imported where a request needs them

        rules: SamplingRules = warpers(options, self.tokenizer)
        return rules


class Drafter(ABC):
    """Proposes tokens below the nodes of a draft tree. `draft` is the only method to implement.

    The order of calls: `bind` once, then per request `start`, then per round any number of `draft` (each preceded by
    `rescore` where the source asks for it) and one `observe`, then `stop`.

    Rules:
        D1. Proposals attach to requested positions or to earlier proposals of the same expansion.
        D2. Tokens lie in [0, vocab_size).
        D3. Siblings are distinct.
        D4. log_prob is finite and <= 0.
        D5. At most `branching` proposals attach to one node, at most `max_nodes` in all, none deeper than `max_depth`.
        D6. The tree is untouched.
        D7. The same history and seed give the same expansion.
        D8. `start(a + b)` drafts what `start(a); observe(b)` drafts.
        D9. No positions, no proposals; a one-token prompt works.
        D10. `start` forgets the previous request.
        D11. Every default argument works.
        D12. Sampled proposals are what `request.sample` drew: all of it, in that order, and nothing else.
        D13. After `restore`, the calls that followed `checkpoint` give the same answers and the same `num_rows`.
    """

    proposals: ClassVar[Literal["deterministic", "sampled"]] = "deterministic"
    """Whether tokens are chosen (top-k, lookup) or drawn at random; it decides which verifiers are lossless. Drawn ones
    come from `request.sample`, all of a round in one call at the root."""
    takes_edge_scorer: ClassVar[bool] = False
    """Whether `draft` honours `request.edge_scorer`."""
    rescores: ClassVar[bool] = False
    """Whether `rescore` is implemented."""
    wants: Wants = Wants()
    """What to observe of the target."""
    max_length: int | None = None
    """Positions this drafter can process, or None without a limit."""
    model_name: str = ""
    """What its model is called, as for a target; "" without one."""
    identity: str = ""
    """What its latencies depend on, as for a target."""
    num_rows: int = 0
    """Rows forwarded in the last `rescore` + `draft`, for the cost model (0 without a network). After a `restore`, rows
    that need not be forwarded again count as if they were."""

    @abstractmethod
    def draft(self, request: DraftRequest) -> Expansion:
        """Propose children of `request.positions`, and whatever lies below them."""

    def bind(self, target: TargetModel) -> None:
        """Meet the target, once: check the vocabulary, borrow its embedding and head.

        Raises:
            ModelError: this drafter cannot draft for that target.
        """

    def start(self, observation: Observation) -> None:
        """Begin a request whose committed tokens, the root excluded, are given."""

    def observe(self, observation: Observation) -> None:
        """Take in the tokens committed by a round: the old root and the accepted path."""

    def rescore(self, tree: DraftTree, candidates: Ints, request: DraftRequest) -> Rescoring:
        """Score nodes proposed by others, `candidates` [C] and whatever lies above them.

        `request.positions` is empty; the rest of the request holds for the `draft` that follows.
        """
        raise NotImplementedError(f"{type(self).__name__} does not rescore")

    def checkpoint(self) -> Any:
        """Where this drafter stands within a round, for `restore`; None where nothing is kept between calls."""
        return None

    def restore(self, checkpoint: Any) -> None:
        """Go back to where `checkpoint` of the same round stood, to draft another tree; what is computed may stay."""

    def num_missed(self, committed: NDArray[np.int64]) -> int:
        """Rows that the next round's first call adds to its own, to take in what no call of this drafter has.

        Args:
            committed: int64 [T], the text if this round ended now: with what it accepts, and the next root.
        """
        return 0

    def stop(self) -> None:
        """End the request: free what it held."""

    def clone(self) -> "Drafter | None":
        """Another one on the same weights, with none of the state and not bound; None: it must be made anew instead."""
        return None


class PositionSelector(ABC):
    """Where may a source graft?

    Rules:
        S1. Rows are ascending, distinct and in range.
        S2. The answer is a function of the arguments.
    """

    @abstractmethod
    def candidates(self, tree: DraftTree, source: Source) -> Ints:
        """int64 [C]: the rows that `source` may draft below; core takes the best `width` of them by path score."""


class GraftPolicy(ABC):
    """How do proposals join the tree?

    Rules:
        G1. The result is a valid tree.
        G2. Every proposal is present afterwards.
        G3. With `keeps_existing`, every path of the old tree is present afterwards.
        G4. Grafting the same expansion twice changes nothing more.
    """

    keeps_existing: ClassVar[bool]
    """Whether every node of the old tree survives."""

    @abstractmethod
    def graft(self, tree: DraftTree, expansion: Expansion, source: Source) -> DraftTree:
        """The tree with the source's expansion grafted on."""


class Scheduler(ABC):
    """When is which source worth a call?

    Rules:
        C1. The answer is the name of one of the pipeline's sources, or None.
        C2. The answer is a function of the state it is given.
    """

    @abstractmethod
    def decide(self, state: RoundState) -> str | None:
        """The source that drafts next, or None to stop growing (before the first step: no drafting this round)."""

    def bind(self, setting: Setting) -> None:
        """Meet the pipeline: when it is resolved, and again once its models are loaded.

        Raises:
            ComposeError: the scheduler does not suit the pipeline, such as one that names a source which it lacks.
        """

    def note(self) -> str | None:
        """After `bind`: what `treegraft show` says about it, such as which of several ways it will take and why."""
        return None


class BudgetPolicy(ABC):
    """How many nodes are worth verifying?

    Rules:
        B1. Both answers are integers >= 0, and at most `max_verify_nodes`.
        B2. `choose` allows what `verify_nodes` allows.
        B3. With `verifies_all`, `verify_nodes` allows every node of a tree that `max_nodes` allowed.
    """

    verifies_all: ClassVar[bool] = False
    """Whether nothing that grew is left out: what sampled proposals need, since leaving some out by what was drawn
    would bias the text."""
    max_verify_nodes: int
    """B, the most non-root nodes it ever allows (the constructor argument `verify_nodes`)."""

    def bind(self, setting: Setting) -> None:
        """As a scheduler's."""

    def note(self) -> str | None:
        """As a scheduler's."""
        return None

    @abstractmethod
    def max_nodes(self, state: RoundState) -> int:
        """Before growth: non-root nodes beyond which growing cannot pay; one-pass drafters build that many."""

    @abstractmethod
    def verify_nodes(self, state: RoundState, tree: DraftTree) -> int:
        """After growth: B, non-root nodes worth verifying; the forward has B + 1 rows, 0 is plain decoding."""

    def choose(self, state: RoundState, tree: DraftTree) -> BudgetChoice:
        """`verify_nodes`, with what it was chosen for; policies that predict say what they expect."""
        return BudgetChoice(self.verify_nodes(state, tree))


class Pruner(ABC):
    """Which nodes are verified?

    Rules:
        P1. The kept set is ancestor-closed and holds the root.
        P2. At most `num_nodes` non-root nodes are kept.
        P3. Smaller budgets keep subsets of what larger ones keep.
    """

    @abstractmethod
    def prune(self, tree: DraftTree, num_nodes: int) -> Bools:
        """bool [N]: the nodes to keep."""


class EdgeScorer(ABC):
    """How well does a child token fit its parent? For one-pass drafters, whose positions do not see each other.

    The order of calls: `bind`, then `meet` once the models are loaded, then any number of `score`.

    Rules:
        E1. Scores are finite, <= 0, of shape [L, P, C].
        E2. The answer is a function of the arguments.
    """

    def bind(self, setting: Setting, source: str) -> None:
        """As a scheduler's, for the source of this name."""

    def note(self) -> str | None:
        """As a scheduler's."""
        return None

    def meet(self, target: TargetModel) -> None:
        """Meet the target, once: borrow its embeddings.

        Raises:
            ModelError: this scorer cannot score that target's tokens.
        """

    @abstractmethod
    def score(self, parents: Ints, children: Ints, log_prob: Floats) -> Floats:
        """Edge scores float64 [L, P, C] (nats) of `children` [L, C] under `parents` [L, P], for depths 1..L."""


class Verifier(ABC):
    """Which drafted tokens does the target accept?

    Rules:
        V1. If `lossless`, the emitted text has exactly the target's distribution.
        V2. The path runs from a child of the root downwards.
        V3. At least one token is emitted.
        V4. A target with all its mass on one continuation accepts the path that carries it.
    """

    lossless: ClassVar[bool]
    """Whether the output has exactly the target's distribution."""
    accepts: ClassVar[frozenset[str]]
    """The kinds of proposals (`Drafter.proposals`) for which that holds."""
    repeats_plain: ClassVar[bool] = False
    """Whether sampled text is plain decoding's with the same seed, token for token: every token comes from
    `sampler.next`."""

    @abstractmethod
    def verify(self, tree: DraftTree, scores: Scores, sampler: TokenSampler) -> Verdict:
        """Decide the round.

        `sampler.next(row)` gives the target's token after a row, once per emitted token. A verifier that draws for
        itself reads `sampler.probs(rows)`, draws from `sampler.stream`, and says what it chose by
        `sampler.emit(row, token)`.
        """


RoundObserver = Callable[[RoundRecord], None]
