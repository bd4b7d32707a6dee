"""What a run was worth: latencies, objectives kept, goodput and cost.

The definitions everybody's figures rest on::

    success       the whole answer came, TTFT <= ttft_ms, and TPOT <= itl_ms where there were two tokens or more
    left          the client hung up while every promise still held: neither a success nor a miss
    attainment    successes / (requests - left)
    goodput       successes per second, from the run's start to the end of its last request
    task          requests of one session; succeeds when all of them did and its last one was made

Times are what clients saw, their own repetitions included. Percentiles of TTFT and TPOT are over the requests that
have one, linear between two ranks; refused and failed requests are in none of them but in the attainment. Gaps between
tokens (ITL) come from the engines' histograms and are as coarse as those; TPOT, a request's mean gap, is exact.

Decides nothing and knows no file or terminal: comparisons and JSON are in ``comparison.py``, tables and plots in
``deployments/simulation/``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoscaling.simulator.gaps import GapCounts
from autoscaling.simulator.records import FleetSample, PoolUse, Records, RunResult
from policies.config import ObjectivesConfig

SUCCEEDED, FAILED, CANCELLED, REFUSED, LOST = "succeeded", "failed", "cancelled", "refused", "lost"
"""Outcomes of ``records.Row``."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of one time in ms; NaN where nothing was measured."""

    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    mean_ms: float
    count: int


@dataclass(frozen=True, slots=True)
class PoolSummary:
    """One pool: cost, and how its number of replicas moved."""

    profile: str
    role: str
    gpu_hours: float
    usd: float
    starts: int
    replicas_max: int
    replicas_mean: float
    direction_changes: int
    """Times the target turned from rising to falling or back: what flapping looks like."""
    preemptions: int
    busy_share: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. See the module for the definitions."""

    name: str
    seed: int
    digest: str
    ttft_ms_max: float
    """The objectives judged by."""
    itl_ms_max: float
    quantile: float
    span_s: float
    """From the run's start to the end of its last request."""
    requests: int
    completed: int
    """The whole answer came, however late."""
    successes: int
    left: int
    tasks: int
    tasks_succeeded: int
    ttft: Latency
    itl: Latency
    tpot: Latency
    e2e: Latency
    ttft_quantile_ms: float
    """TTFT at the objectives' quantile."""
    itl_quantile_ms: float
    ttft_kept: int
    """Requests whose first token came in time."""
    tpot_kept: int
    """Completed requests whose mean gap was within the objective."""
    prompt_tokens: int
    output_tokens: int
    """Delivered."""
    prefix_query_tokens: int
    prefix_hit_tokens: int
    endings: Mapping[str, Mapping[str, int]]
    """Requests that did not complete: outcome, then reason, then how many; most frequent first."""
    retries: int
    """Further attempts by gateways."""
    client_retries: int
    """Repetitions by clients."""
    pools: tuple[PoolSummary, ...]
    counters: Mapping[str, int]

    @property
    def attainment(self) -> float:
        """Share of the requests that were successes; NaN without requests."""
        return ratio(self.successes, self.requests - self.left)

    @property
    def task_attainment(self) -> float:
        """Share of the tasks that succeeded."""
        return ratio(self.tasks_succeeded, self.tasks)

    @property
    def goodput_ps(self) -> float:
        """Successes per second."""
        return ratio(self.successes, self.span_s)

    @property
    def throughput_ps(self) -> float:
        """Completed requests per second."""
        return ratio(self.completed, self.span_s)

    @property
    def output_tps(self) -> float:
        """Output tokens delivered per second."""
        return ratio(self.output_tokens, self.span_s)

    @property
    def hit_share(self) -> float:
        """Share of the looked-up prompt tokens that were in the cache."""
        return ratio(self.prefix_hit_tokens, self.prefix_query_tokens)

    @property
    def gpu_hours(self) -> float:
        """Of all pools."""
        return math.fsum(p.gpu_hours for p in self.pools)

    @property
    def usd(self) -> float:
        """Of all pools."""
        return math.fsum(p.usd for p in self.pools)

    @property
    def successes_per_usd(self) -> float:
        """NaN for a fleet that cost nothing."""
        return ratio(self.successes, self.usd)

    @property
    def tasks_per_usd(self) -> float:
        """Successful tasks per dollar: the project's objective."""
        return ratio(self.tasks_succeeded, self.usd)

    @property
    def goodput_per_gpu(self) -> float:
        """Successes per second and GPU, by the mean number of GPUs held during the run."""
        return ratio(self.successes, self.gpu_hours * 3_600)

    def ended(self, outcome: str) -> int:
        """Requests that ended as ``outcome``, one of those of ``records.Row`` other than succeeded."""
        return sum(self.endings.get(outcome, {}).values())


def summarise(result: RunResult, objectives: ObjectivesConfig, name: str | None = None) -> Summary:
    """Judge a run by ``objectives``; ``name`` replaces the scenario's in comparisons."""
    records = result.records
    kept = _Kept(records, objectives)
    itl = GapCounts()
    for pool in result.pools:
        itl.add(pool.itl)
    ttfts = sorted_known(records.ttft_ms)
    span_s = max((a / 1e9 + e / 1e3 for a, e in zip(records.arrival_ns, records.e2e_ms, strict=True)), default=0.0)
    return Summary(
        name=name or result.scenario,
        seed=result.seed,
        digest=result.digest,
        ttft_ms_max=objectives.ttft_ms,
        itl_ms_max=objectives.itl_ms,
        quantile=objectives.quantile,
        span_s=span_s,
        requests=len(records),
        completed=kept.completed,
        successes=kept.successes,
        left=kept.left,
        tasks=kept.tasks,
        tasks_succeeded=kept.tasks_succeeded,
        ttft=_latency(ttfts),
        itl=_gap_latency(itl),
        tpot=_latency(sorted(kept.tpots)),
        e2e=_latency(sorted(kept.e2es)),
        ttft_quantile_ms=percentile(ttfts, objectives.quantile),
        itl_quantile_ms=_known(itl.quantile_ms(objectives.quantile)),
        ttft_kept=kept.ttft_kept,
        tpot_kept=kept.tpot_kept,
        prompt_tokens=sum(records.prompt_tokens),
        output_tokens=sum(records.output_tokens),
        prefix_query_tokens=sum(p.prefix_query_tokens for p in result.pools),
        prefix_hit_tokens=sum(p.prefix_hit_tokens for p in result.pools),
        endings=_endings(records),
        retries=sum(n - 1 for n in records.attempts if n > 1),
        client_retries=sum(n - 1 for n in records.tries if n > 1),
        pools=tuple(_pool(p, result.end_ns) for p in result.pools),
        counters=dict(sorted(result.counters.items())),
    )


class _Kept:
    """One pass over the rows: which requests and tasks succeeded."""

    def __init__(self, records: Records, objectives: ObjectivesConfig) -> None:
        self.completed = self.successes = self.left = self.ttft_kept = self.tpot_kept = 0
        self.tpots, self.e2es = array("d"), array("d")
        self.tasks = self.tasks_succeeded = 0
        good = [False] * len(records.tasks.names)
        """Tasks whose last request was made."""
        bad = [False] * len(records.tasks.names)
        outcomes = records.outcomes.names
        ttft_max, itl_max = objectives.ttft_ms, objectives.itl_ms
        for outcome, ttft, e2e, tokens, task, last in zip(
            records.outcome, records.ttft_ms, records.e2e_ms, records.output_tokens, records.task, records.task_last,
            strict=True,
        ):  # fmt: skip
            word = outcomes[outcome]
            tpot = (e2e - ttft) / (tokens - 1) if tokens > 1 else 0.0
            in_time, in_pace = ttft <= ttft_max, not tpot > itl_max
            self.ttft_kept += in_time
            left = word == CANCELLED and (in_time or (math.isnan(ttft) and e2e <= ttft_max)) and in_pace
            success = False
            if word == SUCCEEDED:
                self.completed += 1
                self.e2es.append(e2e)
                if tokens > 1:
                    self.tpots.append(tpot)
                self.tpot_kept += in_pace
                success = in_time and in_pace
            self.left += left
            self.successes += success
            if task < 0:
                self.tasks += not left
                self.tasks_succeeded += success
            else:
                good[task] |= bool(last)
                bad[task] |= not success
        self.tasks += len(good)
        self.tasks_succeeded += sum(g and not b for g, b in zip(good, bad, strict=True))


def _endings(records: Records) -> dict[str, dict[str, int]]:
    counts: dict[tuple[int, int], int] = {}
    for key in zip(records.outcome, records.reason, strict=True):
        counts[key] = counts.get(key, 0) + 1
    found: dict[str, dict[str, int]] = {}
    for (outcome, reason), n in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        word = records.outcomes.names[outcome]
        if word != SUCCEEDED:
            found.setdefault(word, {})[records.reasons.names[reason] or "unnamed"] = n
    return found


def _pool(pool: PoolUse, end_ns: int) -> PoolSummary:
    return PoolSummary(
        pool.profile, pool.role, pool.gpu_hours, pool.usd, pool.starts, pool.replicas_max,
        ratio(pool.replica_hours * 3_600, end_ns / 1e9), direction_changes(pool.timeline), pool.preemptions,
        pool.busy_share,
    )  # fmt: skip


def direction_changes(timeline: Iterable[FleetSample]) -> int:
    """Times the target turned from rising to falling or back."""
    turns = previous = 0
    last: int | None = None
    for sample in timeline:
        if last is not None and sample.target != last:
            direction = 1 if sample.target > last else -1
            turns += previous not in (0, direction)
            previous = direction
        last = sample.target
    return turns


# --- numbers ----------------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], q: float) -> float:
    """Quantile ``q`` in [0, 1] of sorted ``values``, linear between two ranks; NaN when there are none."""
    if not values:
        return math.nan
    position = q * (len(values) - 1)
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def median(values: Iterable[float]) -> float:
    """Median of the values that are known; NaN when none is."""
    return percentile(sorted(v for v in values if not math.isnan(v)), 0.5)


def _latency(values: Sequence[float]) -> Latency:
    mean = math.fsum(values) / len(values) if values else math.nan
    return Latency(*_four(lambda q: percentile(values, q)), mean, len(values))


def _gap_latency(gaps: GapCounts) -> Latency:
    return Latency(*_four(lambda q: _known(gaps.quantile_ms(q))), _known(gaps.mean_ms()), gaps.count)


def _four(quantile: Callable[[float], float]) -> tuple[float, float, float, float]:
    return quantile(0.5), quantile(0.9), quantile(0.95), quantile(0.99)


def sorted_known(values: Iterable[float]) -> list[float]:
    """Return the values that are not NaN, smallest first."""
    return sorted(v for v in values if not math.isnan(v))


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def ratio(above: float, below: float) -> float:
    """Quotient; NaN where ``below`` is not above 0."""
    return above / below if below > 0 else math.nan
