"""Where a source may graft: which nodes of the shared tree it may draft below."""

import attrs

from treegraft.interfaces import PositionSelector, Source
from treegraft.tree import DraftTree, Ints


@attrs.frozen
class NewestSelector(PositionSelector):
    """The nodes of the last step that created any, less those this source has expanded; at step one the root.

    The standard single-drafter tree, and the small role of the shared one: cheap steps deepen what is there.

    Source: EAGLE-2, section 4.1 (expansion phase); TreeGraft.
    """

    def candidates(self, tree: DraftTree, source: Source) -> Ints:
        newest = tree.step == tree.step[-1]
        return (newest & ~tree.visited_by(source.index)).nonzero()[0]


@attrs.frozen
class UnvisitedSelector(PositionSelector):
    """Every node that this source has not expanded, whoever proposed it and at whatever depth, the root included.

    The middle role of the shared tree: a better judge goes back to whatever cheaper steps left promising.

    Source: TreeGraft.
    """

    def candidates(self, tree: DraftTree, source: Source) -> Ints:
        return (~tree.visited_by(source.index)).nonzero()[0]
