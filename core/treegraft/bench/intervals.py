"""How much faster, and how sure: ratios of throughput with bootstrap intervals over prompts.

A prompt is the unit that is resampled: its figures under the two arms stay together, and so do its repeats. What an
interval says is how the ratio would vary with other prompts of the same kind; how the machine's own speed varies shows
in the range over repeats and in the spread of one arm against itself.
"""

import math
from statistics import NormalDist

import attrs
import numpy as np

from treegraft.tree import Floats

LEVEL = 0.95
NUM_RESAMPLES = 4000
SEED = 0  # the same resamples for every arm, so that their intervals can be compared


@attrs.frozen(eq=False)
class Work:
    """What an arm did: tokens and the time they took, by repeat and prompt.

    Attributes:
        tokens: float64 [R, P], new tokens.
        ms: float64 [R, P], latency (ms); 0 where a request is missing.
    """

    tokens: Floats
    ms: Floats

    def tokens_per_second(self) -> Floats:
        """float64 [R']: all tokens over all time, for each repeat that has any."""
        tokens, ms = self.tokens.sum(axis=1), self.ms.sum(axis=1)
        rates: Floats = tokens[ms > 0] / ms[ms > 0] * 1e3
        return rates


@attrs.frozen
class Ratio:
    """The throughput of an arm over that of another, as totals over the requests that both have.

    Attributes:
        value: median over repeats; None where there is nothing to compare.
        interval: of `value`, 95 %, over prompts; None with fewer than two of them.
        range: least and largest over repeats.
    """

    value: float | None = None
    interval: tuple[float, float] | None = None
    range: tuple[float, float] | None = None


def ratio(arm: Work | None, base: Work | None) -> Ratio:
    """How much faster `arm` is than `base`, by the requests that both have.

    Source: Hesterberg, "What Teachers Should Know About the Bootstrap" (2015), section 3.3: expanded percentile
    intervals, whose quantiles make up for the narrowness of the bootstrap in small samples.
    """
    if arm is None or base is None:
        return Ratio()
    both = (arm.ms > 0) & (base.ms > 0)
    asked = both.any(axis=0)
    columns = [np.where(both, values, 0.0)[:, asked] for values in (arm.tokens, arm.ms, base.tokens, base.ms)]
    num_prompts = int(asked.sum())
    by_repeat = _ratios(np.ones((1, num_prompts)), *columns)[0]
    by_repeat = by_repeat[np.isfinite(by_repeat)]
    if not len(by_repeat):
        return Ratio()
    found = float(np.median(by_repeat))
    spread = float(by_repeat.min()), float(by_repeat.max())
    if num_prompts < 2:
        return Ratio(found, None, spread)
    rng = np.random.default_rng(SEED)
    weights = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=NUM_RESAMPLES)
    resampled = _ratios(weights.astype(np.float64), *columns)
    whole = not np.isnan(resampled).any()  # where every repeat has every request, much the faster case
    medians = np.median(resampled, axis=1) if whole else np.nanmedian(resampled, axis=1)
    tail = _tail(num_prompts)
    low, high = np.nanquantile(medians, [tail, 1 - tail])
    return Ratio(found, (float(low), float(high)), spread)


def _ratios(weights: Floats, tokens: Floats, ms: Floats, base_tokens: Floats, base_ms: Floats) -> Floats:
    """float64 [B, R]: the ratio in each repeat with prompts weighted by `weights` [B, P]; NaN where there is none."""
    totals = [weights @ values.T for values in (tokens, ms, base_tokens, base_ms)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios: Floats = (totals[0] / totals[1]) / (totals[2] / totals[3])
    return np.where(np.isfinite(ratios), ratios, np.nan)


def _tail(num_prompts: int) -> float:
    """The quantile where an interval over `num_prompts` >= 2 begins."""
    widening = math.sqrt(num_prompts / (num_prompts - 1))
    return NormalDist().cdf(widening * _student_quantile((1 - LEVEL) / 2, num_prompts - 1))


def _student_quantile(probability: float, freedom: int) -> float:
    """Student's t, to two digits from 3 degrees of freedom on, to five from 20.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.5.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    quantile: float = z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))
    return quantile
