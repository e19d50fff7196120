"""Lossless tree-based speculative decoding, in which several drafters of different cost grow one shared draft tree.

`load` turns a pipeline of a registry file into a `Pipeline`. The rest is what plugins implement and exchange.
"""

from importlib import metadata

from treegraft.compose import load
from treegraft.errors import (
    ComposeError,
    DrafterWarning,
    InvariantError,
    ModelError,
    PipelineBusyError,
    PluginError,
    RequestError,
    SchedulerWarning,
    TreeGraftError,
)
from treegraft.front_door import generate
from treegraft.hookspecs import hookimpl
from treegraft.interfaces import (
    BudgetChoice,
    BudgetPolicy,
    Drafter,
    DraftRequest,
    EdgeScorer,
    GraftPolicy,
    Limits,
    ModelSpec,
    Observation,
    PositionSelector,
    Pruner,
    Rescoring,
    RoundRecord,
    RoundState,
    Scheduler,
    Setting,
    Source,
    SourceSetting,
    Statistics,
    StepRecord,
    TargetModel,
    Verdict,
    Verifier,
    Wants,
)
from treegraft.pipeline import Generation, Pipeline
from treegraft.sampling import Scores
from treegraft.statistics import CostModel
from treegraft.tree import DraftTree, Expansion

__version__ = metadata.version("treegraft")

__all__ = [
    "BudgetChoice",
    "BudgetPolicy",
    "ComposeError",
    "CostModel",
    "DraftRequest",
    "DraftTree",
    "Drafter",
    "DrafterWarning",
    "EdgeScorer",
    "Expansion",
    "Generation",
    "GraftPolicy",
    "InvariantError",
    "Limits",
    "ModelError",
    "ModelSpec",
    "Observation",
    "Pipeline",
    "PipelineBusyError",
    "PluginError",
    "PositionSelector",
    "Pruner",
    "RequestError",
    "Rescoring",
    "RoundRecord",
    "RoundState",
    "Scheduler",
    "SchedulerWarning",
    "Scores",
    "Setting",
    "Source",
    "SourceSetting",
    "Statistics",
    "StepRecord",
    "TargetModel",
    "TreeGraftError",
    "Verdict",
    "Verifier",
    "Wants",
    "generate",
    "hookimpl",
    "load",
]
