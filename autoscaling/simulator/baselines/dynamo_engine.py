"""What a Dynamo-style planner knows of one engine: TTFT and prefill throughput by prompt length, ITL and decode
throughput by batch and context, and the request rate of an engine that does both.

Dynamo gets these from a profiling sweep and interpolates (``find_best_throughput_per_gpu`` and others). Here they are
computed from the law that the sweep would have measured, an :class:`EngineProfile` or the replicas' own step models:

    ttft_ms(isl)           = sum of the steps of one prompt alone, in chunks of ``step_tokens_max``
    prefill_tps(isl)       = isl / ttft
    itl_ms(batch, context) = step of ``batch`` sequences of ``context`` tokens each
    decode(itl, context)   = largest batch within ``itl`` that fits the KV cache and the slots: batch / step

Source of the searches: ai-dynamo 1.6.1 (PyPI), ``dynamo/planner/core/perf_model/{prefill,decode,agg}.py``.

What this must not do: know of load or replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from autoscaling.simulator.spec import EngineProfile, StepLaw
from policies.types import StepCoefficients

StepMs: TypeAlias = Callable[[float, float, float, float], float]
"""Duration in ms of a step of ``(running, kv_tokens, prefill_tokens, pairs)``; ``pairs`` as in :class:`StepLaw`."""


@dataclass(frozen=True, slots=True)
class EngineSurface:
    """One engine as a planner sees it."""

    step_ms: StepMs
    kv_tokens: float
    """Infinite where not known."""
    running_seqs_max: int
    step_tokens_max: int
    overhead_ms: float = 0.0
    """Part of the TTFT outside steps."""

    def ttft_ms(self, isl: float) -> float:
        """TTFT of one prompt of ``isl`` tokens on an idle engine."""
        return self.overhead_ms + self.prefill_ms(isl)

    def prefill_ms(self, isl: float) -> float:
        """Time of the steps that compute a prompt of ``isl`` tokens."""
        total, done = 0.0, 0.0
        while done < isl:
            chunk = min(isl - done, self.step_tokens_max)
            total += self.step_ms(1, done, chunk, chunk * (done + chunk / 2))
            done += chunk
        return total

    def prefill_tps(self, isl: float) -> float:
        """Prompt tokens per second of one engine fed with prompts of ``isl`` tokens."""
        return isl / self.prefill_ms(isl) * 1000 if isl > 0 else math.inf

    def itl_ms(self, batch: float, context: float) -> float:
        """Gap between two tokens in a batch of sequences of ``context`` tokens."""
        return self.step_ms(batch, batch * context, 0.0, 0.0)

    def decode_batch(self, itl_ms: float, context: float) -> int:
        """Largest batch within ``itl_ms``, at least 1."""
        low, high = 1, self._batch_max(context)
        while low < high:
            middle = (low + high + 1) // 2
            if self.itl_ms(middle, context) <= itl_ms:
                low = middle
            else:
                high = middle - 1
        return low

    def decode_tps(self, itl_ms: float, context: float) -> float:
        """Best decode throughput of one engine within ``itl_ms``, tokens per second."""
        batch = self.decode_batch(itl_ms, context)
        return batch / self.itl_ms(batch, context) * 1000

    def both_rps(self, isl: float, osl: float, ttft_ms: float, itl_ms: float, hit_share: float = 0.0) -> float:
        """Requests per second of an engine that prefills and decodes, within both objectives.

        The batch grows while the step that decodes it and prefills what replaces its finished sequences stays within
        ``itl_ms``, and a new prompt behind that prefill within ``ttft_ms``. Even a batch of one that misses counts.
        """
        computed, budget = isl * (1 - hit_share), self.step_tokens_max
        context = isl + osl / 2
        best = 0.0
        for batch in range(1, min(self._batch_max(context), budget - 1) + 1):
            prefill = batch * computed / max(1.0, osl)
            if batch > 1 and prefill > budget - batch:
                break
            step = self.step_ms(batch, batch * context, min(prefill, budget), 0.0)
            first = self.overhead_ms + self._chunks_ms(min(prefill, budget) + computed, batch, batch * context)
            if batch > 1 and (step > itl_ms or first > ttft_ms):
                break
            decode = batch / (max(1.0, osl) * step)
            admit = (budget - batch) / (computed * step) if computed > 0 else math.inf
            best = min(decode, admit) * 1000
        return best

    def _chunks_ms(self, tokens: float, running: float, kv_tokens: float) -> float:
        """Time of the steps that compute ``tokens`` beside a batch that decodes."""
        full, rest = divmod(tokens, self.step_tokens_max)
        total = full * self.step_ms(running, kv_tokens, self.step_tokens_max, 0.0)
        return total + (self.step_ms(running, kv_tokens, rest, 0.0) if rest else 0.0)

    def _batch_max(self, context: float) -> int:
        fits = self.kv_tokens / max(1.0, context)
        return max(1, self.running_seqs_max if math.isinf(fits) else min(self.running_seqs_max, int(fits)))


def surface_of_profile(profile: EngineProfile) -> EngineSurface:
    """The engine a profile describes."""
    return EngineSurface(
        _law_ms(profile.law),
        profile.kv_tokens,
        profile.running_seqs_max,
        profile.step_tokens_max,
        profile.request_overhead_ms + profile.first_token_overhead_ms,
    )


def surface_of_coefficients(
    c: StepCoefficients, kv_tokens: float, running_seqs_max: int, step_tokens_max: int
) -> EngineSurface:
    """The engine that a replica's own step model describes."""

    def step_ms(running: float, kv: float, prefill: float, _pairs: float) -> float:
        return c.a_ms + c.b_ms * running + c.c_ms * kv / 1000 + c.d_ms * prefill

    return EngineSurface(step_ms, kv_tokens, running_seqs_max, step_tokens_max)


def _law_ms(law: StepLaw) -> StepMs:
    def step_ms(running: float, kv: float, prefill: float, pairs: float) -> float:
        return _batch_ms(law, running) + law.c_ms * kv / 1000 + law.d_ms * prefill + law.e_ms * pairs / 1e6

    return step_ms


def _batch_ms(law: StepLaw, running: float) -> float:
    table = law.batch
    if not table:
        return law.a_ms + law.b_ms * running
    if len(table) == 1:
        return table[0][1]
    place = next((i for i, (n, _) in enumerate(table) if n >= running), len(table) - 1)
    (n0, ms0), (n1, ms1) = table[max(0, place - 1)], table[max(1, place)]
    return ms0 + (ms1 - ms0) * (max(running, table[0][0]) - n0) / (n1 - n0)
