"""What the target says under every node of drafted trees: what edge scorers learn from, and are judged by.

A one-pass drafter asks its edge scorer about all candidates of all depths at once. So a scorer that only takes them
down is all that collecting needs of a drafter, and the target's own verification says what follows each node.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from treegraft.errors import RequestError
from treegraft.interfaces import EdgeScorer, Observation, RoundRecord, TargetModel, Wants
from treegraft.pipeline import Pipeline
from treegraft.round import decode_round
from treegraft.sampling import SamplingOptions, Scores, SeededDraws
from treegraft.tree import DraftTree, Floats, Ints
from treegraft_plugins.blocktree.edges import IdentityScorer
from treegraft_plugins.collection import Arrays, Text

_NO_LOG_PROB = -1e4  # (nats) of a candidate that stands in for none


@attrs.define(eq=False)
class Notebook(EdgeScorer):
    """Scores as another scorer does, and keeps what it was asked about last.

    Attributes:
        scorer: the other.
        children: int64 [L, C].
        log_prob: float64 [L, C] (nats).
    """

    scorer: EdgeScorer = attrs.field(factory=IdentityScorer)
    children: Ints = attrs.field(init=False, factory=lambda: np.zeros((0, 0), np.int64))
    log_prob: Floats = attrs.field(init=False, factory=lambda: np.zeros((0, 0)))

    def score(self, parents: Ints, children: Ints, log_prob: Floats) -> Floats:
        self.children, self.log_prob = children, log_prob
        return self.scorer.score(parents, children, log_prob)


class _Watched(TargetModel):
    """A target whose last scores stay at hand."""

    def __init__(self, target: TargetModel):
        self._target = target
        self.vocab_size = target.vocab_size
        self.scores: Scores | None = None

    def prefill(self, prompts: Sequence[Ints], wants: Wants) -> list[Observation]:
        return self._target.prefill(prompts, wants)

    def score(self, trees: Sequence[DraftTree]) -> list[Scores]:
        scores = self._target.score(trees)
        (self.scores,) = scores
        return scores

    def commit(self, paths: Sequence[Ints]) -> None:
        self._target.commit(paths)


def watched_rounds(
    pipeline: Pipeline, scorer: EdgeScorer, text: Text, max_new_tokens: int, temperature: float, seed: int
) -> Iterator[tuple[RoundRecord, Scores]]:
    """The rounds of a live request under an edge scorer, each with the target's scores of its tree.

    Args:
        pipeline: with one source, whose drafter takes an edge scorer.
        scorer: in the place of the source's own.
        text: the prompt.
        max_new_tokens, temperature, seed: of the request.

    Raises:
        RequestError: the drafter failed.
    """
    prompt = np.array(text.token_ids, np.int64)
    rules = pipeline.target.sampling_rules(prompt, SamplingOptions(temperature), max_new_tokens)
    sampler = pipeline.sampler(prompt, rules, SeededDraws(seed), max_new_tokens)
    faults: list[dict[str, str]] = []
    watched = _Watched(pipeline.target)
    parts = attrs.evolve(pipeline.parts, target=watched)
    with pipeline.request(sampler, faults) as request:
        request.sources = {
            name: attrs.evolve(source, edge_scorer=scorer) for name, source in request.sources.items()
        }  # fmt: skip
        while sampler.stop_reason is None:
            record = decode_round(parts, request)
            if faults:
                raise RequestError(f"sources.{faults[0]['source']}", faults[0]["error"], "Allowed: no failing drafter.")
            assert watched.scores is not None
            yield record, watched.scores


@attrs.frozen(eq=False)
class Traces:
    """N drafted parents with what the target says after each: A anchors, L depths, K candidates.

    Attributes:
        tokens: int64 [A, L, K], the candidates of each anchor's depths.
        log_prob: float32 [A, L, K] (nats), the drafter's.
        anchor: int64 [N], whose tree the parent stands in.
        place: int64 [N], the depth of its children, from 0.
        parent: int64 [N], its token.
        target_log_prob: float32 [N, K] (nats), the target's of the candidates under it.
        next_token: int64 [N], the target's arg-max under it.
        path_log_prob: float32 [N] (nats), the target's of the whole path to it.
    """

    tokens: Ints
    log_prob: NDArray[np.float32]
    anchor: Ints
    place: Ints
    parent: Ints
    target_log_prob: NDArray[np.float32]
    next_token: Ints
    path_log_prob: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def weight(self) -> NDArray[np.float32]:
        """float32 [N]: how much a parent counts, more the more probable it is to be reached at all."""
        weight: NDArray[np.float32] = LEAST_WEIGHT + np.exp(self.path_log_prob)
        return weight

    def candidates(self, rows: Ints) -> tuple[Ints, NDArray[np.float32]]:
        """Tokens int64 [B, K] and the drafter's log probabilities [B, K] of the children of parents `rows` [B]."""
        where = self.anchor[rows], self.place[rows]
        return self.tokens[where], self.log_prob[where]

    @classmethod
    def joined(cls, parts: Iterable[Arrays]) -> "Traces":
        """Of the parts that `traced` made.

        Raises:
            RequestError: there are none.
        """
        kept = [part for part in parts if len(part["parent"])]
        if not kept:
            raise RequestError("--prompts", "texts in which nothing was drafted", "Allowed: longer ones.")
        places = max(part["tokens"].shape[1] for part in kept)
        first = np.cumsum([0, *(len(part["tokens"]) for part in kept[:-1])])
        columns: dict[str, Any] = {
            name: np.concatenate([part[name] for part in kept])
            for name in ("place", "parent", "target_log_prob", "next_token", "path_log_prob")
        }
        columns["anchor"] = np.concatenate([part["anchor"] + start for part, start in zip(kept, first, strict=True)])
        for name, filling in (("tokens", 0), ("log_prob", _NO_LOG_PROB)):
            columns[name] = np.concatenate([_deep(part[name], places, filling) for part in kept])
        single = {"log_prob", "target_log_prob", "path_log_prob"}
        return cls(
            **{name: array.astype(np.float32 if name in single else np.int64) for name, array in columns.items()}
        )


LEAST_WEIGHT = 0.1  # of a parent that the target would never reach: it competes for nodes all the same


def _deep(array: NDArray[Any], places: int, filling: float) -> NDArray[Any]:
    """[A, L, K] with L = `places`; no parent stands above what is added."""
    return np.pad(array, ((0, 0), (0, places - array.shape[1]), (0, 0)), constant_values=filling)


def traced(pipeline: Pipeline, text: Text, max_new_tokens: int, temperature: float, seed: int) -> Arrays:
    """The traces of one text, as the columns of `Traces`; arguments are those of `watched_rounds`."""
    notebook = Notebook()
    rounds: list[Arrays] = []
    for record, scores in watched_rounds(pipeline, notebook, text, max_new_tokens, temperature, seed):
        if len(record.pruned) > 1:
            rounds.append(_parents(record.pruned, scores, notebook))
    places = max((len(each["tokens"]) for each in rounds), default=0)
    candidates = notebook.children.shape[1]
    columns: dict[str, Any] = {
        "tokens": np.zeros((len(rounds), places, candidates), np.int32),
        "log_prob": np.full((len(rounds), places, candidates), _NO_LOG_PROB, np.float32),
        "anchor": np.repeat(np.arange(len(rounds)), [len(each["parent"]) for each in rounds]),
    }
    for number, each in enumerate(rounds):
        for name in ("tokens", "log_prob"):
            columns[name][number, : len(each[name])] = each[name]
    empty = {"target_log_prob": np.zeros((0, candidates), np.float16)}
    for name in ("place", "parent", "target_log_prob", "next_token", "path_log_prob"):
        arrays = [each[name] for each in rounds]
        columns[name] = np.concatenate(arrays) if arrays else empty.get(name, np.zeros(0, np.int32))
    return columns


def _parents(tree: DraftTree, scores: Scores, notebook: Notebook) -> Arrays:
    """What the target says under every node of a verified tree that has candidates below it."""
    log_probs, children = scores.batch().log_softmax(-1).cpu().numpy(), notebook.children
    edge = log_probs[np.maximum(tree.parent, 0), tree.token]
    path = np.zeros(len(tree))
    for row in range(1, len(tree)):
        path[row] = path[tree.parent[row]] + edge[row]
    rows = np.flatnonzero(tree.depth < len(children))
    under = log_probs[rows]
    return {
        "tokens": children.astype(np.int32),
        "log_prob": notebook.log_prob.astype(np.float32),
        "place": tree.depth[rows].astype(np.int32),
        "parent": tree.token[rows].astype(np.int32),
        "target_log_prob": np.take_along_axis(under, children[tree.depth[rows]], axis=1).astype(np.float16),
        "next_token": under.argmax(-1).astype(np.int32),
        "path_log_prob": path[rows].astype(np.float32),
    }


def mismatches(tree: DraftTree, scores: Scores) -> tuple[int, int]:
    """(mismatched edges, edges) of a verified tree, those below the root left out.

    An edge is mismatched if its child is the target's next token under some other node of the parent's depth, but not
    under the parent: a token that the target likes there, attached to the wrong parent.
    """
    said = scores.batch().argmax(-1).cpu().numpy()
    liked: dict[int, set[int]] = {}
    for row in range(len(tree)):
        liked.setdefault(int(tree.depth[row]) + 1, set()).add(int(said[row]))
    deep = np.flatnonzero(tree.depth > 1)
    wrong = [
        row
        for row in deep.tolist()
        if said[tree.parent[row]] != tree.token[row] and int(tree.token[row]) in liked[int(tree.depth[row])]
    ]
    return len(wrong), len(deep)
