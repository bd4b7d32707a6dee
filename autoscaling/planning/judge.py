"""Whether a simulated fleet holds the goal, by how much, and where it does not: what broke, when, and why.

A fleet holds the goal where all three are so::

    TTFT at the objectives' quantile <= ttft_ms
    gaps between tokens at the quantile <= itl_ms
    share of the requests that succeeded >= attainment

What broke is looked for where most requests missed: the time of their arrival, the objective they missed, and what the
pools looked like then. Causes, the first that fits:

    refused      gateways refused most of them: their limits, not the engines
    starting     replicas were wished for and not there yet
    KV cache     sequences held nine tenths of the cache, or the engines preempted
    prefill      requests waited and prompts take most of the engine time, or their own prompt took too long
    decode       requests waited for a place in the batch
    interference gaps grew by prompts that were computed between them

Decides nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoscaling.planning.fleets import Goal, Work, ttft_floor_ms
from autoscaling.simulator.records import FleetSample, Records, Row, RunResult
from autoscaling.simulator.report import CANCELLED, REFUSED, SUCCEEDED, Summary, percentile, ratio, summarise
from autoscaling.simulator.spec import EngineProfile, NetworkSpec

BINS = 60
"""Parts of a run in which misses are counted."""

BIN_S_MIN = 10.0

KV_SHARE_FULL = 0.9
"""Share of the caches from which they count as full."""


@dataclass(frozen=True, slots=True)
class Broken:
    """What a fleet did not hold."""

    objective: str
    """``TTFT``, ``ITL`` or ``attainment``."""
    limit: float
    value: float
    at_s: float
    """Begin of the time in which most requests missed, since the begin of the load."""
    missed_share: float
    """Of the requests that arrived then."""
    cause: str
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one run."""

    holds: bool
    ttft_ms: float
    """At the quantile."""
    itl_ms: float
    attainment: float
    usd_per_hour: float
    summary: Summary
    broken: tuple[Broken, ...] = ()

    def margins(self, goal: Goal) -> tuple[float, float, float]:
        """Shares of the limits that TTFT and gaps leave free, and points of attainment above the goal."""
        objectives = goal.objectives
        return (
            1 - self.ttft_ms / objectives.ttft_ms,
            1 - self.itl_ms / objectives.itl_ms,
            self.attainment - goal.attainment,
        )


@dataclass(frozen=True, slots=True)
class Scene:
    """What a run was of: for words about what broke."""

    profile: EngineProfile
    work: Work
    network: NetworkSpec
    begin_s: float = 0.0
    """Of the part of the load that was run."""
    judged_s: float = 0.0
    """Earlier arrivals (since the load's begin) are not judged."""


def judge(result: RunResult, goal: Goal, scene: Scene) -> Verdict:
    """Judge a run by the goal."""
    skip_ns = round((scene.judged_s - scene.begin_s) * 1e9)
    judged = _from(result, skip_ns) if skip_ns > 0 else result
    objectives = goal.objectives
    summary = summarise(judged, objectives)
    ttft_ms, itl_ms, attainment = summary.ttft_quantile_ms, summary.itl_quantile_ms, summary.attainment
    wrong: list[tuple[str, float, float]] = []
    if not ttft_ms <= objectives.ttft_ms:
        wrong.append(("TTFT", objectives.ttft_ms, ttft_ms))
    if itl_ms > objectives.itl_ms:
        wrong.append(("ITL", objectives.itl_ms, itl_ms))
    if not attainment >= goal.attainment:
        wrong.append(("attainment", goal.attainment, attainment))
    usd_per_hour = ratio(summary.usd, result.end_ns / 3.6e12)
    broken = _broken(judged, goal, scene, wrong) if wrong else ()
    return Verdict(not wrong, ttft_ms, itl_ms, attainment, usd_per_hour, summary, broken)


def _from(result: RunResult, skip_ns: int) -> RunResult:
    """The run with the rows that arrived from ``skip_ns`` on."""
    rows = Records()
    for row in result.records:
        if row.arrival_ns >= skip_ns:
            rows.add(row)
    return RunResult(
        result.scenario, result.seed, rows, result.pools, result.decisions, result.counters, result.end_ns,
        result.digest,
    )  # fmt: skip


# --- what broke -------------------------------------------------------------------------------------------------------


def _missed(row: Row, goal: Goal) -> str:
    """The objective a request missed; empty where it succeeded or left while promises held."""
    limits = goal.objectives
    if row.outcome == SUCCEEDED:
        if row.ttft_ms > limits.ttft_ms:
            return "TTFT"
        return "ITL" if row.tpot_ms > limits.itl_ms else ""
    if row.outcome == CANCELLED and row.ttft_ms <= limits.ttft_ms and not row.tpot_ms > limits.itl_ms:
        return ""
    return "TTFT"


def _broken(result: RunResult, goal: Goal, scene: Scene, wrong: list[tuple[str, float, float]]) -> tuple[Broken, ...]:
    last_ns = max(result.records.arrival_ns, default=0)
    bin_ns = max(round(BIN_S_MIN * 1e9), last_ns // BINS + 1)
    arrived: dict[int, int] = {}
    missed: dict[int, list[Row]] = {}
    for row in result.records:
        at = row.arrival_ns // bin_ns
        arrived[at] = arrived.get(at, 0) + 1
        if _missed(row, goal):
            missed.setdefault(at, []).append(row)
    if not missed:
        return tuple(_gap_alone(name, limit, value, result, scene) for name, limit, value in wrong)
    worst = max(sorted(missed), key=lambda at: len(missed[at]))
    rows = missed[worst]
    cause, text = _cause(rows, goal, scene, result, worst * bin_ns, bin_ns)
    at_s = worst * bin_ns / 1e9 + scene.begin_s
    share = len(rows) / arrived[worst]
    return tuple(Broken(name, limit, value, at_s, share, cause, text) for name, limit, value in wrong)


def _gap_alone(objective: str, limit: float, value: float, result: RunResult, scene: Scene) -> Broken:
    share = ratio(sum(p.preemptions for p in result.pools), len(result.records))
    text = f"single gaps are too long though every request's mean gap is not ({share:.1%} were preempted)"
    return Broken(objective, limit, value, scene.begin_s, 0.0, "interference", text)


def _cause(rows: list[Row], goal: Goal, scene: Scene, result: RunResult, at_ns: int, bin_ns: int) -> tuple[str, str]:
    refused = [row for row in rows if row.outcome == REFUSED]
    if len(refused) * 2 > len(rows):
        reasons = sorted({row.reason for row in refused})
        return (
            "refused",
            f"gateways refused {len(refused)} of {len(rows)} ({', '.join(reasons)}): their limits, not engines",
        )
    samples = [[s for s in pool.timeline if at_ns <= s.at_ns < at_ns + bin_ns + 1_000_000_000] for pool in result.pools]
    if any(s.starting > 0 for pool in samples for s in pool):
        starting = max(s.starting for pool in samples for s in pool)
        cold_s = scene.profile.cold_start_ms / 1e3
        return "starting", f"{starting} replicas were still starting (a start takes {cold_s:.0f} s)"
    late = [row for row in rows if _missed(row, goal) == "TTFT"]
    if len(late) * 2 >= len(rows):
        return _why_late(late, goal, scene, result, samples)
    return _why_slow(scene, result, samples)


def _why_late(
    late: list[Row], goal: Goal, scene: Scene, result: RunResult, samples: list[list[FleetSample]]
) -> tuple[str, str]:
    floors = sorted(
        ttft_floor_ms(scene.profile, scene.network, r.prompt_tokens, max(1, r.prompt_tokens - r.cached_tokens))
        for r in late
    )
    middle = percentile(floors, 0.5)
    if middle > goal.objectives.ttft_ms:
        return (
            "prefill",
            f"half of the late prompts take {middle:,.0f} ms or more by themselves, with the cache they met",
        )
    if len(samples) > 1:  # a divided fleet: the first token is the prefill pool's
        waiting = max((s.waiting for s in samples[0]), default=0)
        return "prefill", f"{waiting} requests waited in the prefill pool"
    preemptions = sum(pool.preemptions for pool in result.pools)
    kv_share = _kv_share(scene, samples[-1], late)
    waiting = max((s.waiting for pool in samples for s in pool), default=0)
    if kv_share >= KV_SHARE_FULL or preemptions * 20 > len(result.records):
        return (
            "KV cache",
            f"the KV caches were {kv_share:.0%} full, {waiting} requests waited, {preemptions} preemptions",
        )
    running = max((s.running / max(1, s.ready) for s in samples[-1]), default=0.0)
    if running >= scene.profile.running_seqs_max * 0.95:
        return "decode", f"batches were full with {running:.0f} sequences each and {waiting} requests waited"
    if scene.work.prefill_share >= 0.5 or waiting == 0:
        return "prefill", f"{waiting} requests waited for prompts to be computed ({_prefill_words(scene)})"
    return "decode", f"{waiting} requests waited behind {running:.0f} sequences per engine ({_prefill_words(scene)})"


def _why_slow(scene: Scene, result: RunResult, samples: list[list[FleetSample]]) -> tuple[str, str]:
    preemptions = sum(pool.preemptions for pool in result.pools)
    if preemptions * 20 > len(result.records):
        return "KV cache", f"{preemptions} preemptions: sequences lost their KV and were computed anew"
    running = max((s.running / max(1, s.ready) for s in samples[-1]), default=0.0)
    fits = scene.work.capacity.batch
    if running > fits:
        return "decode", f"batches of {running:.0f} sequences, {fits} fit into the gap objective"
    return "interference", f"prompts were computed between the tokens of {running:.0f} sequences per engine"


def _prefill_words(scene: Scene) -> str:
    return f"prompts take {scene.work.prefill_share:.0%} of the engine time this load asks for"


def _kv_share(scene: Scene, samples: list[FleetSample], rows: list[Row]) -> float:
    """Share of the caches that running sequences of the late requests' mean size fill."""
    if not samples or not rows:
        return 0.0
    context = math.fsum(r.prompt_tokens + r.output_tokens / 2 for r in rows) / len(rows)
    return max(s.running * context / (max(1, s.ready) * scene.profile.kv_tokens) for s in samples)
