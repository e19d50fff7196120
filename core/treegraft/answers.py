"""What a pipeline's parts answered, held against their rules before it can reach the text.

A drafter's answers are checked by its `DraftRequest`. Each check costs a few microseconds, in every round.
"""

from collections.abc import Collection

import numpy as np

from treegraft.errors import InvariantError
from treegraft.interfaces import BudgetChoice, Verdict
from treegraft.tree import DraftTree, Expansion, Ints


def check_decision(part: object, name: object, known: Collection[str]) -> None:
    """A scheduler's answer, given the names of all sources of the pipeline.

    Raises:
        InvariantError: naming part and rule.
    """
    if name is not None and name not in known:
        _refuse(part, repr(name), f"C1 None, or one of the sources {', '.join(known)}")


def check_candidates(part: object, rows: Ints, tree: DraftTree) -> None:
    """A selector's answer.

    Raises:
        InvariantError: naming part and rule.
    """
    sound = isinstance(rows, np.ndarray) and rows.ndim == 1 and rows.dtype.kind in "iu"
    if sound and len(rows):
        sound = bool(rows[0] >= 0 and rows[-1] < len(tree) and (rows[1:] > rows[:-1]).all())
    if not sound:
        _refuse(part, f"{rows!r:.60}", f"S1 int64 rows, ascending and distinct, from 0 to {len(tree) - 1}")


def check_grafted(part: object, grown: DraftTree, tree: DraftTree, expansion: Expansion) -> None:
    """A graft policy's answer, given the tree before, and the proposals.

    Raises:
        InvariantError: naming part and rule.
    """
    if not isinstance(grown, DraftTree) or grown.uid[0] != tree.uid[0] or grown.token[0] != tree.token[0]:
        _refuse(part, f"a {type(grown).__name__} of another root", "G1 a tree below the same root")
    if expansion.draft_probs is None:
        return
    tokens, rows = grown.token[len(tree) :], grown.draft_row[len(tree) :]
    if not np.array_equal(tokens, expansion.token) or not np.array_equal(rows, np.arange(len(expansion))):
        _refuse(part, "another tree than was drawn", "G2 every proposal; of a drawn tree nothing may go, or merge")


def check_limit(part: object, num_nodes: object) -> None:
    """A budget's answer before growth.

    Raises:
        InvariantError: naming part and rule.
    """
    if not _is_count(num_nodes):
        _refuse(part, f"max_nodes {num_nodes!r}", "B1 an integer >= 0")


def check_choice(part: object, choice: BudgetChoice, most: int) -> None:
    """A budget's answer after growth, given the most nodes that it ever allows.

    Raises:
        InvariantError: naming part and rule.
    """
    if not isinstance(choice, BudgetChoice) or not _is_count(choice.nodes) or choice.nodes > most:
        found = getattr(choice, "nodes", choice)
        _refuse(part, f"{found!r} nodes to verify", f"B1 an integer from 0 to max_verify_nodes, {most}")


def check_prunable(part: object, is_drawn: bool, is_lossless: bool) -> None:
    """A budget's answer after growth that leaves nodes out, of a tree that was drawn and is to be verified losslessly.

    Raises:
        InvariantError: naming part and rule.
    """
    if is_drawn and is_lossless:
        _refuse(part, "a budget for fewer nodes than were drawn", "B3 all of them, or the text would be biased")


def check_pruned(part: object, pruned: DraftTree, num_nodes: int) -> None:
    """A pruner's answer, given the budget.

    Raises:
        InvariantError: naming part and rule.
    """
    if len(pruned) - 1 > num_nodes:
        _refuse(part, f"{len(pruned) - 1} nodes kept", f"P2 at most the {num_nodes} asked for")


def check_verdict(part: object, verdict: Verdict, tree: DraftTree, root_token: int, emitted: list[int]) -> None:
    """A verifier's answer, given the last token before the round, and those [E] that it emitted.

    Raises:
        InvariantError: naming part and rule.
    """
    if tree.token[0] != root_token:
        raise InvariantError("DraftTree", "a root that was written over", "Rule: D6 the tree is untouched.")
    if not len(emitted):
        _refuse(part, "a round without a token", "V3 at least one, by sampler.next(row)")
    rows = np.concatenate([[0], verdict.path]).astype(np.int64)
    inside = bool((rows >= 0).all() and (rows < len(tree)).all())
    if not inside or not np.array_equal(tree.parent[rows[1:]], rows[:-1]):
        _refuse(part, f"the path {verdict.path!r:.60}", "V2 from a child of the root downwards")
    said = [*tree.token[rows[1:]].tolist(), *([] if verdict.bonus_token is None else [verdict.bonus_token])]
    if said != emitted:
        _refuse(part, f"a verdict of the tokens {said}", f"V2 what was emitted, {emitted}")


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


def _refuse(part: object, found: str, rule: str) -> None:
    raise InvariantError(type(part).__name__, found, f"Rule: {rule}.")
