"""Text that a target decoded once, and a target that says again what it said then.

Under match verification the output does not depend on the tree. So a recording of plain decoding is all that any
pipeline needs of its target: the token at each position, and what its drafters want to know of the target there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from treegraft.errors import RequestError
from treegraft.interfaces import Observation, TargetModel, Wants
from treegraft.pipeline import Generation, Pipeline
from treegraft.sampling import SamplingOptions, SamplingRules, Scores, Seed, SeededDraws, TokenSampler
from treegraft.tree import DraftTree, Floats, Ints
from treegraft.verify import MatchVerifier

NOTHING: Ints = np.zeros(0, np.int64)
ROOT: Ints = np.zeros(1, np.int64)


@attrs.frozen(eq=False)
class Recording:
    """A prompt's plain continuation.

    Attributes:
        prompt: int64 [P].
        tokens: int64 [T], what followed.
        wants: what was kept of the target's forwards.
        top_ids: int64 [P + T, K] or None, the target's best tokens after each token.
        top_log_probs: float64 [P + T, K] or None, their raw log probabilities (nats).
        hidden: [P + T, layers, h] or None, its hidden states of each.
        finish_reason: "eos", "length", "context_limit" or "stop".
        max_new_tokens: as asked for.
        options: as asked for.
        seed: of what was sampled.
    """

    prompt: Ints
    tokens: Ints
    wants: Wants
    top_ids: Ints | None
    top_log_probs: Floats | None
    hidden: torch.Tensor | None
    finish_reason: str
    max_new_tokens: int
    options: SamplingOptions
    seed: Seed

    @property
    def text(self) -> Ints:
        """int64 [P + T]: prompt and continuation."""
        return np.concatenate([self.prompt, self.tokens])

    def observed(self, where: Any, wants: Wants) -> Observation:
        """What a drafter with these `wants` sees of the target at the positions `where` (a slice or int [N])."""
        layers = [self.wants.hidden_layers.index(layer) for layer in wants.hidden_layers]
        return Observation(
            tokens=self.text[where],
            top_ids=self.top_ids[where, : wants.num_top] if wants.num_top and self.top_ids is not None else None,
            top_log_probs=(
                self.top_log_probs[where, : wants.num_top] if wants.num_top and self.top_log_probs is not None else None
            ),
            hidden=self.hidden[where][:, layers] if layers and self.hidden is not None else None,
        )


def record(
    target: TargetModel,
    prompt: Sequence[int] | Ints,
    max_new_tokens: int = 256,
    options: SamplingOptions | None = None,
    seed: Seed | None = None,
    wants: Wants | None = None,
    on_token: Callable[[], None] | None = None,
) -> Recording:
    """Decode plainly, one forward a token, and keep what pipelines will want to know.

    Args:
        target: the model; it must not be serving a request.
        prompt: int64 [P] token ids.
        max_new_tokens: most tokens to emit; the target's context may hold fewer.
        options: sampling and stopping; greedy by default.
        seed: of sampling; None draws a fresh one and reports it.
        wants: what to keep; `wants_of` the pipelines that are to be replayed.
        on_token: called after every token.

    Raises:
        RequestError: a prompt or an option that cannot be honoured.
    """
    options, wants = options or SamplingOptions(), wants or Wants()
    prompt = np.array(prompt, np.int64)
    room = max_new_tokens if target.max_length is None else target.max_length - len(prompt)
    if not len(prompt) or room < 0:
        raise RequestError(
            "prompt", f"{len(prompt)} tokens", f"Allowed: 1 to {target.max_length or 'any number'}."
        )  # fmt: skip
    draws = SeededDraws(seed)
    sampler = TokenSampler(
        prompt, target.sampling_rules(prompt, options, max_new_tokens), draws, min(room, max_new_tokens),
        "context_limit" if room < max_new_tokens else "length",
    )  # fmt: skip
    try:
        observations = target.prefill([prompt], wants)
        is_over = False
        while not is_over:  # the last token, too, is forwarded: a tree may hold it where nothing follows
            is_over = sampler.stop_reason is not None
            tree = DraftTree.rooted(int(sampler.tokens[-1]))
            (scores,) = target.score([tree])
            top_ids, top_log_probs = scores.top(ROOT, wants.num_top) if wants.num_top else (None, None)
            observations.append(Observation(tree.token, top_ids, top_log_probs, scores.hidden(ROOT)))
            if not is_over:
                sampler.begin(tree, scores)
                sampler.next(0)
                target.commit([NOTHING])
                if on_token is not None:
                    on_token()
    finally:
        target.reset()
    assert sampler.stop_reason is not None
    return Recording(
        prompt=prompt,
        tokens=np.array(sampler.emitted, np.int64),
        wants=wants,
        top_ids=_joined([seen.top_ids for seen in observations]),
        top_log_probs=_joined([seen.top_log_probs for seen in observations]),
        hidden=torch.cat([seen.hidden for seen in observations if seen.hidden is not None])
        if wants.hidden_layers
        else None,
        finish_reason=sampler.stop_reason,
        max_new_tokens=max_new_tokens,
        options=options,
        seed=draws.seed,
    )


def _joined(parts: Sequence[Any]) -> Any:
    kept = [part for part in parts if part is not None]
    return np.concatenate(kept) if kept else None


def wants_of(pipelines: Sequence[Pipeline]) -> Wants:
    """What a recording must keep for all of these pipelines."""
    wants = [pipeline.parts.wants for pipeline in pipelines]
    return Wants(
        num_top=max((each.num_top for each in wants), default=0),
        hidden_layers=tuple(sorted({layer for each in wants for layer in each.hidden_layers})),
    )


class ReplayTarget(TargetModel):
    """A target without forwards: it says along a recording what the recorded target said.

    Everything that is not recorded (tokenizer, embeddings, head, limits) is the recorded target's own. Give it to
    `treegraft.load` as `models={"target": ...}`, with costs that need no measuring, and run `replay`.

    Args:
        target: the target that decodes the recordings.

    Attributes:
        recording: what it serves; `replay` and `schedules` set it.
    """

    def __init__(self, target: TargetModel):
        self._target = target
        for name in TargetModel.__annotations__:
            setattr(self, name, getattr(target, name))
        self.device, self.identity = torch.device("cpu"), ""  # of what is said here, and said at no cost
        self.recording: Recording | None = None
        self._num_committed = 0
        self._wants = Wants()

    def prefill(self, prompts: Sequence[Ints], wants: Wants) -> list[Observation]:
        recording = self._served()
        (prompt,) = prompts
        if not np.array_equal(prompt, recording.prompt):
            raise RequestError("replay", "another prompt than the recorded one", "Allowed: the recorded one.")
        lacking = set(wants.hidden_layers) - set(recording.wants.hidden_layers)
        if wants.num_top > recording.wants.num_top or lacking:
            raise RequestError(
                "replay", f"a recording of {recording.wants} for drafters that ask for {wants}", None,
                "Record with wants_of(pipelines).",
            )  # fmt: skip
        self._wants, self._num_committed = wants, len(prompt) - 1
        return [recording.observed(slice(self._num_committed), wants)]

    def score(self, trees: Sequence[DraftTree]) -> list[Scores]:
        (tree,) = trees
        text, root = self._served().text, self._num_committed
        if root >= len(text) or tree.token[0] != text[root]:
            raise RequestError("replay", f"a root at position {root} that is not the recorded token", None)
        path = reference_path(tree, text[root + 1 :])
        return [
            _RecordedScores(
                torch.empty(0), recording=self._served(), wants=self._wants, vocab_size=self.vocab_size,
                position_of={row: root + depth for depth, row in enumerate([0, *path])},
            )
        ]  # fmt: skip

    def commit(self, paths: Sequence[Ints]) -> None:
        (path,) = paths
        self._num_committed += 1 + len(path)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._target.embed(ids)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._target.head(hidden)

    def sampling_rules(self, prompt: Ints, options: SamplingOptions, max_new_tokens: int) -> SamplingRules:
        recording = self._served()
        if (options, max_new_tokens) != (recording.options, recording.max_new_tokens):
            raise RequestError(
                "replay", f"{options} and {max_new_tokens} new tokens",
                f"Recorded: {recording.options} and {recording.max_new_tokens}.", "Call replay(pipeline, recording).",
            )  # fmt: skip
        end = len(recording.text)
        return SamplingRules(
            eos_ids=frozenset(recording.tokens[-1:].tolist() if recording.finish_reason == "eos" else ()),
            criteria=[lambda ids, scores: ids.shape[-1] == end] if recording.finish_reason == "stop" else [],
        )

    def _served(self) -> Recording:
        if self.recording is None:
            raise RequestError(
                "replay", "a forward of a target that only replays", "Allowed: what replay() and schedules() do.",
                "Load with costs={use: fixed} or a file's: a replay has no latencies to measure.",
            )  # fmt: skip
        return self.recording


@attrs.frozen(eq=False, kw_only=True)
class _RecordedScores(Scores):
    """A forward's rows on the recorded path: the recorded token takes all.

    Attributes:
        position_of: by row on the path, its position in the text.
    """

    recording: Recording
    wants: Wants
    vocab_size: int
    position_of: dict[int, int]

    def best(self, row: int) -> int:
        position = self.position_of.get(row)
        if position is None or position + 1 >= len(self.recording.text):
            raise RequestError(
                "replay", f"row {row} of a tree, off the recorded path", "Allowed: verifiers that read the path alone."
            )
        return int(self.recording.text[position + 1])

    def logits(self, row: int) -> torch.Tensor:
        logits = torch.zeros(self.vocab_size)
        logits[self.best(row)] = 1.0
        return logits

    def batch(self) -> torch.Tensor:
        return torch.stack([self.logits(row) for row in range(max(self.position_of) + 1)])

    def hidden(self, rows: Ints) -> torch.Tensor | None:
        return self._observed(rows, self.wants).hidden

    def top(self, rows: Ints, num_top: int) -> tuple[Ints, Floats]:
        seen = self._observed(rows, Wants(num_top))
        assert seen.top_ids is not None and seen.top_log_probs is not None
        return seen.top_ids, seen.top_log_probs

    def _observed(self, rows: Ints, wants: Wants) -> Observation:
        return self.recording.observed(np.array([self.position_of[row] for row in rows.tolist()]), wants)


def reference_path(tree: DraftTree, tokens: Sequence[int] | Ints) -> list[int]:
    """The rows below the root that follow `tokens`, as far as the tree goes."""
    path: list[int] = []
    for token in tokens:
        row = tree.child(path[-1] if path else 0, int(token))
        if row is None:
            break
        path.append(row)
    return path


def replay_target(pipeline: Pipeline) -> ReplayTarget:
    """The pipeline's ReplayTarget.

    Raises:
        RequestError: the pipeline cannot be replayed.
    """
    if not isinstance(pipeline.target, ReplayTarget):
        raise RequestError(
            f"pipelines.{pipeline.name}", f"a {type(pipeline.target).__name__} for its target", None,
            'Load it with models={"target": ReplayTarget(target)}.',
        )  # fmt: skip
    check_verifier(pipeline.name, type(pipeline.parts.verifier), f"a {type(pipeline.parts.verifier).__name__}")
    return pipeline.target


def check_verifier(pipeline: str, verifier: type[Any], shown: str) -> None:
    """Refuse a pipeline that no recording can stand for.

    Args:
        pipeline: its name.
        verifier: the class of its verifier.
        shown: what a message calls that.

    Raises:
        RequestError: its text depends on its trees.
    """
    if not issubclass(verifier, MatchVerifier):
        raise RequestError(
            f"pipelines.{pipeline}.verifier", shown,
            "Allowed: match, under which the text does not depend on the tree.",
            "Take a pipeline that verifies by it, such as dflash_chain.",
        )  # fmt: skip


def replay(pipeline: Pipeline, recording: Recording) -> Generation:
    """Run a pipeline along a recording; the Generation holds its rounds.

    Rounds are those of a live run of the same pipeline with the same costs; latencies are only this machine's own
    without the target's.

    Args:
        pipeline: loaded with a ReplayTarget.
        recording: of the same target.

    Raises:
        RequestError: the pipeline cannot be replayed, or the recording lacks what its drafters want.
    """
    replay_target(pipeline).recording = recording
    options = recording.options
    return pipeline.generate(
        recording.prompt.tolist(), recording.max_new_tokens, options.temperature, options.top_p, options.top_k,
        recording.seed, options.stop, keep_rounds=True,
    )  # fmt: skip
