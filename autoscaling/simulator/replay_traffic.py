"""Recorded traffic as a load for the simulator, and what was recorded as a run to be compared with simulated ones.

Requests come when they came (open loop), gateways laid beside each other by the wall clocks of their headers. A replay
begins when the first gateway did, at most :data:`LEAD_NS_MAX` before the first request: a control loop that has just
begun measures rates over less time than one that knows a quiet minute. The requests' work is what was done: the
engine's counts of tokens where it told them. What was never answered has no count: a request that was refused or failed
without a byte gets the mean output of the others, bounded by its own limit; one that was broken off gets what it got.

Blocks. The gateway hashes ``block_bytes`` of text, an engine caches blocks of ``unit`` tokens. With ``T`` the mean
tokens in ``block_bytes`` (from all requests whose tokens the engine told)::

    block k of ``unit`` tokens  =  (k, hash of the text block in which its last token lies)

so two prompts share blocks exactly as far as they shared whole text blocks. The output of an answer is not hashed, but
a later prompt that continues an earlier one says what came after it: ``blocks_after``.

This must not read files, and it must not mend what a recording does not hold: what cannot be replayed is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoscaling.simulator.fit import FitError, law_from_coefficients
from autoscaling.simulator.gaps import GapCounts
from autoscaling.simulator.recorded import (
    FleetLine,
    Header,
    Numbered,
    ReplicaLine,
    RequestLine,
    TickLine,
)
from autoscaling.simulator.records import FleetSample, PoolUse, Records, Row, RunResult
from autoscaling.simulator.spec import EngineProfile, SimRequest
from autoscaling.simulator.workload.trace import TraceError
from policies.types import Decision, Histogram, ReplicaReport, ReplicaState

LEAD_NS_MAX = 30_000_000_000
"""Longest simulated time before the first request; more than any window of the control loop over rates."""
LEAD_NS_MIN = 1_000_000_000
SAMPLES_MIN = 32
"""Steps a replica's model must have seen to count."""
_HASH_STEP = 0x9E3779B97F4A7C15
_HASH_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """One recorded request on the common clock."""

    unix_ns: int
    line: RequestLine


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of all gateways of a recording by their arrival, and how their text was cut."""

    arrivals: tuple[Arrival, ...]
    start_unix_ns: int
    """Time 0 of a replay."""
    block_bytes: int
    left_out: int
    """Requests that write no tokens (embeddings, tokenising): the simulator has none such."""


def traffic_of(requests: Iterable[tuple[Header, RequestLine]]) -> Traffic:
    """Lay the requests of several gateways beside each other.

    Raises:
        TraceError: there is none that writes tokens.
    """
    found: list[Arrival] = []
    left_out = block_bytes = 0
    began: int | None = None
    for header, line in requests:
        began = header.started_unix_ns if began is None else min(began, header.started_unix_ns)
        block_bytes = header.config.routing.block_bytes
        if line.output_tokens_max == 0:
            left_out += 1
        else:
            found.append(Arrival(header.started_unix_ns + line.arrival_ns, line))
    if not found:
        raise TraceError("the recording holds no request of a gateway that writes tokens")
    found.sort(key=lambda a: a.unix_ns)
    first = found[0].unix_ns
    start = min(first - LEAD_NS_MIN, max(began or 0, first - LEAD_NS_MAX))
    return Traffic(tuple(found), start, block_bytes, left_out)


# --- as a load --------------------------------------------------------------------------------------------------------


class RecordedSource:
    """Plays recorded requests, open loop; they are made while they are read.

    Args:
        traffic: what was recorded.
        unit: tokens of one block, a multiple of the engine's.
    """

    def __init__(self, traffic: Traffic, unit: int) -> None:
        self.name = "recording"
        self._traffic = traffic
        self._unit = unit
        self._block_tokens = tokens_per_block(traffic)
        done = [a.line.output_tokens for a in traffic.arrivals if a.line.outcome == "succeeded"]
        self._mean_output = sum(done) / len(done) if done else 1.0
        self._next = continuations(traffic)

    def arrivals(self) -> Iterator[SimRequest]:
        """All of them."""
        return (self._request(index) for index in range(len(self._traffic.arrivals)))

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:  # noqa: ARG002
        """None: the recording says when each request came."""
        return ()

    def _request(self, index: int) -> SimRequest:
        arrival = self._traffic.arrivals[index]
        line = arrival.line
        prompt_tokens = max(1, line.prompt_tokens or line.prompt_tokens_estimate)
        output_tokens = _output_tokens(line, self._mean_output)
        blocks, after = self._blocks(line.blocks, prompt_tokens), tuple[int, ...]()
        follower = self._next.get(index)
        if follower is not None:
            after = self._blocks(self._traffic.arrivals[follower].line.blocks, prompt_tokens + output_tokens)
        return SimRequest(
            index=index,
            arrival_ns=arrival.unix_ns - self._traffic.start_unix_ns,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            blocks=blocks,
            block_tokens=self._unit,
            blocks_after=after if len(after) > len(blocks) else (),
            output_tokens_max=line.output_tokens_max,
            tenant=line.tenant,
            task=line.task,
            stream=line.stream,
        )

    def _blocks(self, text_blocks: Sequence[int], tokens: int) -> tuple[int, ...]:
        return token_blocks(text_blocks, self._block_tokens, self._unit, tokens)


def continuations(traffic: Traffic) -> dict[int, int]:
    """For each request the first later one whose prompt holds all of its text blocks and goes on, by index."""
    found: dict[int, int] = {}
    owners: dict[int, int] = {}
    """The last request whose prompt ends with this text block."""
    for index, arrival in enumerate(traffic.arrivals):
        blocks = arrival.line.blocks
        earlier = next((owners[block] for block in reversed(blocks[:-1]) if block in owners), None)
        if earlier is not None:
            found.setdefault(earlier, index)
        if blocks:
            owners[blocks[-1]] = index
    return found


def tokens_per_block(traffic: Traffic) -> float:
    """Mean tokens in one text block, as engines counted; the gateways' own estimate where none told."""
    told = [(a.line.prompt_bytes, a.line.prompt_tokens) for a in traffic.arrivals if a.line.prompt_tokens]
    size = sum(n for n, _ in told)
    if size <= 0:
        return float(traffic.arrivals[-1].line.block_tokens)
    return traffic.block_bytes * sum(n for _, n in told) / size


def token_blocks(text_blocks: Sequence[int], block_tokens: float, unit: int, prompt_tokens: int) -> tuple[int, ...]:
    """Chain of blocks of ``unit`` tokens over a chain of text blocks of ``block_tokens`` tokens each."""
    most = min(prompt_tokens // unit, int(len(text_blocks) * block_tokens / unit + 1e-9))
    return tuple(
        (text_blocks[min(len(text_blocks), math.ceil((k + 1) * unit / block_tokens - 1e-9)) - 1] ^ (k * _HASH_STEP))
        & _HASH_MASK
        for k in range(most)
    )


def _output_tokens(line: RequestLine, mean_output: float) -> int:
    if line.output_tokens > 0:
        return line.output_tokens
    most = line.output_tokens_max or math.inf
    return max(1, round(min(mean_output, most)))


# --- the fleet --------------------------------------------------------------------------------------------------------


SILENT_NS = 5_000_000_000
"""A replica that has not reported for this long is gone."""
AFTER_NS_MAX = 600_000_000_000
"""What the controller recorded longer than this after the last answer is left out."""


@dataclass(frozen=True, slots=True)
class FleetHistory:
    """What a recorded controller knew of its fleet, on the common clock."""

    timeline: tuple[tuple[int, FleetLine], ...]
    """Serve's word, by wall clock in ns."""
    reports: tuple[tuple[int, ReplicaReport], ...]
    decisions: tuple[tuple[int, Decision], ...]


def history_of(lives: Iterable[tuple[Header, Iterable[Numbered]]]) -> FleetHistory:
    """Gather the lives of a fleet's controllers; ``lives`` by their start."""
    timeline: list[tuple[int, FleetLine]] = []
    reports: list[tuple[int, ReplicaReport]] = []
    decisions: list[tuple[int, Decision]] = []
    for header, lines in lives:
        offset = header.started_unix_ns - header.started_ns
        for item in lines:
            match item.line:
                case FleetLine(at_ns=at_ns) as line:
                    timeline.append((at_ns + offset, line))
                case ReplicaLine(at_ns=at_ns, report=report):
                    reports.append((at_ns + offset, report))
                case TickLine(at_ns=at_ns, decisions=made):
                    decisions += [(at_ns + offset, decision) for decision in made]
                case _:
                    pass
    return FleetHistory(tuple(timeline), tuple(reports), tuple(decisions))


def answered_ns(traffic: Traffic) -> int:
    """When the last answer ended, since the start of a replay."""
    ends = (a.unix_ns + round(a.line.e2e_ms * 1e6) for a in traffic.arrivals)
    return max(ends) - traffic.start_unix_ns


def recorded_until_ns(traffic: Traffic, history: FleetHistory) -> int:
    """When the recording ended, since the start of a replay."""
    answered = answered_ns(traffic)
    last = history.timeline[-1][0] - traffic.start_unix_ns if history.timeline else answered
    return min(max(answered, last), answered + AFTER_NS_MAX)


def replicas_at(history: FleetHistory, unix_ns: int) -> int | None:
    """Replicas that ran then, by Serve's last word before; the first word where that is later; ``None``: no word."""
    if not history.timeline:
        return None
    before = [line for at, line in history.timeline if at <= unix_ns]
    return max(1, (before[-1] if before else history.timeline[0][1]).view.replicas_running)


def start_times_ms(history: FleetHistory) -> list[float]:
    """From each rise of Serve's target to the rise of its running replicas, in ms, as far as both were recorded."""
    found: list[float] = []
    waiting: list[int] = []
    before = None
    for at, line in history.timeline:
        view = line.view
        if before is not None:
            waiting += [at] * (view.replicas_target - before.replicas_target)
            ready = max(0, view.replicas_running - before.replicas_running)
            found += [(at - since) / 1e6 for since in waiting[:ready]]
            waiting = waiting[ready:]
        before = view
    return found


def profile_of(history: FleetHistory, model: str) -> EngineProfile:
    """The engine as its replicas reported it: learned step model, sizes, and the start as Serve saw it, else as told.

    Prices and the time a request spends outside steps are not in reports and are 0 here.

    Raises:
        TraceError: no replica reported, or none had learned its step model.
    """
    last = {report.replica_id: report for _, report in history.reports}
    models = {
        report.replica_id: report.step_model
        for _, report in history.reports
        if report.step_model is not None and report.step_model.samples >= SAMPLES_MIN
    }
    try:
        law = law_from_coefficients(list(models.values()))
    except FitError:
        why = "no replica in the recording had learned its step model; name an engine profile (--profile)"
        raise TraceError(why) from None
    told = [r.cold_start_ms for r in last.values() if r.cold_start_ms is not None]
    starts = sorted(start_times_ms(history) or told)
    kv_tokens = max(r.kv_tokens_max for r in last.values())
    return EngineProfile(
        name="as-recorded",
        gpu="unknown",
        gpus=1,
        model=model,
        law=law,
        kv_tokens=kv_tokens,
        context_tokens_max=kv_tokens,
        cold_start_ms=starts[len(starts) // 2] if starts else 0.0,
        usd_per_gpu_hour=0.0,
        source=f"learned by {len(models)} replicas of the recording",
        running_seqs_max=max(r.running_seqs_hard for r in last.values()),
        step_tokens_max=max(r.step_tokens_hard for r in last.values()),
    )


# --- as a run ---------------------------------------------------------------------------------------------------------


def recorded_run(traffic: Traffic, history: FleetHistory, profile: EngineProfile) -> RunResult:
    """What was recorded, in the form of a simulated run. Times of requests are the gateways'."""
    records = Records()
    end_ns = recorded_until_ns(traffic, history)
    for index, arrival in enumerate(traffic.arrivals):
        line, at_ns = arrival.line, arrival.unix_ns - traffic.start_unix_ns
        records.add(
            Row(
                index=index,
                arrival_ns=at_ns,
                prompt_tokens=line.prompt_tokens or line.prompt_tokens_estimate,
                output_tokens=line.output_tokens,
                cached_tokens=line.cached_tokens or 0,
                ttft_ms=math.nan if line.ttft_ms is None else line.ttft_ms,
                e2e_ms=line.e2e_ms,
                outcome=line.outcome,
                reason=line.reason,
                attempts=line.attempts,
                tries=1,
                replica=line.replica,
                tenant=line.tenant,
                task=line.task,
                task_last=True,
            )
        )
    start = traffic.start_unix_ns
    inside = [(at - start, decision) for at, decision in history.decisions if 0 <= at - start <= end_ns]
    return RunResult(
        scenario="recorded",
        seed=0,
        records=records,
        pools=[_pool_use(traffic, history, profile, end_ns)],
        decisions=[decision for _, decision in inside],
        counters={},
        end_ns=end_ns,
        digest="",
    )


def _pool_use(traffic: Traffic, history: FleetHistory, profile: EngineProfile, end_ns: int) -> PoolUse:
    start = traffic.start_unix_ns
    reports = [report for at, report in history.reports if 0 <= at - start <= end_ns]
    timeline = _timeline(history, start, end_ns)
    hours = _replica_hours(timeline, end_ns)
    itl = Histogram()
    for report in reports:
        itl = itl.plus(report.itl) if len(report.itl.counts) == len(itl.counts) else itl
    busy = [(r.busy_share, r.window_ms) for r in reports if r.busy_share is not None]
    covered = sum(w for _, w in busy)
    targets = [sample.target for sample in timeline]
    return PoolUse(
        profile=profile.name,
        role="both",
        replica_hours=hours,
        gpu_hours=hours * profile.gpus,
        usd=hours * profile.usd_per_hour,
        starts=(targets[0] if targets else 0) + sum(max(0, b - a) for a, b in pairwise(targets)),
        replicas_max=max((s.ready + s.starting for s in timeline), default=0),
        preemptions=sum(r.preemptions for r in reports),
        prefix_query_tokens=sum(r.prefix_query_tokens for r in reports),
        prefix_hit_tokens=sum(r.prefix_hit_tokens for r in reports),
        busy_share=sum(b * w for b, w in busy) / covered if covered else 0.0,
        itl=GapCounts.of(itl),
        timeline=timeline,
    )


def _timeline(history: FleetHistory, start_unix_ns: int, end_ns: int) -> list[FleetSample]:
    """One sample per word of Serve; what replicas hold by their last reports."""
    samples: list[FleetSample] = []
    reports = iter(history.reports)
    held = next(reports, None)
    heard: dict[str, tuple[int, ReplicaReport]] = {}
    for at, line in history.timeline:
        while held is not None and held[0] <= at:
            heard[held[1].replica_id] = held
            held = next(reports, None)
        if not 0 <= at - start_unix_ns <= end_ns:
            continue
        view, last = line.view, [r for since, r in heard.values() if at - since <= SILENT_NS]
        draining = sum(1 for r in last if r.state is ReplicaState.DRAINING)
        waiting, running = sum(r.waiting for r in last), sum(r.running for r in last)
        starting = max(0, view.replicas_target - view.replicas_running)
        samples.append(
            FleetSample(
                at - start_unix_ns, view.replicas_target, starting, view.replicas_running, draining, waiting, running
            )
        )
    return samples


def _replica_hours(timeline: Sequence[FleetSample], end_ns: int) -> float:
    total_ns = 0
    for i, sample in enumerate(timeline):
        begin_ns = 0 if i == 0 else sample.at_ns
        until_ns = timeline[i + 1].at_ns if i + 1 < len(timeline) else end_ns
        total_ns += (sample.ready + sample.starting + sample.draining) * max(0, until_ns - begin_ns)
    return total_ns / 3_600e9
