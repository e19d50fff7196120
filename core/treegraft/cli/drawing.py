"""A round for the eye: tokens in the colours of who proposed them, and the draft tree they came from."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from rich.console import Console, Group
from rich.text import Text
from rich.tree import Tree

from treegraft.interfaces import RoundRecord, Source
from treegraft.pipeline import Pipeline
from treegraft.tree import DraftTree

TARGET = "target"
COLOURS = ("green", "magenta", "cyan", "blue", "red")
MAX_DEPTH = 6  # accepted tokens drawn one below the other; what follows is a line


@attrs.frozen
class Palette:
    """Names and colours of whoever can have proposed a token: the target and the sources, by index."""

    names: Mapping[int, str]

    @classmethod
    def of(cls, sources: Sequence[Source]) -> "Palette":
        """For a pipeline's sources."""
        return cls({source.index: source.name for source in sources})

    def name(self, source: int) -> str:
        """Of a source's index; the root and the bonus token (-1) are the target's."""
        return self.names.get(source, TARGET)

    def style(self, name: str) -> str:
        """Rich's style for a name."""
        if name == TARGET:
            return "bold yellow"
        return COLOURS[list(self.names.values()).index(name) % len(COLOURS)]

    def legend(self, counts: Mapping[str, int]) -> Text:
        """Who proposed how many of the tokens, each in its colour."""
        parts = [Text(f"{name} {count}", style=self.style(name)) for name, count in counts.items()]
        return Text(", ").join(parts)


def proposers(record: RoundRecord) -> list[int]:
    """The source behind each token of a round, in order; -1 for the target's own."""
    sources: list[int] = record.pruned.source[record.verdict.path].tolist()
    return sources + [-1] * (len(record.tokens) - len(sources))


def stream_in_colours(console: Console, pipeline: Pipeline, prompt: str, max_new_tokens: int) -> list[RoundRecord]:
    """Print a completion as its rounds finish, each token in the colour of who proposed it."""
    palette = Palette.of(pipeline.sources)
    records: list[RoundRecord] = []
    token_ids: list[int] = []
    shown = ""
    console.out(prompt, style="dim", end="", highlight=False)
    for record in pipeline.rounds(prompt, max_new_tokens):
        records.append(record)
        for token, source in zip(record.tokens, proposers(record), strict=True):
            token_ids.append(token)
            text = pipeline.tokenizer.decode(token_ids, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # else a character is unfinished
                console.out(text[len(shown) :], style=palette.style(palette.name(source)), end="", highlight=False)
                shown = text
        console.file.flush()
    console.out("")
    return records


def most_telling(records: Sequence[RoundRecord]) -> RoundRecord:
    """The round whose tree shows most: a few tokens of several sources accepted, some rescored, some pruned."""

    def interest(record: RoundRecord) -> tuple[Any, ...]:
        tree, path = record.state.tree, record.verdict.path
        num_sources = len(set(record.pruned.source[path].tolist()))
        return (
            min(num_sources, 2) + bool(_is_rescored(tree).any()) + (len(record.pruned) < len(tree)),
            -abs(len(path) - MAX_DEPTH),
        )

    return max(records, key=interest)


def round_tree(record: RoundRecord, number: int, pipeline: Pipeline) -> Group:
    """The draft tree of a round: the accepted path, the best of what lay beside it, and what became of each node."""
    return _RoundDrawing(record, pipeline).draw(number)


def _is_rescored(tree: DraftTree) -> Any:
    """bool [N]: nodes last scored by another source than the one that proposed them."""
    return tree.scorer != tree.source


@attrs.define(eq=False)
class _RoundDrawing:
    record: RoundRecord
    pipeline: Pipeline
    palette: Palette = attrs.field(init=False)
    tree: DraftTree = attrs.field(init=False)
    path: list[int] = attrs.field(init=False)
    verified: Any = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        record = self.record
        self.palette, self.tree = Palette.of(self.pipeline.sources), record.state.tree
        # Rows differ between the two trees, paths do not.
        row_of = {uid: row for row, uid in enumerate(self.tree.uid.tolist())}
        self.path = [row_of[uid] for uid in record.pruned.uid[record.verdict.path].tolist()]
        self.verified = np.isin(self.tree.uid, record.pruned.uid)

    def draw(self, number: int) -> Group:
        steps = ", ".join(step.source for step in self.record.state.steps if len(step.positions))
        drawing = Tree(Text.assemble(self.token(0), ("  last committed token", "dim")), guide_style="dim")
        row, branch = 0, drawing
        for child in self.path[:MAX_DEPTH]:
            branch = self.draw_children(row, child, branch)
            row = child
        if self.path[MAX_DEPTH:]:
            rest = [int(self.tree.token[child]) for child in self.path[MAX_DEPTH:]]
            branch.add(Text.assemble(repr(self.decode(rest)), f"  {len(rest)} more ", ("accepted", "bold")))
        else:
            self.draw_children(row, None, branch)
        key = Text("token  path score (nats)  who proposed it  what became of it", style="dim")
        return Group(Text(f"Round {number}, steps by {steps}:"), Text(self.counts()), key, drawing)

    def counts(self) -> str:
        facts = {
            "drafted": len(self.tree) - 1,
            "rescored": int(_is_rescored(self.tree).sum()),
            "pruned": int((~self.verified).sum()),
            "verified": int(self.verified.sum()) - 1,
            "accepted": len(self.path),
        }
        return ", ".join(f"{count} {what}" for what, count in facts.items())

    def draw_children(self, row: int, accepted: int | None, branch: Tree) -> Tree:
        """Draw the accepted child of a node, or the target's own token, beside the best that was not accepted."""
        children = np.flatnonzero(self.tree.parent == row).tolist()
        rest = [child for child in children if child != accepted]
        shown = [accepted] if accepted is not None else []
        for verified in (True, False):
            some = [child for child in rest if self.verified[child] == verified]
            shown += sorted(some, key=self.rank_aside)[:1]
        below = branch
        for child in shown:
            drawn = branch.add(self.label(child))
            below = drawn if child == accepted else below
        bonus = self.record.verdict.bonus_token
        if accepted is None and bonus is not None:
            branch.add(
                Text.assemble((repr(self.decode([bonus])), self.palette.style(TARGET)), f"  {TARGET}'s own token")
            )
        hidden = [child for child in children if child not in shown]
        if hidden:
            num_pruned = int((~self.verified[hidden]).sum())
            branch.add(Text(f"and {len(hidden)} more, {num_pruned} of them pruned", style="dim"))
        return below

    def rank_aside(self, row: int) -> tuple[bool, float]:
        """What to draw beside the accepted path: what was rescored first, then what scored best."""
        return not _is_rescored(self.tree)[row], -float(self.tree.path_score[row])

    def label(self, row: int) -> Text:
        """`'token'  -0.31  small, rescored by middle  accepted`"""
        tree = self.tree
        proposer, scorer = (self.palette.name(int(column[row])) for column in (tree.source, tree.scorer))
        label = Text.assemble(
            self.token(row), f"  {tree.path_score[row]:.2f}  ", (proposer, self.palette.style(proposer))
        )
        if scorer != proposer:
            label.append(", rescored by ")
            label.append(scorer, self.palette.style(scorer))
        if row in self.path:
            label.append("  accepted", "bold")
        elif not self.verified[row]:
            label.append("  pruned", "dim")
        if row not in self.path and (num_below := self.num_below(row)):
            label.append(f"  (+{num_below} below)", "dim")
        return label

    def num_below(self, row: int) -> int:
        """Nodes in the subtree of `row`, itself excluded."""
        inside = np.zeros(len(self.tree), np.bool_)
        inside[row] = True
        for node in range(row + 1, len(self.tree)):
            inside[node] |= inside[self.tree.parent[node]]
        return int(inside.sum()) - 1

    def token(self, row: int) -> Text:
        style = self.palette.style(self.palette.name(int(self.tree.source[row])))
        return Text(repr(self.decode([int(self.tree.token[row])])), style=style)

    def decode(self, token_ids: list[int]) -> str:
        text: str = self.pipeline.tokenizer.decode(token_ids)
        return text
