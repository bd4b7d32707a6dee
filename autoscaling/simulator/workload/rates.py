"""Request rates over time, and arrivals drawn from them.

A curve is piecewise linear. Arrivals are a renewal process in *operational time*, the integral of the rate: gaps with
mean 1 are drawn there and mapped back, so that the number of arrivals follows the curve exactly in the mean, and the
coefficient of variation (CV) of the gaps shapes bursts: 1 is Poisson, more is bursty, less is regular. Gaps are Gamma
distributed with shape ``1 / cv**2`` (BurstGPT and ServeGen describe production arrivals this way).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from autoscaling.simulator.workload.trace import TIME_S_MAX, Options, TraceError, check_number

RATE_RPS_MAX = 1e7
"""Highest rate of a curve."""
CV_MAX = 100.0
_SEGMENTS_PER_PERIOD = 240
"""Of a sine; the chord is within 0.01 % of the amplitude."""


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Rate in requests per second, linear between ``points`` of ``(t_s, rate_rps)``, 0 after the last one.

    Two points at one time are a step. ``periodic`` repeats the curve for ever.
    """

    points: tuple[tuple[float, float], ...]
    name: str = "rate"
    periodic: bool = False

    def __post_init__(self) -> None:
        if len(self.points) < 2:
            raise TraceError("a rate needs at least two points", self.name)
        last_s = 0.0
        for t_s, rate_rps in self.points:
            if not (0.0 <= rate_rps <= RATE_RPS_MAX):
                raise TraceError(f"rate must be in 0..{RATE_RPS_MAX:,.0f} per second, is {rate_rps:g}", self.name)
            if not (last_s <= t_s <= TIME_S_MAX):
                raise TraceError(f"times must grow up to {TIME_S_MAX:g} s, {t_s:g} follows {last_s:g}", self.name)
            last_s = t_s
        if self.total <= 0.0:
            raise TraceError("the rate is zero all the time: no request would ever come", self.name)

    @property
    def total(self) -> float:
        """Expected number of arrivals over all points (of one period)."""
        return math.fsum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(self.points))

    @property
    def length_s(self) -> float:
        """Time from 0 to the last point."""
        return self.points[-1][0]

    def rate_rps(self, t_s: float) -> float:
        """Rate at ``t_s``; at a step, the rate after it."""
        t_s = t_s % self.length_s if self.periodic else t_s
        for (t0, r0), (t1, r1) in pairwise(self.points):
            if t0 <= t_s < t1:
                return r0 + (r1 - r0) * (t_s - t0) / (t1 - t0)
        return 0.0

    # --- kinds of curves ----------------------------------------------------------------------------------------------

    @staticmethod
    def constant(rate_rps: float) -> RateCurve:
        """One rate for ever."""
        return RateCurve(((0.0, rate_rps), (3600.0, rate_rps)), f"constant {rate_rps:g}/s", periodic=True)

    @staticmethod
    def steps(steps: Sequence[tuple[float, float]], name: str = "steps", periodic: bool = False) -> RateCurve:
        """``(duration_s, rate_rps)`` one after the other."""
        points: list[tuple[float, float]] = []
        t_s = 0.0
        for duration_s, rate_rps in steps:
            check_number("duration_s of a step", duration_s, above=0.0, to=TIME_S_MAX)
            points += [(t_s, rate_rps), (t_s + duration_s, rate_rps)]
            t_s += duration_s
        return RateCurve(tuple(points), name, periodic)

    @staticmethod
    def ramp(from_rps: float, to_rps: float, duration_s: float) -> RateCurve:
        """Straight from one rate to another, then nothing."""
        return RateCurve(((0.0, from_rps), (duration_s, to_rps)), f"ramp {from_rps:g}-{to_rps:g}/s")

    @staticmethod
    def sinusoid(low_rps: float, high_rps: float, period_s: float) -> RateCurve:
        """Between ``low_rps`` (at 0) and ``high_rps`` (half a period later) for ever; a day is a period of 86,400 s."""
        check_number("period_s", period_s, above=0.0, to=TIME_S_MAX)
        middle, swing = (low_rps + high_rps) / 2, (high_rps - low_rps) / 2
        n = _SEGMENTS_PER_PERIOD
        points = tuple((period_s * i / n, middle - swing * math.cos(2 * math.pi * i / n)) for i in range(n + 1))
        return RateCurve(points, f"sinusoid {low_rps:g}-{high_rps:g}/s", periodic=True)

    @staticmethod
    def flash_crowd(
        base_rps: float, peak_rps: float, at_s: float, rise_s: float, hold_s: float, fall_s: float, duration_s: float
    ) -> RateCurve:
        """``base_rps`` with one peak that begins at ``at_s``; ends after ``duration_s``."""
        marks = [0.0, at_s, at_s + rise_s, at_s + rise_s + hold_s, at_s + rise_s + hold_s + fall_s, duration_s]
        rates = [base_rps, base_rps, peak_rps, peak_rps, base_rps, base_rps]
        return RateCurve(tuple(zip(marks, rates, strict=True)), f"flash crowd {base_rps:g}-{peak_rps:g}/s")

    # --- options ------------------------------------------------------------------------------------------------------

    def with_options(self, options: Options) -> RateCurve:
        """The curve from ``start_s`` on, compressed and scaled; a periodic one that is cut off starts in its phase."""
        points = self.points
        if options.start_s:
            points = self._from(options.start_s)
        return RateCurve(tuple((t / options.compress, r * options.scale) for t, r in points), self.name, self.periodic)

    def _from(self, start_s: float) -> tuple[tuple[float, float], ...]:
        if self.periodic:
            start_s %= self.length_s
        elif start_s >= self.length_s:
            raise TraceError(f"start_s {start_s:g} is after the end at {self.length_s:g} s", self.name)
        after = [(t - start_s, r) for t, r in self.points if t > start_s]
        rest = ((0.0, self.rate_rps(start_s)), *after)
        if not self.periodic:
            return rest
        shift = self.length_s - start_s
        before = [(t + shift, r) for t, r in self.points if t <= start_s]
        return (*rest, *before, (self.length_s, self.rate_rps(start_s)))


def gamma_gaps(cv: float) -> Callable[[Random], float]:
    """Draws gaps with mean 1 and coefficient of variation ``cv``; 0 is a metronome."""
    check_number("cv", cv, to=CV_MAX)
    if cv == 0.0:
        return lambda _rng: 1.0
    if cv == 1.0:
        return lambda rng: rng.expovariate(1.0)
    shape, scale = 1.0 / cv**2, cv**2
    return lambda rng: rng.gammavariate(shape, scale)


def first_gamma_gap(cv: float) -> Callable[[Random], float]:
    """Draws the time to the first arrival of a process that has run for ever: a part of a gap drawn by its length.

    Longer gaps are met more often; a Gamma variate drawn by its length is one with its shape greater by 1.
    """
    if cv == 0.0:
        return lambda rng: rng.random()
    shape, scale = 1.0 / cv**2, cv**2
    return lambda rng: rng.gammavariate(shape + 1.0, scale) * rng.random()


def arrivals_ns(curve: RateCurve, rng: Random, options: Options, cv: float = 1.0) -> Iterator[int]:
    """Times of arrivals on ``curve`` (with ``options``), by growing time; ends with the curve, duration or limit."""
    curve = curve.with_options(options)
    made, end_ns = 0, options.end_ns
    times = _crossings(curve, rng, gamma_gaps(cv), first_gamma_gap(cv)(rng))
    while made != options.limit:
        at_s = next(times, math.inf)
        if at_s * 1e9 >= end_ns or at_s > TIME_S_MAX:
            return
        yield round(at_s * 1e9)
        made += 1


def _crossings(curve: RateCurve, rng: Random, gap: Callable[[Random], float], left: float) -> Iterator[float]:
    """Times at which the integral of the rate passes the sums of the gaps, the first of which is ``left``."""
    offset_s, total = 0.0, curve.total
    while offset_s <= TIME_S_MAX:
        if curve.periodic:  # whole periods without an arrival are passed at once, however short they are
            empty = left // total
            offset_s, left = offset_s + empty * curve.length_s, left - empty * total
        for (t0, r0), (t1, r1) in pairwise(curve.points):
            length = t1 - t0
            area, done = length * (r0 + r1) / 2, 0.0
            while done + left <= area and area > 0.0:
                done += left
                yield offset_s + t0 + _time_of(done, length, r0, r1)
                left = gap(rng)
            left -= area - done
        if not curve.periodic:
            return
        offset_s += curve.length_s


def _time_of(area: float, length_s: float, r0: float, r1: float) -> float:
    """Time within a segment at which its area from the start is ``area``: root of ``r0 t + (r1 - r0) t^2 / 2 L``."""
    slope = (r1 - r0) / length_s
    if abs(slope) * length_s <= 1e-12 * max(r0, r1):
        return min(length_s, area / max(r0, r1))
    root = math.sqrt(max(0.0, r0 * r0 + 2.0 * slope * area))
    return min(length_s, max(0.0, 2.0 * area / (r0 + root)))
