"""Did the objective change between two stretches of ticks, beyond noise and beyond what the load explains?

    met share            m = met / (ended + g)   g: growth of what is still open, beyond GROWTH_SIGMAS of its noise
    carried              c = max(met per second of the stretch before, met per second proven earlier (history.py))
    expected without us  e = min(m_before, c / demand_after), and never above where m_before was heading
    standard error       of each stretch: the larger of the binomial one and the one seen between blocks of BLOCK_TICKS
    better, worse        |m_after - e| > noise_share * e  and  |m_after - e| > CRITICAL * sqrt(se_before^2 + se_after^2)

A rise of the load beyond what this fleet was seen to carry at the same settings lowers what is expected, and cannot be
blamed on a change; a rise up to there can. A share that was falling already is expected to go on falling (a straight
line through the stretch before, where its slope is beyond noise). Where the share is the same, a change of the cost per
success counts if the change was meant to change cost.

The share is one of requests that ended, because arrivals and endings of one block are not the same requests: their
difference is noise of the size of what is open, not of what was promised. What is open counts once it grew beyond that
noise: a setting that starves an engine ends nothing at all.

Stretches that differ by more than :data:`LOAD_FACTOR_MAX` are not compared: in load, beyond what was carried, or in the
mean prompt or answer, beyond its own noise. But less load, shorter prompts and shorter answers do not make a share
fall, so that a collapse is one all the same (clients that wait for their answers ask less of a slow fleet, gates refuse
long prompts first, and of a starved fleet short answers come out first).

Blocks, because neighbouring ticks share a queue and are no separate samples; their noise is taken from the differences
of neighbours, so that a share that sinks as an effect sets in is not called noise. Sources: ratio estimator and its
variance (Cochran, Sampling Techniques, ch. 6); mean square successive difference (von Neumann et al., Ann. Math. Stat.
12, 1941); Student's t as critical value.

This module must not know what was changed, and must not act.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from policies.control.objective import ObjectiveSample, total
from policies.steering import Verdict

BLOCK_TICKS = 3
"""Ticks summed into one sample."""

BLOCKS_MIN = 2
"""Blocks a stretch must have."""

REQUESTS_MIN = 20
"""Requests each stretch must have seen."""

LOAD_FACTOR_MAX = 1.3
"""Ratio of two demands, or of two mean prompts, up to which two stretches can be compared."""

GROWTH_SIGMAS = 2.0
"""What is open grew for certain once arrivals exceed endings by so many standard deviations of a count of arrivals."""

COLLAPSE = 0.25
"""Fall of the share of kept promises that is a collapse."""

CRITICAL = (6.97, 4.54, 3.75, 3.36, 3.14, 3.0, 2.9, 2.82, 2.76)
"""Student's t, one-sided 1 %, for 2 to 10 degrees of freedom; normal from there on (2.6, a little above 2.33)."""

CRITICAL_MANY = 2.6

SHARE_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class Span:
    """What one stretch of ticks amounts to."""

    share: float
    """Met of those that ended, and of what piled up meanwhile."""
    error: float
    """Standard error of the share."""
    slope: float
    """Change of the share per tick, 0 where it is within noise."""
    blocks: int
    requests: int
    demand_ps: float
    prompt: float
    """Mean prompt of the requests that succeeded, in tokens; 0 where none did."""
    prompt_error: float
    """Its standard error."""
    answer: float
    """Mean answer of those requests, likewise."""
    answer_error: float
    usd_per_hour: float
    successes_per_usd: float

    def figures(self) -> dict[str, float]:
        """For the ledger."""
        return {"met_share": round(self.share, 4), "successes_per_usd": round(self.successes_per_usd, 2)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answer."""

    verdict: Verdict
    text: str
    expected: float
    """Met share expected had nothing been changed."""
    difference: float
    """Met share measured less the expected one."""
    share_fell: bool
    """Whether the verdict is for the share and not for the cost."""


def span_of(samples: Sequence[ObjectiveSample]) -> Span | None:
    """Sum up a stretch; ``None`` when it is too short or saw too few requests to say anything."""
    blocks = [total(samples[i : i + BLOCK_TICKS]) for i in range(len(samples) % BLOCK_TICKS, len(samples), BLOCK_TICKS)]
    whole = total(samples)
    requests = max(whole.ended, whole.demand)
    if len(blocks) < BLOCKS_MIN or requests < REQUESTS_MIN or whole.seconds <= 0:
        return None
    grown = max(0.0, whole.demand - whole.ended - GROWTH_SIGMAS * math.sqrt(whole.demand))
    weight = whole.ended + grown
    share = min(1.0, whole.met / weight) if weight > 0 else 0.0
    of_ended = whole.met / whole.ended if whole.ended > 0 else 0.0
    between = _between([b.met - of_ended * b.ended for b in blocks]) / max(1.0, weight)
    binomial = math.sqrt(max(share * (1 - share), 1 / requests / 4) / requests)
    error = max(between, binomial)
    answers = max(1, whole.succeeded)
    prompt, answer = whole.prompt_tokens / answers, whole.output_tokens / answers
    return Span(
        share=share,
        error=error,
        slope=_slope(blocks, error),
        blocks=len(blocks),
        requests=requests,
        demand_ps=whole.demand / whole.seconds,
        prompt=prompt,
        prompt_error=_between([b.prompt_tokens - prompt * b.succeeded for b in blocks]) / answers,
        answer=answer,
        answer_error=_between([b.output_tokens - answer * b.succeeded for b in blocks]) / answers,
        usd_per_hour=whole.usd_per_hour,
        successes_per_usd=whole.successes_per_usd or 0.0,
    )


def compare(
    before: Span,
    after: Span,
    noise_share: float,
    costs: bool,
    distance: float = 0.0,
    proven_ps: float = 0.0,
) -> Comparison:
    """Compare two stretches.

    Args:
        before: without the change.
        after: with it.
        noise_share: relative differences up to this are noise.
        costs: whether the change was meant to change cost.
        distance: ticks between the middles of the two stretches, for what was falling already.
        proven_ps: requests per second that kept their promises in some earlier stretch without the change.
    """
    if before.demand_ps <= 0:
        return _unlike(before, after, "there was no load before")
    factor = after.demand_ps / before.demand_ps
    carried_ps = max(before.share * before.demand_ps, proven_ps)
    slope = before.slope * distance
    low = min(before.share, carried_ps / after.demand_ps if after.demand_ps > 0 else 1.0) + min(0.0, slope)
    high = min(1.0, before.share * max(1.0, 1 / factor if factor > 0 else math.inf) + max(0.0, slope))
    low = max(0.0, low)
    critical = _critical(before.blocks + after.blocks - 2)
    needed = critical * math.hypot(before.error, after.error)
    fell, rose = low - after.share, after.share - high
    unlike = _not_comparable(before, after, carried_ps, low - after.share, critical)
    if unlike:
        return _unlike(before, after, unlike)
    said = f"{after.share:.1%} of requests kept their promises, {before.share:.1%} before"
    if fell > max(needed, noise_share * low, SHARE_TIE):
        return Comparison(Verdict.WORSE, f"{said}; {low:.1%} were to be expected", low, -fell, True)
    if rose > max(needed, noise_share * high, SHARE_TIE):
        return Comparison(Verdict.BETTER, f"{said}; {high:.1%} were to be expected", high, rose, False)
    if costs and before.usd_per_hour > 0 and after.usd_per_hour > 0 and factor > 0:
        ratio = after.usd_per_hour / before.usd_per_hour / factor
        if abs(ratio - 1) > noise_share:
            verdict = Verdict.WORSE if ratio > 1 else Verdict.BETTER
            text = f"{said}; cost of a request asked for changed by {ratio - 1:+.0%}"
            return Comparison(verdict, text, low, after.share - before.share, False)
    return Comparison(Verdict.NEUTRAL, f"{said}: no difference beyond noise", low, after.share - before.share, False)


def _not_comparable(before: Span, after: Span, carried_ps: float, fell: float, critical: float) -> str:
    """Why two stretches say nothing about a change between them; empty: they can be compared."""
    lightly = fell < COLLAPSE
    sizes = (
        ("prompts", before.prompt, after.prompt, math.hypot(before.prompt_error, after.prompt_error)),
        ("answers", before.answer, after.answer, math.hypot(before.answer_error, after.answer_error)),
    )
    for name, was, now, error in sizes:
        beyond = was > 0 and now > 0 and abs(now - was) > critical * error
        if beyond and (now > LOAD_FACTOR_MAX * was or (now * LOAD_FACTOR_MAX < was and lightly)):
            return f"{name} went from {was:,.0f} to {now:,.0f} tokens"
    more = after.demand_ps > LOAD_FACTOR_MAX * max(before.demand_ps, carried_ps)
    less = after.demand_ps * LOAD_FACTOR_MAX < before.demand_ps and lightly
    return f"load went from {before.demand_ps:.1f} to {after.demand_ps:.1f} requests/s" if more or less else ""


def _unlike(before: Span, after: Span, why: str) -> Comparison:
    return Comparison(
        Verdict.OVERTAKEN, f"{why}: not comparable", before.share, after.share - before.share, share_fell=False
    )


def _between(deviations: Sequence[float]) -> float:
    """Standard deviation of the sum of blocks, from the differences of neighbours."""
    n = len(deviations)
    return math.sqrt(n * math.fsum((b - a) ** 2 for a, b in pairwise(deviations)) / (2 * (n - 1)))


def _slope(blocks: Sequence[ObjectiveSample], error: float) -> float:
    """Least squares through the blocks' shares, per tick; 0 where the stretch's ends do not differ beyond noise."""
    shares = [b.met / b.ended for b in blocks if b.ended]
    n = len(shares)
    if n < BLOCKS_MIN + 1:
        return 0.0
    middle, mean = (n - 1) / 2, math.fsum(shares) / n
    slope = math.fsum((i - middle) * (y - mean) for i, y in enumerate(shares)) / math.fsum(
        (i - middle) ** 2 for i in range(n)
    )
    residual = math.fsum((y - mean - slope * (i - middle)) ** 2 for i, y in enumerate(shares))
    deviation = math.sqrt(residual / (n - 2) / math.fsum((i - middle) ** 2 for i in range(n)))
    deviation = max(deviation, error / n)
    return slope / BLOCK_TICKS if abs(slope) > _critical(n - 2) * deviation else 0.0


def _critical(degrees: int) -> float:
    if degrees < 2:
        return CRITICAL[0]
    return CRITICAL[degrees - 2] if degrees - 2 < len(CRITICAL) else CRITICAL_MANY
