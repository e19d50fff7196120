"""Exact output distributions, of whole pipelines and of the targets they must match."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from treegraft.interfaces import TargetModel, Wants
from treegraft.pipeline import Generation, Pipeline
from treegraft.sampling import SamplingOptions, SamplingRules
from treegraft.testing.draws import outcomes
from treegraft.tree import DraftTree

Distribution = dict[tuple[int, ...], float]

SAMPLED = SamplingOptions(temperature=1.0)


def exact_generations(
    pipeline: Pipeline, prompt: Sequence[int], num_tokens: int, options: SamplingOptions = SAMPLED
) -> Iterator[tuple[float, Generation]]:
    """Every (probability, Generation) that a pipeline can return for a prompt.

    Args:
        pipeline: any, over models small enough: there are up to V ** num_tokens outputs. Its costs must be fixed.
        prompt: token ids [T].
        num_tokens: most tokens to emit.
        options: temperature, top-p, top-k.
    """
    return outcomes(lambda draws: pipeline.decode(prompt, draws=draws, max_new_tokens=num_tokens, options=options))


def exact_distribution(
    pipeline: Pipeline, prompt: Sequence[int], num_tokens: int, options: SamplingOptions = SAMPLED
) -> Distribution:
    """The probability of every output of a pipeline; arguments as for `exact_generations`."""
    found: Distribution = defaultdict(float)
    for weight, generation in exact_generations(pipeline, prompt, num_tokens, options):
        found[tuple(generation.token_ids)] += weight
    return dict(found)


def target_distribution(
    target: TargetModel, prompt: Sequence[int], num_tokens: int, options: SamplingOptions = SAMPLED
) -> Distribution:
    """The probability of every output of plain decoding, straight from the target's conditional distributions.

    Every prefix is prefilled afresh: no draft tree, no commit and no token sampler has a part in it.
    """
    rules = target.sampling_rules(np.array(prompt, np.int64), options, num_tokens)
    ended: Distribution = {}
    going: Distribution = {(): 1.0}
    for _ in range(num_tokens):
        grown: Distribution = {}
        for output, weight in going.items():
            for token, prob in enumerate(_next_probs(target, rules, [*prompt, *output])):
                if prob > 0:
                    longer = (*output, token)
                    (ended if _ends(rules, [*prompt, *longer]) else grown)[longer] = weight * prob
        going = grown
    return ended | going


def max_difference(left: Mapping[tuple[int, ...], float], right: Mapping[tuple[int, ...], float]) -> float:
    """The largest difference in the probability of any output; 0.0 for equal distributions."""
    return max(abs(left.get(output, 0.0) - right.get(output, 0.0)) for output in left.keys() | right.keys())


def _next_probs(target: TargetModel, rules: SamplingRules, tokens: list[int]) -> list[float]:
    """The target's probabilities [V] after `tokens`, processed; float64 from float32 logits."""
    target.prefill([np.array(tokens, np.int64)], Wants())
    logits = target.score([DraftTree.rooted(tokens[-1])])[0].logits(0)
    processed = rules.process(torch.tensor([tokens]), logits[None])[0]
    if rules.greedy:
        processed = torch.where(torch.arange(len(processed)) == processed.argmax(), 0.0, -torch.inf)
    probs: list[float] = processed.double().softmax(-1).tolist()
    return probs


def _ends(rules: SamplingRules, tokens: list[int]) -> bool:
    return tokens[-1] in rules.eos_ids or any(bool(ends(torch.tensor([tokens]), None)) for ends in rules.criteria)
