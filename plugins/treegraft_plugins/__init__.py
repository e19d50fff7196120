"""The parts that come with treegraft, offered through the entry point that any plugin uses."""

from treegraft.hookspecs import Register, hookimpl


@hookimpl
def treegraft_register(register: Register) -> None:
    """Every built-in, by name. Imported here, so that importing a single one does not bring in transformers."""
    from treegraft.verify import BlockVerifier, MatchVerifier
    from treegraft_plugins import budgets, costs, graft_policies, pruners, selectors
    from treegraft_plugins.blocktree import edges
    from treegraft_plugins.drafters.ngram import NGramDrafter
    from treegraft_plugins.drafters.suffix import SuffixDrafter
    from treegraft_plugins.hf.csd import CascadeDrafter
    from treegraft_plugins.hf.dflash.drafter import DFlashDrafter, SampledDFlashDrafter
    from treegraft_plugins.hf.drafter import HFCausalLMDrafter
    from treegraft_plugins.hf.heads.drafter import HeadsDrafter
    from treegraft_plugins.hf.target import HFCausalLMTarget
    from treegraft_plugins.saba import SABABudget
    from treegraft_plugins.schedulers.distilled import DistilledScheduler
    from treegraft_plugins.schedulers.fixed import FixedScheduler
    from treegraft_plugins.schedulers.gain_over_cost import GainOverCostScheduler
    from treegraft_plugins.schedulers.opt_tree import OptTreeScheduler

    register("hf_causal_lm", HFCausalLMTarget)
    register("hf_causal_lm", HFCausalLMDrafter)
    register("dflash", DFlashDrafter)
    register("dflash_sampled", SampledDFlashDrafter)
    register("heads", HeadsDrafter)
    register("csd", CascadeDrafter)
    register("ngram", NGramDrafter)
    register("suffix", SuffixDrafter)
    register("newest", selectors.NewestSelector)
    register("unvisited", selectors.UnvisitedSelector)
    register("non_destructive", graft_policies.NonDestructive)
    register("overwrite", graft_policies.Overwrite)
    register("fixed", FixedScheduler)
    register("gain_over_cost", GainOverCostScheduler)
    register("distilled", DistilledScheduler)
    register("opt_tree", OptTreeScheduler)
    register("fixed", budgets.FixedBudget)
    register("gain_over_cost", budgets.GainOverCostBudget)
    register("expected_gain", budgets.ExpectedGainBudget)
    register("saba", SABABudget)
    register("identity", edges.IdentityScorer)
    register("bigram", edges.BigramScorer)
    register("tdes", edges.TDESScorer)
    register("top_paths", pruners.TopPaths)
    register("match", MatchVerifier)
    register("block", BlockVerifier)
    register("fixed", costs.FixedCosts)
    register("measured", costs.MeasuredCosts)
    register("file", costs.FileCosts)
