"""Cap and budget as one decision: which pair lets most of what arrives meet both objectives.

A budget that holds every gap may let prompts queue, and a cap that holds gaps may let requests queue: TTFT pays. So a
few pairs are judged by the queue arithmetic of ``policies/queueing.py``::

    (cap by decode steps, budget by gaps)        every gap within the objective, as ``solve.py`` finds them
    (cap by decode steps, larger budgets)        prompts come through faster, single gaps are longer
    (cap by mean gaps, larger budgets)           seqs = (itl_ms * MEAN_SHARE - a) / (b + c k / 1000 + d P / O)
    (a larger cap, start-up budget)              where admission does not refuse what would be late: else a cap that
                                                 is wide in a lull is too wide when the load comes

The first pair whose worth is within :data:`TOLERANCE` of the best is taken: where all do as well, gaps are safe. A knob
of it that gains nothing over what stands stays as it is. What stands already is given up only for a pair that is better
by :data:`MARGIN` both at the load as it is counted and in the mean of a standard error of that count (``error``) above
and below; when the engine has not been half busy for long (``calm``), for a safer one that loses nothing.

It must not remember anything, and it must not go beyond the engine's start-up values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.batching.solve import BATCH_FACTOR_MIN, BatchPoint, keep_up_tokens, seqs_by_cache, step_tokens_floor
from policies.config import BatchingConfig, ObjectivesConfig
from policies.queueing import Estimate, Offered, Setting, decode_ms, estimate, saturated_seqs
from policies.types import Knobs

MARGIN = 0.03
"""Smaller differences of a predicted worth are not worth a change: predictions are not as good as that."""

TOLERANCE = 0.01
"""Differences up to which the pair that is safer for gaps is taken to be as good."""

MEAN_SHARE = 0.95
"""Share of the ITL objective that mean gaps of a full engine may take."""

LARGER = (2.0, 4.0)
"""Budgets that are tried, as multiples of the one that holds every gap."""

WIDER = 1.5
"""A cap that is tried, as a multiple of the one that holds mean gaps."""

CAPACITY_WORTH = 0.2
"""What all of the capacity that is needed is worth beside the met share."""

CALM_LOAD = 0.5
"""Load up to which no setting is needed to meet both objectives, and the safe pair is gone back to."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The pair, what is expected of it, and of the pair that looks at gaps alone."""

    knobs: Knobs
    expected: Estimate
    gaps_alone: Estimate
    stands: Estimate | None
    """Of the present setting; ``None``: there is none yet."""
    gain: float = 0.0
    """Worth above that of the present setting, at the load as counted or expected over its error, the smaller one."""


def worth_of(expected: Estimate) -> float:
    """Met share, and a little for the capacity that an overload is short of: it ends sooner with more."""
    return expected.met_share + CAPACITY_WORTH * min(1.0, 1 / max(1.0, expected.utilisation))


class Judge:
    """What comes of a pair of knobs at one point and load."""

    def __init__(self, point: BatchPoint, offered: Offered, objectives: ObjectivesConfig, gap_share: float) -> None:
        self._point, self._offered, self._objectives, self._gap_share = point, offered, objectives, gap_share

    def expect(self, knobs: Knobs, factor: float = 1.0) -> Estimate:
        """With ``factor`` times the arrivals."""
        point, offered = self._point, self._offered
        seqs, tokens = knobs.running_seqs_max, knobs.step_tokens_max
        setting = Setting(
            point.running_seqs_hard if seqs is None else seqs, point.step_tokens_hard if tokens is None else tokens
        )
        if factor != 1.0:
            offered = replace(offered, arrivals_ps=offered.arrivals_ps * factor)
        return estimate(point.model, offered, setting, self._objectives, point.kv_tokens_max, self._gap_share)

    def worth(self, knobs: Knobs, factor: float = 1.0) -> float:
        """Worth with ``factor`` times the arrivals."""
        return worth_of(self.expect(knobs, factor))

    def gain(self, knobs: Knobs, stands: Knobs, error: float) -> float:
        """Worth of ``knobs`` above that of ``stands``, expected over arrivals known within a standard ``error``."""
        return sum(self.worth(knobs, f) - self.worth(stands, f) for f in (1 + error, max(0.0, 1 - error))) / 2

    def as_good(self, knobs: Knobs, stands: Knobs, error: float) -> bool:
        """Whether ``knobs`` lose nothing to ``stands``."""
        return self.gain(knobs, stands, error) >= -TOLERANCE


def _narrower(knobs: Knobs, stands: Knobs) -> Knobs:
    """Each knob as it is in the narrower of the two; both are complete."""
    seqs, tokens = knobs.running_seqs_max, knobs.step_tokens_max
    assert seqs is not None
    assert tokens is not None
    return Knobs(min(seqs, stands.running_seqs_max or seqs), min(tokens, stands.step_tokens_max or tokens))


def choose(
    point: BatchPoint,
    offered: Offered,
    gaps: Knobs,
    wish: Knobs,
    objectives: ObjectivesConfig,
    config: BatchingConfig,
    calm: bool = False,
    error: float = 0.0,
    gap_share: float = 1.0,
) -> Choice:
    """The best pair for ``offered``; ``gaps`` is the one that holds every gap, ``wish`` what stands.

    ``calm``: there has been no load to speak of for long, and what stands need not. ``error``: relative standard error
    of the arrivals. ``gap_share``: see ``queueing.estimate``.
    """
    judge = Judge(point, offered, objectives, gap_share)
    pairs = candidates(point, offered, gaps, objectives, config)
    judged = [judge.expect(pair) for pair in pairs]
    worths = [worth_of(e) for e in judged]
    place = next(i for i, worth in enumerate(worths) if worth >= max(worths) - TOLERANCE)
    knobs, expected = pairs[place], judged[place]
    if wish.step_tokens_max is None:
        return Choice(knobs, expected, judged[0], None)
    stands = expected if wish == knobs else judge.expect(wish)
    if calm and expected.utilisation < CALM_LOAD:
        knobs = next((p for pair in pairs if judge.as_good(p := _narrower(pair, wish), wish, error)), wish)
        return Choice(knobs, judge.expect(knobs), judged[0], stands)
    gain = worths[place] - worth_of(stands)
    if gain > MARGIN:
        knobs = _least_change(judge, knobs, wish, worths[place])
        gain = min(judge.worth(knobs) - worth_of(stands), judge.gain(knobs, wish, error))
    if gain > MARGIN:
        return Choice(knobs, judge.expect(knobs), judged[0], stands, gain)
    return Choice(wish, stands, judged[0], stands, gain)


def _least_change(judge: Judge, knobs: Knobs, wish: Knobs, worth: float) -> Knobs:
    """``knobs``, with the one of ``wish`` where that is as good."""
    same_seqs = Knobs(wish.running_seqs_max, knobs.step_tokens_max)
    if judge.worth(same_seqs) >= worth - TOLERANCE:
        return same_seqs
    same_tokens = Knobs(knobs.running_seqs_max, wish.step_tokens_max)
    return same_tokens if judge.worth(same_tokens) >= worth - TOLERANCE else knobs


def candidates(
    point: BatchPoint, offered: Offered, gaps: Knobs, objectives: ObjectivesConfig, config: BatchingConfig
) -> list[Knobs]:
    """Pairs that are judged, the safest for gaps first, each once."""
    hard_tokens, hard_seqs = point.step_tokens_hard, seqs_by_cache(point)
    tokens = hard_tokens if gaps.step_tokens_max is None else gaps.step_tokens_max
    seqs = hard_seqs if gaps.running_seqs_max is None else gaps.running_seqs_max
    budgets = [tokens, keep_up_tokens(point, objectives), *[int(tokens * factor) for factor in LARGER], hard_tokens]
    floor = max(tokens, step_tokens_floor(point.running, hard_tokens, config))
    budgets = sorted({min(hard_tokens, max(floor, budget)) for budget in budgets})
    limit_ms = max(objectives.itl_ms * MEAN_SHARE, BATCH_FACTOR_MIN * decode_ms(point.model, 1, offered.kv_tokens_seq))
    mean = min(float(hard_seqs), saturated_seqs(point.model, limit_ms, offered))
    by_mean = max(min(hard_seqs, config.running_seqs_min), int(mean))
    pairs = [Knobs(seqs, budget) for budget in budgets]
    pairs += [Knobs(by_mean, budget) for budget in budgets if by_mean < seqs]
    if not offered.refusing:
        pairs += [Knobs(min(hard_seqs, int(by_mean * WIDER)), hard_tokens), Knobs(hard_seqs, hard_tokens)]
    return list(dict.fromkeys(pairs))
