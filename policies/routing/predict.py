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

What this must not do: rank candidates, or call anything unknown zero where a floor is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.config import RoutingConfig
from policies.step_model import predict_step_ms, prefill_ms
from policies.types import ReplicaView, Request

OUTPUT_TOKENS_GUESS = 128
"""Output length assumed for sequences that hold a slot; only waits for slots depend on it."""

CHUNK_TOKENS_GUESS = 2_048
"""Token budget per step of a replica that has not told its own (vLLM's usual default)."""

DECODE_LOAD_SHARE = 0.25
"""Load of one KV token of a decoding stream, in prefill tokens: over some 128 further steps it costs about 0.3 on an
H200 with an 8B model (c = 0.029 ms per 1,000 tokens and step, d = 0.015 ms)."""

REQUEST_LOAD_TOKENS = 64
"""Load of an open request whatever its length, in prefill tokens: its share of the batch (about b * 64 steps / d on a
CPU), so that many short streams count too."""


@dataclass(frozen=True, slots=True)
class Load:
    """Joined load of one replica. ``kv_tokens`` is what decoding streams hold."""

    requests: int
    prefill_tokens: int
    kv_tokens: int

    @property
    def tokens(self) -> float:
        """Load in prefill tokens, for comparing replicas."""
        return self.prefill_tokens + DECODE_LOAD_SHARE * self.kv_tokens + REQUEST_LOAD_TOKENS * self.requests


@dataclass(frozen=True, slots=True)
class Estimate:
    """One candidate for one request."""

    ttft_ms: float
    hit_tokens: int
    """Prompt tokens believed cached, whatever the strength."""
    uncached_tokens: float
    """Prompt tokens to compute, as far as the strength trusts the hit."""
    load_tokens: float
    bounded_tokens: float
    """Load without the backlog that may be the computation of this request's own prefix."""


def joined_load(view: ReplicaView, sample_age_ms_max: float) -> Load:
    """Load of one replica from local counts and, while it is fresh, its sample."""
    local = Load(view.local_requests, view.local_prefill_tokens, view.local_decode_tokens)
    if view.sample_age_ms is None or view.sample_age_ms > sample_age_ms_max:
        return local
    running, waiting = view.sample_running, view.sample_waiting
    sampled = None if running is None and waiting is None else (running or 0) + (waiting or 0)
    return Load(
        _join(local.requests, sampled, view.local_requests_at_sample),
        _join(local.prefill_tokens, view.sample_prefill_backlog_tokens, view.local_prefill_tokens_at_sample),
        _join(local.kv_tokens, view.sample_kv_tokens_used, view.local_decode_tokens_at_sample),
    )


def estimate(request: Request, view: ReplicaView, hit_blocks: int, strength: float, config: RoutingConfig) -> Estimate:
    """Predict TTFT and load of ``request`` at ``view``, with ``strength`` in [0, 1] as trust in the prefix hit."""
    load = joined_load(view, config.sample_age_ms_max)
    hit_tokens = min(hit_blocks * request.block_tokens, request.prompt_tokens)
    uncached = max(1.0, request.prompt_tokens - strength * hit_tokens)
    step = view.step_model or config.step_prior
    running = min(load.requests, view.running_seqs_max) if view.running_seqs_max else load.requests
    ends = _needed_ends(load, view, running, uncached)
    wait_ms = 0.0
    if ends:
        wait_ms = ends * OUTPUT_TOKENS_GUESS * predict_step_ms(step, running, load.kv_tokens, 0) / max(1, running)
    chunk = view.step_tokens_max or CHUNK_TOKENS_GUESS
    compute_ms = prefill_ms(step, load.prefill_tokens + uncached, chunk, running, load.kv_tokens)
    own_backlog = min(hit_tokens, load.prefill_tokens)
    return Estimate(wait_ms + compute_ms, hit_tokens, uncached, load.tokens, load.tokens - own_backlog)


def _join(local: int, sample: int | None, local_at_sample: int | None) -> int:
    if sample is None:
        return local
    if local_at_sample is None:
        return max(local, sample)
    return max(local, sample + local - local_at_sample)


def _needed_ends(load: Load, view: ReplicaView, running: int, uncached: float) -> int:
    """Running sequences that must end before the request can start: for a slot, and for its KV."""
    for_slot = load.requests - view.running_seqs_max + 1 if view.running_seqs_max else 0
    for_kv = 0
    if view.sample_kv_tokens_max and running and load.kv_tokens:
        short = load.kv_tokens + load.prefill_tokens + uncached - view.sample_kv_tokens_max
        for_kv = math.ceil(short * running / load.kv_tokens) if short > 0 else 0
    return max(0, for_slot, min(for_kv, load.requests))
