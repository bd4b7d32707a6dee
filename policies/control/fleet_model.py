"""What a fleet would do with the present load at another setting: the figures that levers are weighed by.

From the step law of each engine (``policies/step_model.py``) and Little's law. With ``P`` uncached prompt and ``O``
output tokens of a request, ``K`` KV tokens of a sequence::

    w = (P d + O (b + c K / 1000)) / 1000       seconds an engine works for one request, whatever else it runs
    gap = a / (1 - r w)                         mean token gap at r requests per second: a step's fixed cost, stretched
    r_max = (1 - a / gap_max) / w               requests per second within a gap

The router sends requests where they are served soonest, so that engines have about the same gap ``g``; the sum of
``(1 - a / g) / w`` over those with ``a < g`` is what comes, which gives ``g``. An engine whose ``a`` alone is longer
than the objective (a device that became slow) carries nothing that counts::

    met share = P(gap <= itl) * P(TTFT <= ttft) * carried / comes        what is not carried is refused in time
    P(gap <= itl)   = normal((ln itl - ln g) / spread + spread / 2)      lognormal around the mean gap
    P(TTFT <= ttft) = 1 - load * exp(-(TTFT_SHARE ttft - own) / wait)    wait: mean of a queue with the fleet's load
    successes per USD = met share * arrivals per hour / (replicas * price)

How far they differ follows from the same law. ``n`` sequences run in the fleet, a birth-death process whose death rate
``n / (O gap(n))`` grows only by ``1 - x`` of itself per sequence, with ``x = r w`` of what the engines could work: its
variance is ``n / (1 - x)`` and what it was is forgotten in ``1 / (1 - x)`` lifetimes (linear noise approximation). A
request sees the mean over its own life, and the prompts that join its engine meanwhile::

    spread^2 = x^2 / (n (1 - x)) * f(1 - x) + (P d / (O g))^2 (1 + cv2) joins      f(t) = 2 (t - 1 + exp(-t)) / t^2

so that a large fleet keeps its pace nearer to what it carries than a small one. ``tests/sim/test_fleet_model.py``
holds both against simulated fleets.

The law is checked against what is measured, twice. The *work factor* is the one with which the measured mean gap comes
out; it multiplies ``w``. The *load factor* rises while fewer requests keep their promises than predicted although
others wait or are refused (what comes is heavier than its means say), and falls back while more do; it multiplies what
comes. Both follow slowly and within bounds.

Estimates for comparing plans, good to some ten percent. What this must not do: choose, or remember more than means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from policies.batching import OfferedLoad
from policies.config import ObjectivesConfig
from policies.control.signals import ReplicaSignals, Signals
from policies.control.windows import WINDOW_MS
from policies.types import ReplicaId, ReplicaReport

WINDOW_S = WINDOW_MS / 1000
"""What rates are taken over."""

HALF_LIFE_S = 20.0
"""Half-life of the means per request and of the work factor."""

ARRIVALS_HALF_LIFE_S = 8.0
"""Half-life of the rate of arrivals, beside the window it is counted in: chance alone moves it by a tenth."""

REQUESTS_MIN = 5.0
"""Requests that must have been seen, fading with :data:`HALF_LIFE_S`, before anything is predicted."""

KV_TOKENS_PRIOR = 256.0
"""KV tokens of a sequence before any ran."""

SPREAD_MIN = 0.05
"""Least standard deviation of the logarithm of a request's mean gap: steps differ."""

PROMPT_CV2 = 1.0
"""Squared coefficient of variation of prompts, as ``policies/queueing.py`` takes it."""

PACE_SHARE = 0.85
"""Share of the gap objective at which a full fleet is reckoned."""

TTFT_SHARE = 0.8
"""Share of the TTFT objective beyond which a forecast is refused (``admission.forecast_share`` as it begins)."""

FACTOR_MIN, FACTOR_MAX = 0.6, 1.8
"""Bounds of the work factor."""

LOAD_FACTOR_MAX = 1.3
"""Most that the load is taken to be heavier than it looks; never lighter."""

LOAD_FACTOR_UP, LOAD_FACTOR_DOWN = 1.01, 0.99
"""Change of the load factor in a tick."""

MET_TOLERANCE = 0.03
"""Difference of the met share that is noise."""

ENDED_MIN = 30.0
"""Requests that must have ended in the window before their met share says anything."""

ERROR_SHARE_MAX = 0.5
"""A step model that is wrong by more than this on average is not used."""

SLOW_FACTOR = 2.0
"""An engine is slow when its fixed step cost is above this multiple of the fleet's median, and above the objective."""


@dataclass(frozen=True, slots=True)
class Load:
    """What comes, per request and per second."""

    arrivals_ps: float
    prompt_tokens: float
    """Mean of a request, those found in prefix caches not counted."""
    output_tokens: float
    kv_tokens_seq: float
    """Mean KV tokens of a running sequence."""

    def times(self, factor: float) -> Load:
        """The same requests, ``factor`` times as many."""
        return Load(self.arrivals_ps * factor, self.prompt_tokens, self.output_tokens, self.kv_tokens_seq)


class LoadMeter:
    """Follows the load from tick to tick."""

    def __init__(self) -> None:
        self._last_ns: int | None = None
        self._output = [0.0, 0.0]
        self._prompt = [0.0, 0.0]
        self._kv = [0.0, 0.0]
        self._arrivals = [0.0, 0.0]

    def measure(self, signals: Signals, now_ns: int) -> Load | None:
        """The load at this tick; ``None`` while too little is known."""
        elapsed_s = 1.0 if self._last_ns is None else max(0.0, (now_ns - self._last_ns) / 1e9)
        self._last_ns = now_ns
        traffic, work = signals.traffic, signals.work
        if traffic is None or work is None:
            return None
        keep = 0.5 ** (elapsed_s / ARRIVALS_HALF_LIFE_S)
        _fade(self._arrivals, keep, traffic.arrivals_ps * elapsed_s, elapsed_s)
        keep = 0.5 ** (elapsed_s / HALF_LIFE_S)
        hit = work.prefix_hit_share or 0.0
        _fade(self._output, keep, traffic.output_tps * elapsed_s, traffic.succeeded_ps * elapsed_s)
        _fade(self._prompt, keep, traffic.routed_prompt_tps * (1 - hit) * elapsed_s, traffic.routed_ps * elapsed_s)
        _fade(self._kv, keep, work.kv_tokens_used * elapsed_s, work.running * elapsed_s)
        if self._output[1] < REQUESTS_MIN or self._prompt[1] < REQUESTS_MIN:
            return None
        kv = self._kv[0] / self._kv[1] if self._kv[1] > 0 else KV_TOKENS_PRIOR
        arrivals_ps = self._arrivals[0] / self._arrivals[1] if self._arrivals[1] > 0 else traffic.arrivals_ps
        return Load(arrivals_ps, self._prompt[0] / self._prompt[1], max(1.0, self._output[0] / self._output[1]), kv)


def _fade(pair: list[float], keep: float, total: float, weight: float) -> None:
    pair[0] = pair[0] * keep + total
    pair[1] = pair[1] * keep + weight


class Line(NamedTuple):
    """One engine's speed under one load."""

    replica_id: ReplicaId
    fixed_ms: float
    """``a``: what a step takes whatever it holds."""
    work_s: float
    """``w``."""
    report: ReplicaReport
    """What it was read from."""


class _Offered(Mapping[ReplicaId, OfferedLoad]):
    """Offered load by replica, worked out for those who are asked for."""

    def __init__(self, lines: Mapping[ReplicaId, Line], one: Callable[[Line], OfferedLoad]) -> None:
        self._lines, self._one = lines, one

    def __getitem__(self, replica_id: ReplicaId) -> OfferedLoad:
        return self._one(self._lines[replica_id])

    def __iter__(self) -> Iterator[ReplicaId]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


class Outlook(NamedTuple):
    """What is predicted of one plan."""

    replicas: int
    met_share: float
    successes_per_usd: float
    ttft_ms: float
    itl_ms: float
    capacity_ps: float
    """Requests per second within the objectives."""

    def figures(self) -> dict[str, float]:
        """In the words of ``policies.steering.Alternative.predicted``."""
        return {
            "successes_per_usd": round(self.successes_per_usd, 2),
            "met_share": round(self.met_share, 4),
            "ttft_ms": round(self.ttft_ms, 1),
            "itl_ms": round(self.itl_ms, 2),
        }


class FleetModel:
    """Predictions for one fleet; :meth:`observe` once a tick, then :meth:`outlook` for as many plans as one likes."""

    def __init__(self, objectives: ObjectivesConfig, usd_per_hour: float, samples_min: int) -> None:
        self._objectives = objectives
        self._usd_per_hour = usd_per_hour
        self._samples_min = samples_min
        self._meter = LoadMeter()
        self.load: Load | None = None
        """``None``: nothing can be predicted."""
        self.work_factor = 1.0
        self.load_factor = 1.0
        self.slow: tuple[ReplicaId, ...] = ()
        """Engines that cannot hold the gap objective with even one sequence, while others can."""
        self.replaced: frozenset[ReplicaId] = frozenset()
        """Those of them that are being replaced: they count as what comes in their place."""
        self._lines: list[Line] = []
        self._middle: Line | None = None
        self._prompt_ms = 0.0
        """A whole mean prompt on the middle one, alone in its steps."""
        self._prefill_ms = 0.0
        """The same without what its steps cost whatever they hold."""
        self._serving = 0
        self._wasted = 0.0
        self._inverse = self._fixed = 0.0
        """Sums of ``1 / w`` and ``a / w`` over :attr:`_lines`."""

    @property
    def quick(self) -> list[ReplicaId]:
        """Engines whose law is known and holds the gap objective."""
        return [line.replica_id for line in self._lines]

    @property
    def lost(self) -> list[ReplicaId]:
        """Slow engines that nobody replaces."""
        return [r for r in self.slow if r not in self.replaced]

    @property
    def work_s(self) -> float | None:
        """Seconds the middle engine works for one request, whatever else it runs; ``None``: nobody can tell."""
        return self._middle.work_s if self._middle is not None else None

    def reconfigure(self, objectives: ObjectivesConfig) -> None:
        """Predict for other objectives from now on."""
        self._objectives = objectives

    def observe(self, signals: Signals, now_ns: int) -> None:
        """Take in one tick: load, speeds, and how far the law was off."""
        self.load = self._meter.measure(signals, now_ns)
        self._lines, self._middle, self.slow = [], None, ()
        serving = signals.serving
        self._serving = len(serving)
        if self.load is None:
            return
        lines = self._lines_of(serving, self.load)
        if not lines:
            return
        lines.sort(key=_fixed_ms)
        self._middle = lines[len(lines) // 2]
        self._prompt_ms, self._prefill_ms = _prompt_ms(self._middle.report, self.load)
        limit_ms = max(self._objectives.itl_ms, SLOW_FACTOR * lines[0].fixed_ms)
        self._lines = [line for line in lines if line.fixed_ms < limit_ms] or lines
        self.slow = tuple(line.replica_id for line in lines[len(self._lines) :])
        self._inverse = sum([1 / line.work_s for line in self._lines])
        self._fixed = sum([line.fixed_ms / line.work_s for line in self._lines])
        self._wasted = self._wasted_share(serving)
        self._learn(signals)
        self._check(signals)

    def _check(self, signals: Signals) -> None:
        """Follow the load factor by the measured met share."""
        traffic, fleet = signals.traffic, signals.fleet
        if traffic is None or self._serving == 0 or traffic.demand_ps * WINDOW_S < ENDED_MIN:
            return
        if self.slow or (fleet is not None and fleet.replicas_running < fleet.replicas_target):
            return  # what is missing is known, and on its way
        predicted, measured = self.outlook(self._serving), traffic.met_share
        if predicted is None or measured is None:
            return
        refused_ps = sum(c.refused_ps for c in traffic.by_class.values())
        if measured < predicted.met_share - MET_TOLERANCE and (signals.queue or refused_ps > 0):
            self.load_factor = min(LOAD_FACTOR_MAX, self.load_factor * LOAD_FACTOR_UP)
        elif measured > predicted.met_share - MET_TOLERANCE / 2:
            self.load_factor = max(1.0, self.load_factor * LOAD_FACTOR_DOWN)

    def _lines_of(self, replicas: Sequence[ReplicaSignals], load: Load) -> list[Line]:
        """Speeds of those whose step model can be trusted."""
        samples_min, factor = self._samples_min, self.work_factor
        prompt, output, kv_tokens = load.prompt_tokens, load.output_tokens, load.kv_tokens_seq
        lines = []
        for replica in replicas:
            latest = replica.latest
            model = latest.step_model
            if model is None or model.samples < samples_min or (model.error_share or 0.0) > ERROR_SHARE_MAX:
                continue
            seq_ms = model.b_ms + model.c_ms * kv_tokens / 1000
            work_ms = max(1e-6, (prompt * model.d_ms + output * seq_ms) * factor)
            lines.append(Line(latest.replica_id, max(1e-6, model.a_ms), work_ms / 1000, latest))
        return lines

    def _wasted_share(self, serving: Sequence[ReplicaSignals]) -> float:
        """Share of the tokens that come from slow engines, so late that they count for nothing."""
        if not self.slow:
            return 0.0
        slow = set(self.slow)
        total = sum(r.decode_tps for r in serving)
        return sum(r.decode_tps for r in serving if r.replica_id in slow) / total if total > 0 else 0.0

    def _learn(self, signals: Signals) -> None:
        """Follow the work factor with which the law gives the measured mean gap."""
        work, load = signals.work, self.load
        measured = work.itl.mean_ms() if work is not None and work.itl.count >= 50 else None
        if measured is None or load is None or self.slow or signals.queue:
            return
        inverse, fixed = self._sums(self._serving)
        share = load.arrivals_ps / inverse if inverse > 0 else 0.0
        mean_fixed = fixed / inverse if inverse > 0 else 0.0
        if share < 0.1 or share > 1.5 or mean_fixed <= 0:
            return
        stretch = max(0.0, 1 - mean_fixed / measured) / share
        target = self.work_factor * max(0.5, min(2.0, stretch))
        self.work_factor = max(FACTOR_MIN, min(FACTOR_MAX, self.work_factor + 0.05 * (target - self.work_factor)))

    def _sums(self, replicas: int, repaired: bool = False) -> tuple[float, float]:
        """Sums of ``1 / w`` and ``a / w`` over a fleet of that many; those not known are like the median.

        ``repaired``: all slow engines are as well, not only those that are being replaced.
        """
        middle = self._middle
        assert middle is not None
        more = replicas - (0 if repaired else len(self.lost)) - len(self._lines)
        return self._inverse + more / middle.work_s, self._fixed + more * middle.fixed_ms / middle.work_s

    def offered(self, signals: Signals, refusing: bool) -> Mapping[ReplicaId, OfferedLoad]:
        """What is sent to each engine whose speed is known: more to the faster ones, as the router does."""
        load = self.load
        if load is None or self._inverse <= 0:
            return {}
        gap_ms = self._fixed / max(1e-9, self._inverse - load.arrivals_ps)
        saturated = load.arrivals_ps >= 0.95 * self._inverse
        waiting = (signals.traffic.queued if signals.traffic else 0) / max(1, len(self._lines))
        prompt, output = load.prompt_tokens, load.output_tokens
        scale = load.arrivals_ps / self._inverse

        def one(line: Line) -> OfferedLoad:
            arrivals_ps = scale if saturated else max(0.0, 1 - line.fixed_ms / gap_ms)
            return OfferedLoad(arrivals_ps / line.work_s, prompt, output, waiting, refusing)

        return _Offered({line.replica_id: line for line in self._lines}, one)

    def outlook(
        self, replicas: int, load: Load | None = None, without_slow: bool = False, repaired: bool = False
    ) -> Outlook | None:
        """What a fleet of ``replicas`` would do with ``load`` (the present one); ``None``: nobody can tell.

        ``without_slow``: slow engines get no requests. ``repaired``: none is slow.
        """
        load = load or self.load
        if load is None or self._middle is None or replicas < 1:
            return None
        objectives, middle = self._objectives, self._middle
        inverse, fixed = self._sums(replicas, repaired)
        usd_per_hour = replicas * self._usd_per_hour
        arrivals, heavy = load.arrivals_ps, load.arrivals_ps * self.load_factor
        aim_ms = max(objectives.itl_ms * PACE_SHARE, 1.2 * middle.fixed_ms)
        capacity = max(0.0, inverse - fixed / aim_ms)
        wasted = 0.0 if without_slow or repaired else self._wasted
        carried = min(heavy, capacity)
        if carried <= 0:
            met, itl_ms, ttft_ms = 1.0 if heavy <= 0 else 0.0, middle.fixed_ms, self._prompt_ms + middle.fixed_ms
        else:
            itl_ms = aim_ms if heavy >= capacity else max(1e-6, fixed / (inverse - carried))
            share = carried / inverse
            own_ms = self._prompt_ms + itl_ms
            wait_ms = max(1e-6, share / (1 - share) * self._prompt_ms / math.sqrt(replicas))
            late = share * math.exp(-max(0.0, TTFT_SHARE * objectives.ttft_ms - own_ms) / wait_ms)
            spread = self._spread(load, replicas, carried, share, itl_ms)
            pace = _normal(math.log(objectives.itl_ms / itl_ms) / spread + spread / 2)
            met = pace * (1 - late) * carried / heavy
            ttft_ms = own_ms + wait_ms * math.log(max(1.0, share / (1 - objectives.quantile)))
        met = max(0.0, min(1.0, met * (1 - wasted)))
        per_usd = met * arrivals * 3_600 / usd_per_hour if usd_per_hour > 0 else 0.0
        return Outlook(replicas, met, per_usd, ttft_ms, itl_ms, capacity)

    def _spread(self, load: Load, replicas: int, arrivals_ps: float, share: float, gap_ms: float) -> float:
        """Standard deviation of the logarithm of a request's mean gap; see the module."""
        life_s = load.output_tokens * gap_ms / 1_000
        idle = max(1e-6, 1 - share)
        seen = 2 * (idle - 1 + math.exp(-idle)) / idle**2
        sequences = share**2 / (max(1.0, arrivals_ps * life_s) * idle) * seen
        joins = (1 + PROMPT_CV2) * arrivals_ps / replicas * life_s
        return math.sqrt(sequences + (self._prefill_ms / (life_s * 1_000)) ** 2 * joins + SPREAD_MIN**2)

    def least(self, low: int, high: int, load: Load | None = None, repaired: bool = False) -> int | None:
        """Fewest replicas whose met share is within the objectives' quantile of what ``high`` replicas reach."""
        best = self.outlook(high, load, True, repaired)
        if best is None:
            return None
        wanted = best.met_share * self._objectives.quantile
        while low < high:
            middle = (low + high) // 2
            outlook = self.outlook(middle, load, True, repaired)
            if outlook is not None and outlook.met_share >= wanted:
                high = middle
            else:
                low = middle + 1
        return low


_fixed_ms = attrgetter("fixed_ms")


def _prompt_ms(report: ReplicaReport, load: Load) -> tuple[float, float]:
    """A whole mean prompt, alone in its steps, on an engine with a step model; and without their fixed cost."""
    model = report.step_model
    assert model is not None
    budget = report.knobs.step_tokens_max or report.step_tokens_hard
    prefill_ms = load.prompt_tokens * model.d_ms
    return prefill_ms + math.ceil(load.prompt_tokens / max(1, budget)) * model.a_ms, prefill_ms


def _normal(x: float) -> float:
    """Standard normal distribution function."""
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))
