"""What one candidate would take: its load in tokens and the predicted TTFT of a request there.

Load joins the gateway's own counts with the replica's last sample, value by value (requests, prefill backlog, KV
held)::

    joined = max(local_now, sample + local_now - local_when_the_sample_arrived)

The sample holds all gateways' work, ours included; what we sent or got answered since is added or taken off, so
nothing of ours counts twice, and our own exact count is always a floor. Without the count at arrival:
``max(local_now, sample)``. A sample older than ``sample_age_ms_max``, or of unknown age, is ignored: local counts
alone (fail open).

TTFT in ms::

    uncached = prompt_tokens - strength * hit_tokens            at least 1: engines always compute the last prompt token
    wait     = needed_ends * OUTPUT_TOKENS_GUESS * step_ms / running
    ttft     = wait + prefill_ms(backlog + uncached)            both through the replica's step model

``needed_ends`` is how many running sequences must end before this request gets a slot and KV room; with ``running``
sequences at different points of their outputs, one ends every ``OUTPUT_TOKENS_GUESS / running`` steps.

A :class:`Standing` holds everything of this that does not depend on the request, so that it is computed once per change
of a replica and not once per choice.

What this must not do: rank candidates, or call anything unknown zero where a floor is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.config import RoutingConfig
from policies.step_model import chunked_prefill_ms, predict_step_ms
from policies.types import ReplicaView, Request, StepCoefficients

OUTPUT_TOKENS_GUESS = 128
"""Output length assumed for sequences that hold a slot; only waits for slots depend on it."""

CHUNK_TOKENS_GUESS = 2_048
"""Token budget per step of a replica that has not told its own (vLLM's usual default)."""

WORK_WEIGHT = 0.5
"""Weight of a request's own computation in its cost, beside its TTFT: what an engine computes now, whoever comes next
waits for. 0 would compute a prefix again on an idle replica as soon as that is a millisecond faster."""

DECODE_LOAD_SHARE = 0.25
"""Load of one KV token of a decoding stream, in prefill tokens: over some 128 further steps it costs about 0.3 on an
H200 with an 8B model (c = 0.029 ms per 1,000 tokens and step, d = 0.015 ms)."""

REQUEST_LOAD_TOKENS = 64
"""Load of an open request whatever its length, in prefill tokens: its share of the batch (about b * 64 steps / d on a
CPU), so that many short streams count too."""


KINDS_PER_E_FOLD = 2
"""Kinds of replicas per factor of e in the speed of prefill."""


@dataclass(frozen=True, slots=True)
class Load:
    """Joined load of one replica. ``kv_tokens`` is what decoding streams hold."""

    requests: int
    prefill_tokens: int
    kv_tokens: int

    @property
    def tokens(self) -> float:
        """Load in prefill tokens, for comparing replicas."""
        return load_tokens(self.requests, self.prefill_tokens, self.kv_tokens)


@dataclass(slots=True)
class Estimate:
    """One candidate for one request."""

    ttft_ms: float
    hit_tokens: int
    """Prompt tokens believed cached, whatever the strength."""
    uncached_tokens: float
    """Prompt tokens to compute, as far as the strength trusts the hit."""
    load_tokens: float
    cost_ms: float
    """TTFT and what its computation costs others, by which replicas are ranked."""
    bounded_tokens: float
    """Load without the backlog that may be the computation of this request's own prefix."""


class Standing:
    """One replica before the request: its joined load, and what its step model makes of it.

    Args:
        requests: joined open requests.
        prefill_tokens: joined backlog.
        kv_tokens: joined KV held.
        running_seqs_max: its slots; ``None``: not known, no limit.
        kv_tokens_max: its KV cache, likewise.
        chunk_tokens: its token budget per step.
        step: its step model.
    """

    __slots__ = (
        "_chunk_tokens", "_end_ms", "_gap_ms", "_kv_room", "_kv_token_ms", "_running", "_seqs_max", "_slot_ends",
        "_step", "_step_ms", "kind", "kv_tokens", "kv_tokens_max", "load_tokens", "prefill_tokens", "requests",
        "token_ms",
    )  # fmt: skip

    def __init__(
        self,
        requests: int,
        prefill_tokens: int,
        kv_tokens: int,
        running_seqs_max: int | None,
        kv_tokens_max: int | None,
        chunk_tokens: int,
        step: StepCoefficients,
    ) -> None:
        self.requests = requests
        self.prefill_tokens = prefill_tokens
        self.kv_tokens = kv_tokens
        self.kv_tokens_max = kv_tokens_max
        self.load_tokens = load_tokens(requests, prefill_tokens, kv_tokens)
        self._seqs_max = running_seqs_max
        running, self._slot_ends = requests, 0
        if running_seqs_max and requests >= running_seqs_max:
            running, self._slot_ends = running_seqs_max, requests - running_seqs_max + 1
        self._running = running
        self._kv_room = None
        """Uncached tokens that fit beside what is there; ``None``: no limit known."""
        if kv_tokens_max and running and kv_tokens:
            self._kv_room = kv_tokens_max - kv_tokens - prefill_tokens
        self._chunk_tokens = chunk_tokens
        self._step = step
        decode_ms = predict_step_ms(step, running, kv_tokens, 0)
        self._step_ms = decode_ms + step.b_ms
        self.token_ms = step.d_ms
        """Time the engine spends on one prompt token."""
        self._kv_token_ms = step.c_ms / 1000
        self._gap_ms = self._step_ms + self._kv_token_ms * prefill_tokens
        self.kind = int(math.log(step.d_ms + 1e-6) * KINDS_PER_E_FOLD)
        """Rough speed of prefill: replicas of one kind of device have the same, or a neighbouring one."""
        self._end_ms = OUTPUT_TOKENS_GUESS * decode_ms / max(1, running)

    @property
    def slots(self) -> int:
        """Sequences it may run; 0: it has not told."""
        return self._seqs_max or 0

    @property
    def slots_free(self) -> int:
        """Those it may run beside what it has."""
        return max(0, self.slots - self.requests)

    def ttft_ms(self, uncached_tokens: float) -> float:
        """Predicted time to the first token of a request with so many tokens to compute, at least 1."""
        tokens = self.prefill_tokens + uncached_tokens
        if tokens <= self._chunk_tokens:
            ms = self._step_ms + self.token_ms * tokens
        else:
            ms = chunked_prefill_ms(self._step, tokens, self._chunk_tokens, self._step_ms)
        ends = self._slot_ends
        if self._kv_room is not None and uncached_tokens > self._kv_room:
            for_kv = math.ceil((uncached_tokens - self._kv_room) * self._running / self.kv_tokens)
            ends = max(ends, min(for_kv, self.requests))
        return ms + ends * self._end_ms if ends else ms

    def own_ms(self, tokens: float) -> float:
        """Prefill of so many tokens where nothing else runs."""
        return chunked_prefill_ms(self._step, max(1.0, tokens), self._chunk_tokens, self._step.a_ms + self._step.b_ms)

    def wait_ms(self, uncached_tokens: float) -> float:
        """Time until the replica would begin to compute a request: slots, KV room and the backlog ahead of it."""
        wait = self.ttft_ms(uncached_tokens) - self._alone_ms(uncached_tokens)
        return max(0.0, wait)

    def _alone_ms(self, tokens: float) -> float:
        """Prefill beside the streams that run, without a backlog."""
        return chunked_prefill_ms(self._step, max(1.0, tokens), self._chunk_tokens, self._step_ms)

    def service_ms(self, prompt_tokens: float, output_tokens: float, batch_max: int) -> float:
        """Time of the engine that one such request takes in a full batch of its kind."""
        n = min(self._seqs_max or batch_max, batch_max)
        kv_tokens = n * (prompt_tokens + output_tokens / 2)
        step_ms = predict_step_ms(self._step, n, kv_tokens, 0)
        return max(1e-3, self._step.d_ms * prompt_tokens + output_tokens * step_ms / n)

    @property
    def idle_gap_ms(self) -> float:
        """Gap of a stream that is alone there."""
        return self._step.a_ms + self._step.b_ms

    def gap_ms(self, prompt_tokens: int) -> float:
        """Predicted gap of the streams there once all that waits decodes, one more of ``prompt_tokens`` among them."""
        return self._gap_ms + self._kv_token_ms * prompt_tokens


def load_tokens(requests: int, prefill_tokens: int, kv_tokens: int) -> float:
    """Load in prefill tokens of one replica, or of any number of them summed."""
    return prefill_tokens + DECODE_LOAD_SHARE * kv_tokens + REQUEST_LOAD_TOKENS * requests


def join(local: int, sample: int | None, local_at_sample: int | None) -> int:
    """One value of the joined load; see the module."""
    if sample is None:
        return local
    if local_at_sample is None:
        return max(local, sample)
    joined = sample + local - local_at_sample
    return max(local, joined)


def open_requests(running: int | None, waiting: int | None) -> int | None:
    """Requests in an engine by its sample; ``None`` where that says neither."""
    return None if running is None and waiting is None else (running or 0) + (waiting or 0)


def joined_load(view: ReplicaView, sample_age_ms_max: float) -> Load:
    """Load of one replica from local counts and, while it is fresh, its sample."""
    local = Load(view.local_requests, view.local_prefill_tokens, view.local_decode_tokens)
    if view.sample_age_ms is None or view.sample_age_ms > sample_age_ms_max:
        return local
    sampled = open_requests(view.sample_running, view.sample_waiting)
    return Load(
        join(local.requests, sampled, view.local_requests_at_sample),
        join(local.prefill_tokens, view.sample_prefill_backlog_tokens, view.local_prefill_tokens_at_sample),
        join(local.kv_tokens, view.sample_kv_tokens_used, view.local_decode_tokens_at_sample),
    )


def standing_of(view: ReplicaView, config: RoutingConfig) -> Standing:
    """The standing of a replica seen as a view."""
    load = joined_load(view, config.sample_age_ms_max)
    return Standing(
        load.requests,
        load.prefill_tokens,
        load.kv_tokens,
        view.running_seqs_max,
        view.sample_kv_tokens_max,
        view.step_tokens_max or CHUNK_TOKENS_GUESS,
        view.step_model or config.step_prior,
    )


def estimate_at(request: Request, standing: Standing, hit_blocks: int, strength: float) -> Estimate:
    """Predict TTFT and load of ``request`` at ``standing``, with ``strength`` in [0, 1] as trust in the prefix hit."""
    hit_tokens = min(hit_blocks * request.block_tokens, request.prompt_tokens)
    uncached = max(1.0, request.prompt_tokens - strength * hit_tokens)
    ttft_ms = standing.ttft_ms(uncached)
    return Estimate(
        ttft_ms,
        hit_tokens,
        uncached,
        standing.load_tokens,
        ttft_ms + WORK_WEIGHT * (standing.token_ms * uncached),
        standing.load_tokens - min(hit_tokens, standing.prefill_tokens),
    )


def estimate(request: Request, view: ReplicaView, hit_blocks: int, strength: float, config: RoutingConfig) -> Estimate:
    """The same for a replica seen as a view."""
    return estimate_at(request, standing_of(view, config), hit_blocks, strength)
