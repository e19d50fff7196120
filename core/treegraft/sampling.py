"""Randomness and the token sampler: everything that decides which token the target emits.

`Draws` is the only randomness. For match verification and plain decoding the noise behind the token at position p
is a pure function of (seed, p), so sampled output depends on no drafter, tree shape or schedule: it equals plain
decoding with the same seed, token for token. Verifiers that draw for themselves, and drafters that draw what they
propose, read a `Stream` each: noise that nothing else reads.
"""

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import one_hot

from treegraft.errors import RequestError
from treegraft.tree import DraftTree, Floats, Ints

Seed = int | tuple[int, int]


class Rows(Protocol):
    """Something read lazily by row."""

    def __getitem__(self, row: int, /) -> int: ...


class Draws(ABC):
    """The source of every random choice in a request."""

    @abstractmethod
    def choose(self, probs: torch.Tensor, positions: Ints) -> Rows:
        """One token a row, drawn from its probabilities; rows that are never read consume nothing.

        Args:
            probs: float64 [N, V], rows sum to one.
            positions: int64 [N], the sequence position each row's token would take.
        """

    @abstractmethod
    def draw(self, probs: Floats, key: "Key") -> int:
        """One index, drawn from `probs` float64 [V] (any sum above 0) by the noise behind `key`, which is read once."""


Key = tuple[int, int, int]
"""(round, ordinal, stream): which of the draws of which round for which purpose."""


@attrs.define(eq=False)
class Stream:
    """Draws of one round for one purpose, keyed by (seed, round, ordinal, stream).

    A verifier that draws beyond the place where it stops would meet the same noise again if it were keyed by position,
    and so would one that shared a drafter's: both bias the text.

    Args:
        draws: the randomness of the request.
        round: the position of the first token that the round emits, which no other round has.
        number: 0 is the verifier's, 1 + s that of source s.
    """

    draws: Draws
    round: int
    number: int
    _num_drawn: int = attrs.field(init=False, default=0)

    def draw(self, probs: Floats) -> int:
        """One index, drawn from `probs` float64 [V] (any sum above 0)."""
        self._num_drawn += 1
        return self.draws.draw(probs, (self.round, self._num_drawn - 1, self.number))

    def happens(self, prob: float) -> bool:
        """Whether something of probability `prob` happens; of what is certain either way nothing is drawn."""
        return prob >= 1.0 if prob in (0.0, 1.0) else bool(self.draw(np.array([1.0 - prob, prob])))


_BLOCK = 512  # tokens; near the square root of a large vocabulary, where the two races cost the same


class SeededDraws(Draws):
    """Counter-based draws by exponential races: the noise at a position is a pure function of (seed, position).

    Of things with probabilities p, each with an exponential E of its own, the one with the largest p / E is chosen with
    probability p. First the vocabulary's blocks of 512 consecutive tokens race by their mass, then the tokens of the
    winning block: a few hundred exponentials for a draw, not one for every token. Rounding of the probabilities, as
    between a one-row and a many-row forward, can change a choice only where the winner's lead is no larger than the
    rounding itself. By inverse CDF it moves the edges of all tokens that follow, thousands of them, any of which can
    be near the draw.

    Args:
        seed: an int s (read as (s, 0)), a pair (s, row) so that row r of a batch draws as a single run with
            `seed=(s, r)`, or None to draw a fresh one; each in [0, 2**64).

    Source: Maddison, Tarlow and Minka, "A* Sampling" (2014), algorithm 1 (top-down construction), with one split.
    """

    def __init__(self, seed: Seed | None = None):
        if seed is None:
            seed = secrets.randbits(63)
        pair = tuple(seed) if isinstance(seed, tuple) else (seed, 0)
        if len(pair) != 2 or not all(_is_int(part) and 0 <= part < 2**64 for part in pair):
            raise RequestError("seed", f"{seed!r}", "Allowed: an int in [0, 2**64), a pair of them, or None.")
        self.seed = seed
        self._key = np.array(pair, dtype=np.uint64)

    def exponentials(self, position: int, size: int) -> Floats:
        """float64 [size] > 0: exponentials of rate 1 behind the token at `position`, a prefix of any longer ones."""
        # The generator counts in the first word: positions stand in the next, so that no two of them meet.
        return _exponentials(self._words([0, position, 0, 0], size))

    def choose(self, probs: torch.Tensor, positions: Ints) -> Rows:
        return _RacedRows(self, probs, positions)

    def draw(self, probs: Floats, key: Key) -> int:
        round, ordinal, stream = key
        (word,) = self._words([0, round, ordinal, 1 + stream], 1)  # the last word of a position's is 0
        # By inverse CDF: nothing has to come out the same from rows that differ by rounding.
        masses = np.cumsum(probs)
        uniform = float(word >> np.uint64(11)) * 2.0**-53  # below 1
        return int(masses.searchsorted(uniform * masses[-1], side="right"))

    def _words(self, counter: list[int], size: int) -> NDArray[np.uint64]:
        return np.random.Philox(counter=counter, key=self._key).random_raw(size)

    def gap(self, probs: torch.Tensor, position: int, token: int) -> float:
        """How far `token` is from being drawn from `probs` [V] at `position` (nats).

        Its block's time in the race over the winner's, or its own within its block, in logs and whichever is more: if
        log probabilities differ from `probs` by less than half of it, `token` is not drawn. 0 for the token that is
        drawn, infinite for one of probability 0.
        """
        race = _Race(self, probs, position)
        block, place = divmod(token, _BLOCK)
        return max(_behind(race.blocks, block), _behind(race.within(block), place))


class _RacedRows:
    """Rows of a `choose` call, each of which is drawn when it is read."""

    def __init__(self, draws: SeededDraws, probs: torch.Tensor, positions: Ints):
        self._draws, self._probs, self._positions = draws, probs, positions

    def __getitem__(self, row: int, /) -> int:
        race = _Race(self._draws, self._probs[row], int(self._positions[row]))
        block = int(race.blocks.argmax())
        return block * _BLOCK + int(race.within(block).argmax())


class _Race:
    """One draw from `probs` [V]: the largest of `blocks` wins, then the largest `within` it; 0 for what has no mass."""

    def __init__(self, draws: SeededDraws, probs: torch.Tensor, position: int):
        probs = probs.detach()  # a processor may have run a model of its own, with gradients
        whole = len(probs) // _BLOCK * _BLOCK
        masses = torch.cat([probs[:whole].reshape(-1, _BLOCK).sum(-1), probs[whole:].sum()[None]])
        noise = draws.exponentials(position, _BLOCK + len(masses))
        self.blocks = masses.cpu().numpy() / noise[_BLOCK:]
        self._probs, self._noise = probs, noise[:_BLOCK]

    def within(self, block: int) -> Floats:
        """float64, one for each token of the block."""
        probs = self._probs[block * _BLOCK : (block + 1) * _BLOCK].cpu().numpy()
        raced: Floats = probs / self._noise[: len(probs)]
        return raced


def _behind(raced: Floats, index: int) -> float:
    return math.log(raced.max() / raced[index]) if raced[index] > 0 else math.inf


def _exponentials(words: NDArray[np.uint64]) -> Floats:
    """Of 64 random bits each. Finely resolved near 0, where improbable tokens win; neither 0 nor infinite."""
    uniforms = (words.astype(np.float64) + 0.5) * _PER_WORD
    exponentials: Floats = -np.log1p(-uniforms)
    return exponentials


_PER_WORD = np.nextafter(2.0**-64, 0.0)  # the largest word, which rounds to 2**64, must stay below 1


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@attrs.frozen(eq=False)
class Scores:
    """The rows of one target forward over a tree.

    Args:
        tensor: [N, V], logits in the model's dtype and on its device, one row a node.
        hidden_states: [N, layers, h] or None, the hidden states that drafters asked for.
    """

    tensor: torch.Tensor
    hidden_states: torch.Tensor | None = None

    def logits(self, row: int) -> torch.Tensor:
        """float32 [V]: the row's logits, cast as transformers' `generate` casts them; the caller's own copy."""
        return self.tensor[row].to(torch.float32, copy=True)

    def batch(self) -> torch.Tensor:
        """float32 [N, V]: every row at once."""
        return self.tensor.to(torch.float32, copy=True)

    def best(self, row: int) -> int:
        """The row's arg-max, of equals the first."""
        return int(self.tensor[row].float().cpu().numpy().argmax())  # 20 times faster than torch's for one row on a CPU

    def hidden(self, rows: Ints) -> torch.Tensor | None:
        """[T, layers, h] for `rows` [T], or None where nothing was asked for."""
        return None if self.hidden_states is None else self.hidden_states[torch.as_tensor(rows)]

    def top(self, rows: Ints, num_top: int) -> tuple[Ints, Floats]:
        """ids int64 [T, K] and log probabilities float64 [T, K] of the best K tokens after each of `rows` [T]."""
        return top_tokens(
            self.tensor.index_select(0, torch.from_numpy(np.array(rows, np.int64)).to(self.tensor.device)), num_top
        )


def top_tokens(logits: torch.Tensor, num_top: int) -> tuple[Ints, Floats]:
    """The best K tokens of each row of `logits` [T, V]: ids int64 [T, K], log probabilities float64 [T, K] (nats)."""
    log_probs, ids = logits.float().log_softmax(-1).topk(min(num_top, logits.shape[-1]), dim=-1)
    return ids.cpu().numpy(), log_probs.cpu().numpy().astype(np.float64)


@attrs.frozen
class SamplingOptions:
    """What a caller asks of a request's sampling and stopping.

    Attributes:
        temperature: 0.0 takes the arg-max; above it, logits are divided by it.
        top_p: keep the smallest set of tokens with at least this mass; 1.0 keeps all.
        top_k: keep the k best tokens; 0 keeps all.
        stop: strings that end the text once they appear in it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        checks = {
            "temperature": (
                _is_number(self.temperature) and (self.temperature == 0 or self.temperature >= 1e-6),
                "0, or a finite number >= 1e-6 (float32 logits overflow below)",
            ),
            "top_p": (_is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]"),
            "top_k": (_is_int(self.top_k) and self.top_k >= 0, "an int >= 0 (0 keeps all)"),
            "stop": (
                isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
                "a tuple of non-empty strings",
            ),
        }
        for name, (holds, allowed) in checks.items():
            if not holds:
                raise RequestError(name, f"{getattr(self, name)!r}", f"Allowed: {allowed}.")
        if self.temperature == 0 and (self.top_p != 1 or self.top_k != 0):
            raise RequestError(
                "temperature", "0 beside top_p or top_k, which only sampling reads",
                "Allowed: temperature > 0 with them, or temperature 0 alone.",
            )  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)


Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Criterion = Callable[[torch.Tensor, tuple[torch.Tensor, ...] | None], Any]


@attrs.frozen
class SamplingRules:
    """How a request turns a row of logits into a token, and when it ends.

    Attributes:
        greedy: take the arg-max of the processed row instead of drawing from it.
        processors: called in order as `processor(ids [1, T], scores [1, V])`, transformers' protocol.
        warpers: those of the processors that read the scores alone (temperature, top-p, ...).
        criteria: called as `criterion(ids [1, T], scores)` after every token; truthy ends the request ("stop").
            `scores` are those kept so far, as transformers passes them, or None.
        eos_ids: tokens that end the request ("eos").
        keep_scores: keep the processed row behind every emitted token.
        keep_logits: keep the raw row behind every emitted token.
        device: where processors and criteria get what they are given; None leaves it where the logits are.
    """

    greedy: bool = True
    processors: Sequence[Processor] = ()
    warpers: Sequence[Processor] = ()
    criteria: Sequence[Criterion] = ()
    eos_ids: frozenset[int] = frozenset()
    keep_scores: bool = False
    keep_logits: bool = False
    device: torch.device | None = None

    @property
    def stateless(self) -> bool:
        """Whether every processor reads the scores alone: rows may be processed at once, and ahead of the text."""
        return all(any(processor is warper for warper in self.warpers) for processor in self.processors)

    def process(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Run the processors over `scores` float32 [N, V]; `ids` [1, T] is the true prefix (N = 1 if not stateless)."""
        for processor in self.processors:
            scores = processor(ids, scores)
        return scores

    def probs(self, processed: torch.Tensor) -> torch.Tensor:
        """float64 [N, V]: what tokens are drawn from after `processed` [N, V]; one-hot where they are not drawn."""
        if self.greedy:
            return one_hot(processed.argmax(-1), processed.shape[-1]).double()
        return processed.double().softmax(-1)


@attrs.define(eq=False)
class ProposalSampler:
    """How a source draws what it proposes in a round: under the request's own temperature, by noise of its own.

    It keeps what it drew, and from what, so that the verifier need believe nobody else.

    Args:
        rules: the request's.
        stream: the noise.

    Attributes:
        num_drawn: E, tokens drawn so far.
    """

    rules: SamplingRules
    stream: Stream
    num_drawn: int = attrs.field(init=False, default=0)
    _drawn: list[tuple[Ints, Floats]] = attrs.field(init=False, factory=list)

    @property
    def tokens(self) -> Ints:
        """int64 [E], everything drawn so far; a copy."""
        return np.concatenate([np.zeros(0, np.int64), *(tokens for tokens, _ in self._drawn)])

    @property
    def draft_probs(self) -> Floats:
        """float64 [E, V], what it was drawn from, where something was; a copy."""
        return np.concatenate([draft_probs for _, draft_probs in self._drawn])

    def draw(self, logits: torch.Tensor) -> tuple[Ints, Floats]:
        """A token for each row of `logits` [N, V], and the distributions that they were drawn from.

        The request's warpers (temperature, top-p, ...) are applied to the drafter's logits as they are to the target's;
        in a greedy request a distribution is one-hot at its arg-max.

        Returns:
            tokens int64 [N], draft_probs float64 [N, V].
        """
        scores = logits.detach().to(self.rules.device or logits.device, torch.float32, copy=True)
        no_text = torch.zeros(len(scores), 0, dtype=torch.int64, device=scores.device)
        for warper in self.rules.warpers:
            scores = warper(no_text, scores)
        draft_probs = self.rules.probs(scores).cpu().numpy()
        tokens = np.array([self.stream.draw(probs) for probs in draft_probs], np.int64)
        self.num_drawn += len(tokens)
        self._drawn.append((tokens.copy(), draft_probs.copy()))  # what is returned is the drafter's, to write to
        return tokens, draft_probs


class TokenSampler:
    """The target's choices in one request: processors, draws and stopping, once per emitted token and in order.

    Args:
        prompt: int64 [T] token ids.
        rules: processors, criteria, EOS.
        draws: the randomness of the request.
        max_tokens: most tokens to emit.
        limit_reason: what to report when they are used up: "length" or "context_limit".
        num_unseen: tokens of the sequence that stand before `prompt` and that only the target's cache knows.

    Attributes:
        scores: with `rules.keep_scores`, float32 [1, V] an emitted token: its row after all processors.
        logits: with `rules.keep_logits`, float32 [1, V] an emitted token: its raw row.
        stream: draws for a verifier that does not leave them to `next`; those of the round that `begin` began.
    """

    stream: Stream

    def __init__(
        self,
        prompt: Iterable[int],
        rules: SamplingRules,
        draws: Draws,
        max_tokens: int,
        limit_reason: str = "length",
        num_unseen: int = 0,
    ):
        prompt = np.fromiter(prompt, dtype=np.int64)
        self.rules, self.draws, self.max_tokens, self._limit_reason = rules, draws, max_tokens, limit_reason
        self.num_unseen, self._device = num_unseen, rules.device or torch.device("cpu")
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.num_prompt = self._size = len(prompt)
        self._buffer = np.concatenate([prompt, np.zeros(256, np.int64)])
        self._committed = np.zeros(0, np.int64)
        self.stop_reason: str | None = limit_reason if max_tokens <= 0 else None
        self._scores: Scores | None = None
        self._batched: list[int] | None = None
        self._kept: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}  # by node, what is to be kept of it
        self._proposals: dict[int, ProposalSampler] = {}  # of the round whose tree is growing, by source

    @property
    def tokens(self) -> NDArray[np.int64]:
        """int64 [T], the prompt and everything emitted so far; a read-only view."""
        view = self._buffer[: self._size]
        view.setflags(write=False)
        return view

    @property
    def committed(self) -> NDArray[np.int64]:
        """A copy of `tokens`, for plugins: torch.from_numpy and the like write to read-only arrays too."""
        if len(self._committed) != self._size:
            self._committed = self.tokens.copy()
            self._committed.setflags(write=False)
        return self._committed

    @property
    def num_emitted(self) -> int:
        """Tokens emitted so far."""
        return self._size - self.num_prompt

    @property
    def emitted(self) -> list[int]:
        """The tokens emitted so far."""
        emitted: list[int] = self._buffer[self.num_prompt : self._size].tolist()
        return emitted

    def begin(self, tree: DraftTree, scores: Scores) -> None:
        """Hand over a round's target scores, before the first token of that round."""
        self._scores, self._batched, self._kept, self._proposals = scores, None, {}, {}
        self.stream = Stream(self.draws, self._position, 0)
        if scores.tensor.device.type == "cpu":
            return  # row by row, as needed
        # An accelerator is waited for here in any case, so that its forward is not timed as somebody else's work. All
        # arg-maxes come over at once; draws are made row by row, as needed: nodes x vocabulary is too much in float64.
        rules = self.rules
        if not (rules.greedy and rules.stateless) or rules.keep_scores or rules.keep_logits:
            torch.accelerator.synchronize(scores.tensor.device)
            return
        batch = scores.batch()
        self._device = batch.device
        self._batched = rules.process(self._ids(), batch).argmax(-1).tolist()

    def next(self, row: int) -> int:
        """The token that the target emits after the node `row`, given everything emitted so far.

        Called once per emitted token, in order, never after `stop_reason` is set.
        """
        scores = self._going()
        token = int(self._batched[row]) if self._batched is not None else self._choose(scores, row)
        self._append(row, token)
        return token

    def probs(self, rows: Sequence[int]) -> Floats:
        """float64 [R, V]: what the target draws the token after each of `rows` [R] from; one-hot in a greedy request.

        For verifiers that draw for themselves, from `stream`. Where a processor reads the text
        (`rules.stateless` is False), only for the node that the text emitted so far ends in, and once.
        """
        probs: Floats = self.rules.probs(self._processed(self._going(), rows)).cpu().numpy()
        return probs

    def emit(self, row: int, token: int) -> None:
        """Emit the token that a verifier chose after the node `row`, whose `probs` it has read.

        Called in order, never after `stop_reason` is set.
        """
        self._going()
        self._append(row, token)

    def proposals(self, source: int) -> ProposalSampler:
        """How the source of this index draws what it proposes in the round whose tree is growing."""
        if source not in self._proposals:
            self._proposals[source] = ProposalSampler(self.rules, Stream(self.draws, self._position, 1 + source))
        return self._proposals[source]

    @property
    def draft_probs(self) -> Floats | None:
        """float64 [E, V]: what the tokens of the growing tree were drawn from, in a copy that no plugin has, or None.

        One source a round draws, at the bare root.
        """
        return next((each.draft_probs for each in self._proposals.values() if each.num_drawn), None)

    @property
    def _position(self) -> int:
        """The sequence position of the next token."""
        return self.num_unseen + self._size

    def _ids(self) -> torch.Tensor:
        """int64 [1, T], a copy: a processor may keep it, or write to it."""
        return torch.tensor(self._buffer[: self._size], device=self._device)[None]

    def _going(self) -> Scores:
        """The round's scores."""
        if self.stop_reason is not None or self._scores is None:
            raise RuntimeError(f"TokenSampler: asked after the end ({self.stop_reason}) or before begin().")
        return self._scores

    def _choose(self, scores: Scores, node: int) -> int:
        rules = self.rules
        if rules.greedy and not (rules.processors or rules.keep_scores or rules.keep_logits):
            return scores.best(node)
        processed = self._processed(scores, [node])
        if rules.greedy:
            return int(processed[0].argmax())
        return int(self.draws.choose(rules.probs(processed), np.array([self._position]))[0])

    def _processed(self, scores: Scores, nodes: Sequence[int]) -> torch.Tensor:
        """float32 [R, V]: the rows of `nodes` [R] after all processors."""
        rules = self.rules
        rows = torch.stack([scores.logits(node) for node in nodes])
        rows = rows if rules.device is None else rows.to(rules.device)
        self._device = rows.device
        raw = rows.clone() if rules.keep_logits else None  # before a processor can write to it
        processed = rules.process(self._ids(), rows) if rules.processors else rows
        for index, node in enumerate(nodes if rules.keep_scores or rules.keep_logits else ()):
            own = slice(index, index + 1)
            self._kept[node] = None if raw is None else raw[own], processed[own] if rules.keep_scores else None
        return processed

    def _append(self, row: int, token: int) -> None:
        """Take `token` in, after the node `row`."""
        if self._size == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.zeros_like(self._buffer)])
        self._buffer[self._size] = token
        self._size += 1
        raw, processed = self._kept.get(row, (None, None))
        if raw is not None:
            self.logits.append(raw.clone())  # not a view of a whole block's rows
        if processed is not None:
            self.scores.append(processed.clone())
        self.stop_reason = self._reason_after(token)

    def _reason_after(self, token: int) -> str | None:
        stopped = False
        if self.rules.criteria:
            ids, scores = self._ids(), tuple(self.scores) if self.rules.keep_scores else None
            # Each of them, even after one has said yes: some count their calls.
            stopped = sum(bool(criterion(ids, scores)) for criterion in self.rules.criteria) > 0
        if token in self.rules.eos_ids:
            return "eos"
        if stopped:
            return "stop"
        return self._limit_reason if self.num_emitted >= self.max_tokens else None
