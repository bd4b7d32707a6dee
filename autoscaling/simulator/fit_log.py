"""From a log of requests to an engine profile: the law with which the simulated engine reproduces the log.

The modelled engine (``engine.py``) is given the log's requests at their times, and its answers are laid beside the
logged ones. The fit changes the law's coefficients (in logarithms, so that none becomes negative) until the squares of

* ``ln(decode time simulated / logged)`` for each request with two tokens or more,
* :data:`TTFT_WEIGHT` times ``ln((ttft simulated + s) / (ttft logged + s))``, ``s`` = :data:`TTFT_SOFT_MS`, and
* :data:`PRIOR_WEIGHT` times the logarithm of each coefficient's change, which holds those the log says nothing of

sum up to the least (Levenberg-Marquardt, one simulation per coefficient and round). What the profile has at 0 stays 0;
each point of a batch table is a coefficient of its own, none below the one before. Memory, limits and flags of the
engine are taken as they are: they are in the engine's configuration, not in its timing.

Timing is noisy and the sum has more than one valley, so a good start matters. Where the engine's per-second statistics
are at hand they give one (:func:`law_from_series`): a second in which ``running`` sequences wrote ``output_tps`` tokens
had steps of ``1000 * running / output_tps`` ms with ``prompt_tps * running / output_tps`` prompt tokens each, and
``fit.py`` makes a law of them.

The log may be cut in two: the law is fitted to the first requests and judged on the others. What this must not do: read
files, or hold scheduling rules of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from autoscaling.simulator.engine import Job, SimEngine
from autoscaling.simulator.fit import FitError, StepSample, fit_steps
from autoscaling.simulator.least_squares import Vector, minimise, not_negative
from autoscaling.simulator.report import percentile
from autoscaling.simulator.spec import EngineProfile, SimRequest, StepLaw
from autoscaling.simulator.workload.trace import TraceError

COLUMNS = ("input_tokens", "output_tokens", "arrival_s", "first_token_s", "last_token_s")
"""Columns a log must have; those of :data:`COLUMNS_KNOWN` may stand beside them."""

COLUMNS_KNOWN = ("request_id", "queued_s", "scheduled_s")

STATISTICS_COLUMNS = ("t", "prompt_throughput", "gen_throughput", "running", "kv_cache_pct")
"""Columns of per-second statistics: end of the second in s, tokens/s twice, requests, percent."""

WINDOW = 3
"""Seconds of statistics that are taken together: the samples of the counters are not taken at one time."""

TTFT_WEIGHT = 0.3
TTFT_SOFT_MS = 50.0
"""Differences of TTFT below this hardly count: a log's first tokens carry the noise of one step."""

PRIOR_WEIGHT = 0.1

ROUNDS_MAX = 12
DIFFERENCES = (0.1, 0.03)
"""Relative changes of a coefficient whose effect is looked at, one search after the other: small ones drown in the
noise of scheduling while the law is far off."""

SAMPLE_NS = 1_000_000_000
"""Pace of the samples of running requests and KV use, as in vLLM's own statistics."""

_COEFFICIENT_MIN = 1e-9


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request as an engine logged it; times in ms since any common start."""

    prompt_tokens: int
    output_tokens: int
    arrival_ms: float
    first_ms: float
    """First token."""
    last_ms: float

    @property
    def ttft_ms(self) -> float:
        """Time to first token."""
        return self.first_ms - self.arrival_ms

    @property
    def e2e_ms(self) -> float:
        """Time to the last token."""
        return self.last_ms - self.arrival_ms

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first; NaN below two tokens."""
        return (self.last_ms - self.first_ms) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan


@dataclass(frozen=True, slots=True)
class Statistics:
    """An engine's own statistics over one second."""

    end_ms: float
    """End of the second, on the log's clock."""
    prompt_tps: float
    output_tps: float
    running: int
    kv_share: float
    """0: not known."""


@dataclass(frozen=True, slots=True)
class LogRun:
    """What the simulated engine made of a log."""

    requests: list[LoggedRequest]
    """In the log's order, with simulated times."""
    running_max: int
    """Most requests in the batch, sampled each second."""
    kv_share_max: float
    """Highest use of the KV cache, likewise."""
    preemptions: int


@dataclass(frozen=True, slots=True)
class LogFit:
    """A profile fitted to a log."""

    profile: EngineProfile
    error_rms: float
    """Root mean square of the residuals above, per request."""
    simulations: int


def parse_request_log(lines: Iterable[str], name: str) -> list[LoggedRequest]:
    """Requests of a CSV with a header, by arrival. Raises :class:`TraceError` with the line."""
    rows = _rows(lines, name, COLUMNS, COLUMNS_KNOWN)
    return sorted((_logged(row, name, number) for number, row in rows), key=lambda r: r.arrival_ms)


def parse_statistics(lines: Iterable[str], name: str) -> list[Statistics]:
    """Per-second statistics of a CSV with a header. Raises :class:`TraceError` with the line."""
    return [
        Statistics(row["t"] * 1e3, row["prompt_throughput"], row["gen_throughput"], int(row["running"]),
                   row["kv_cache_pct"] / 100)
        for _, row in _rows(lines, name, STATISTICS_COLUMNS, ("waiting",))
    ]  # fmt: skip


def replay_log(profile: EngineProfile, log: Sequence[LoggedRequest]) -> LogRun:
    """Give the log's requests to an engine of ``profile`` at their times; the same log gives the same run.

    Raises:
        FitError: a request does not fit the profile's context or KV cache.
    """
    engine = SimEngine(profile, Random("0/log"), learn=False)
    start_ms = min(r.arrival_ms for r in log)
    offset_ms = profile.request_overhead_ms
    jobs: list[Job] = []
    peaks = _Peaks(engine)
    for i, logged in sorted(enumerate(log), key=lambda pair: (pair[1].arrival_ms, pair[0])):
        now_ns = round((logged.arrival_ms - start_ms + offset_ms) * 1e6)
        peaks.until(now_ns)
        engine.advance(now_ns)
        job = Job(SimRequest(i, now_ns, logged.prompt_tokens, logged.output_tokens, block_tokens=profile.block_tokens),
                  logged.output_tokens)  # fmt: skip
        try:
            engine.submit(job, now_ns)
        except ValueError as error:
            raise FitError(f"request {i + 1} of the log does not fit {profile.name}: {error}") from None
        jobs.append(job)
    while (wake_ns := engine.wake_ns()) is not None:
        peaks.until(wake_ns)
        engine.advance(wake_ns)
    done: dict[int, LoggedRequest] = {}
    for job in jobs:
        assert job.first_token_ns is not None, "an engine that has nothing to do has answered every request"
        assert job.finished_ns is not None, "likewise"
        late_ms = start_ms + profile.first_token_overhead_ms
        logged = log[job.request.index]
        done[job.request.index] = LoggedRequest(
            logged.prompt_tokens, logged.output_tokens, logged.arrival_ms, job.first_token_ns / 1e6 + late_ms,
            job.finished_ns / 1e6 + late_ms,
        )  # fmt: skip
    return LogRun(
        [done[i] for i in range(len(log))], peaks.running, peaks.kv_share, sum(job.preemptions for job in jobs)
    )


def law_from_series(
    series: Sequence[Statistics], log: Sequence[LoggedRequest], profile: EngineProfile, knots: Sequence[int] = ()
) -> StepLaw:
    """Rough law from per-second statistics, see the module's text, with a batch table where ``knots`` are given.

    ``c_ms`` and ``e_ms`` are ``profile``'s: within one log the KV cache grows with the batch, and nothing tells them
    apart. KV use comes from the statistics or, where they are silent, from the log.

    Raises:
        FitError: too few seconds in which tokens were written.
    """
    samples: list[StepSample] = []
    for i in range(len(series) - WINDOW + 1):
        window = series[i : i + WINDOW]
        running = sum(s.running for s in window) / WINDOW
        output_tps = sum(s.output_tps for s in window) / WINDOW
        if min(s.running for s in window) < 1 or output_tps <= 0:
            continue
        kv_tokens = sum(s.kv_share for s in window) / WINDOW * profile.kv_tokens
        kv_tokens = kv_tokens or sum(_kv_tokens(log, s.end_ms - 500) for s in window) / WINDOW
        step_s = running / output_tps
        prefill = round(sum(s.prompt_tps for s in window) / WINDOW * step_s)
        samples.append(StepSample(round(running), 0, prefill, step_s * 1e3 - profile.law.c_ms * kv_tokens / 1e3))
    return replace(fit_steps(samples, knots).law, c_ms=profile.law.c_ms, e_ms=profile.law.e_ms)


def fit_log(profile: EngineProfile, log: Sequence[LoggedRequest], fitted: int | None = None) -> LogFit:
    """``profile`` with the law that reproduces the first ``fitted`` requests of ``log`` best (all where ``None``).

    Every request is simulated, whether it counts or not. The result depends on where the search starts: a profile of a
    like device is a good start, one that is off by a factor of ten is not.

    Raises:
        FitError: no request, or one that the engine cannot take.
    """
    seen = len(log) if fitted is None else fitted
    if not 1 <= seen <= len(log):
        raise FitError(f"{seen} requests to fit to, the log has {len(log)}")
    runs = 0

    def residuals(x: Vector) -> Vector:
        nonlocal runs
        runs += 1
        made = replay_log(_with(profile, x), log).requests
        return [*_residuals(log[:seen], made), *(PRIOR_WEIGHT * v for v in x)]

    x, square = [0.0] * _unknowns(profile), math.inf
    for difference in DIFFERENCES:
        x, square = minimise(residuals, x, rounds_max=ROUNDS_MAX, step=difference)
    return LogFit(_with(profile, x), math.sqrt(square / seen), runs)


def log_metrics(requests: Sequence[LoggedRequest]) -> dict[str, float]:
    """What is compared between a log and its simulation, in ms: means and quantiles of TPOT, E2E and TTFT."""
    tpot = sorted(r.tpot_ms for r in requests if r.output_tokens > 1)
    e2e = sorted(r.e2e_ms for r in requests)
    ttft = sorted(r.ttft_ms for r in requests)
    return {
        "tpot_mean_ms": sum(tpot) / len(tpot) if tpot else math.nan,
        "tpot_p50_ms": percentile(tpot, 0.5),
        "e2e_p50_ms": percentile(e2e, 0.5),
        "e2e_p95_ms": percentile(e2e, 0.95),
        "ttft_p50_ms": percentile(ttft, 0.5),
        "ttft_p95_ms": percentile(ttft, 0.95),
    }


# --- inside -----------------------------------------------------------------------------------------------------------


class _Peaks:
    """Highest gauges of an engine, sampled at a fixed pace."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._next_ns = SAMPLE_NS
        self.running = 0
        self.kv_share = 0.0

    def until(self, now_ns: int) -> None:
        """Take the samples that are due before ``now_ns``."""
        while self._next_ns <= now_ns:
            gauges = self._engine.gauges(self._next_ns)
            self.running = max(self.running, gauges.running)
            self.kv_share = max(self.kv_share, gauges.kv_tokens_used / gauges.kv_tokens_max)
            self._next_ns += SAMPLE_NS


def _rows(
    lines: Iterable[str], name: str, columns: Sequence[str], others: Sequence[str]
) -> list[tuple[int, dict[str, float]]]:
    """Line number and the wanted columns of each row, finite and not negative."""
    rows: list[tuple[int, dict[str, float]]] = []
    header: list[str] = []
    for number, line in enumerate(lines, 1):
        cells = [cell.strip() for cell in line.rstrip("\n").split(",")]
        if not header:
            header = cells
            missing = [c for c in columns if c not in header]
            unknown = [c for c in header if c not in columns and c not in others]
            if missing or unknown:
                what = f"no column {missing[0]!r}" if missing else f"unknown column {unknown[0]!r}"
                raise TraceError(f"{what}; wanted: {', '.join(columns)}", name, number)
        elif cells != [""]:
            if len(cells) != len(header):
                raise TraceError(f"{len(cells)} cells, the header has {len(header)}", name, number)
            cell_of = dict(zip(header, cells, strict=True))
            rows.append((number, {c: _number(cell_of[c], c, name, number) for c in columns}))
    if not rows:
        raise TraceError("no row in it", name)
    return rows


def _number(text: str, column: str, name: str, number: int) -> float:
    try:
        value = float(text)
    except ValueError:
        raise TraceError(f"{column} must be a number, is {text!r}", name, number) from None
    if not math.isfinite(value) or value < 0:
        raise TraceError(f"{column} must be finite and not negative, is {text}", name, number)
    return value


def _logged(row: dict[str, float], name: str, number: int) -> LoggedRequest:
    prompt, output = int(row["input_tokens"]), int(row["output_tokens"])
    if (prompt, output) != (row["input_tokens"], row["output_tokens"]) or min(prompt, output) < 1:
        raise TraceError("input_tokens and output_tokens must be whole and at least 1", name, number)
    arrival, first, last = (row[c] * 1e3 for c in COLUMNS[2:])
    if not arrival <= first <= last:
        raise TraceError("arrival_s, first_token_s and last_token_s must not go back", name, number)
    return LoggedRequest(prompt, output, arrival, first, last)


def _kv_tokens(log: Sequence[LoggedRequest], at_ms: float) -> float:
    """KV tokens of the requests that were decoding, each written at its own even pace."""
    return sum(
        r.prompt_tokens + r.output_tokens * (at_ms - r.first_ms) / (r.last_ms - r.first_ms)
        for r in log
        if r.first_ms <= at_ms < r.last_ms
    )


def _residuals(logged: Sequence[LoggedRequest], simulated: Sequence[LoggedRequest]) -> Vector:
    out: Vector = []
    for real, made in zip(logged, simulated, strict=False):
        if real.last_ms > real.first_ms and made.last_ms > made.first_ms:
            out.append(math.log((made.last_ms - made.first_ms) / (real.last_ms - real.first_ms)))
        out.append(TTFT_WEIGHT * math.log((made.ttft_ms + TTFT_SOFT_MS) / (real.ttft_ms + TTFT_SOFT_MS)))
    return out


def _fitted(law: StepLaw) -> list[str]:
    """Names of the coefficients that are fitted, without the points of the batch table."""
    names = ("c_ms", "d_ms", "e_ms") if law.batch else ("a_ms", "b_ms", "c_ms", "d_ms", "e_ms")
    return [name for name in names if getattr(law, name) > 0]


def _unknowns(profile: EngineProfile) -> int:
    return len(_fitted(profile.law)) + len(profile.law.batch) + (profile.request_overhead_ms > 0)


def _with(profile: EngineProfile, x: Sequence[float]) -> EngineProfile:
    """``profile`` with each fitted figure multiplied by ``exp`` of its unknown."""
    factors = iter([math.exp(value) for value in x])
    law, table = profile.law, list[tuple[int, float]]()
    for name in _fitted(law):
        law = replace(law, **{name: max(_COEFFICIENT_MIN, getattr(law, name) * next(factors))})
    for running, ms in law.batch:
        table.append((running, max(ms * next(factors), table[-1][1] if table else 0.0)))
    if table:
        law = replace(law, batch=tuple(table))
        a_ms, b_ms = not_negative(((1 / ms, n / ms) for n, ms in table), (1.0 for _ in table), 2)
        law = replace(law, a_ms=a_ms, b_ms=b_ms)
    if profile.request_overhead_ms > 0:
        return replace(profile, law=law, request_overhead_ms=profile.request_overhead_ms * next(factors))
    return replace(profile, law=law)
