"""For tests of pipelines and plugins: exact output distributions, toy models that make them computable, strategies.

`treegraft.testing.strategies` holds the Hypothesis strategies; it alone needs the extra `testing`.
"""

from treegraft.testing.distributions import (
    SAMPLED,
    Distribution,
    exact_distribution,
    exact_generations,
    max_difference,
    target_distribution,
)
from treegraft.testing.drafters import FaultyDrafter, ScriptedDrafter, TableDrafter
from treegraft.testing.draws import EnumeratedDraws, outcomes
from treegraft.testing.models import MarkovTarget, markov_table, table_row

__all__ = [
    "SAMPLED",
    "Distribution",
    "EnumeratedDraws",
    "FaultyDrafter",
    "MarkovTarget",
    "ScriptedDrafter",
    "TableDrafter",
    "exact_distribution",
    "exact_generations",
    "markov_table",
    "max_difference",
    "outcomes",
    "table_row",
    "target_distribution",
]
