"""How long a request will wait, and when one that is refused should come again.

    cost     = prompt_tokens + OUTPUT_WEIGHT * expected_output_tokens
    yield    = tokens let through while others waited / what the step models said for that time, over RATE_WINDOW_S or
               so, in YIELD_MIN..YIELD_MAX; 1 counts as PRIOR_S of watching, less as more was watched
    rate     = yield * what the step models of the replicas that take requests say
    wait_ms  = tokens ahead / rate

A fleet that is full takes new work as fast as it finishes old work, so what it was let have while a queue stood is what
it serves. A yield, not a rate, because replicas come and go: after an outage the rate of the outage would refuse nearly
everybody, and then nobody would be let through to show that it is over.

Retry-After says when there will be room, not that there is none now: each refused request is promised the time behind
those that were refused before it (``promised``), and promises are worked off at the same rate.

What this must not do: know tenants or replicas.
"""

from __future__ import annotations

import math
from random import Random
from typing import Protocol

from policies.config import AdmissionConfig

OUTPUT_WEIGHT = 2
"""Cost of an output token in prompt tokens (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024)."""

RATE_WINDOW_S = 5.0
PRIOR_S = 0.5
OUTPUT_SMOOTHING = 0.02
"""Weight of the newest request in the mean length of outputs."""

YIELD_MIN, YIELD_MAX = 0.4, 2.5
"""Step models are wrong by no more than this, whatever was watched; who waits too long for it is refused then."""

MODELS_NS = 100_000_000
"""What step models say is computed anew after this time."""

PROMISED_S_MAX = 600.0
"""Promises never reach further than this."""


class Capacity(Protocol):
    """What admission asks of the fleet; see :class:`policies.routing.capacity.FleetCapacity`."""

    @property
    def own_requests(self) -> int:
        """Requests of this gateway at replicas."""
        ...

    def replicas(self, now_ns: int) -> int:
        """Replicas that take requests."""
        ...

    def ready(self, prompt_tokens: int, wait_ms_max: float, count: int, now_ns: int) -> int:
        """How many of ``count`` replicas would begin with such a prompt within ``wait_ms_max``."""
        ...

    def slots(self, now_ns: int) -> tuple[int, int] | None:
        """Sequences the fleet may run, and how many more it may now; ``None``: not known."""
        ...

    def idle_ttft_ms(self, prompt_tokens: int, now_ns: int) -> float | None:
        """TTFT where nothing else runs."""
        ...

    def gap_ms(self, now_ns: int) -> float | None:
        """Gap between two tokens."""
        ...

    def tokens_per_s(self, prompt_tokens: float, output_tokens: float, output_weight: float, now_ns: int) -> float:
        """Weighted tokens per second by the step models."""
        ...


class Forecast:
    """One per gateway."""

    def __init__(self, config: AdmissionConfig, capacity: Capacity, rng: Random) -> None:
        self._config = config
        self._capacity = capacity
        self._rng = rng
        self._seen_ns: int | None = None
        self._tokens = 0.0
        """Let through while others waited, fading."""
        self._expected = 0.0
        """What the step models said for that time, fading alike."""
        self._models = 0.0
        self._models_ns: int | None = None
        self._promised = 0.0
        self._promised_ns = 0
        self._mean_prompt = 0.0
        self._mean_output = float(config.output_tokens_estimate)

    def cost(self, prompt_tokens: int, output_tokens_max: int | None) -> int:
        """Expected cost of a request in tokens."""
        return prompt_tokens + OUTPUT_WEIGHT * math.ceil(self.expected_output(output_tokens_max))

    def expected_output(self, output_tokens_max: int | None) -> float:
        """Expected output tokens."""
        return self._mean_output if output_tokens_max is None else min(self._mean_output, output_tokens_max)

    def learn(self, prompt_tokens: int, output_tokens: int) -> None:
        """A request ended with so many tokens."""
        self._mean_output += OUTPUT_SMOOTHING * (output_tokens - self._mean_output)
        known = self._mean_prompt or prompt_tokens
        self._mean_prompt = known + OUTPUT_SMOOTHING * (prompt_tokens - known)

    def watch(self, waiting: bool, tokens: int, now_ns: int) -> None:
        """``tokens`` were let through just now; ``waiting``: others have waited since the last call."""
        last, self._seen_ns = self._seen_ns, now_ns
        if last is None:
            return
        seconds = (now_ns - last) / 1e9
        kept = math.exp(-seconds / RATE_WINDOW_S) if seconds > 0 else 1.0
        self._tokens *= kept
        self._expected *= kept
        if waiting:
            self._tokens += tokens
            self._expected += seconds * self._models_say(now_ns)

    def rate(self, now_ns: int) -> float:
        """Tokens served per second, above 0."""
        models = self._models_say(now_ns)
        window, prior = RATE_WINDOW_S * models, PRIOR_S * models
        weight = prior * max(0.0, 1 - self._expected / window)
        found = (self._tokens + weight) / (self._expected + weight) if self._expected + weight > 0 else 1.0
        return max(1.0, models * min(YIELD_MAX, max(YIELD_MIN, found)))

    def _models_say(self, now_ns: int) -> float:
        """Tokens per second by the step models alone, at least 1."""
        if self._models_ns is None or not 0 <= now_ns - self._models_ns < MODELS_NS:
            prompt = self._mean_prompt or 256.0
            said = self._capacity.tokens_per_s(prompt, self._mean_output, OUTPUT_WEIGHT, now_ns)
            self._models, self._models_ns = max(1.0, said), now_ns
        return self._models

    def wait_ms(self, tokens: float, now_ns: int) -> float:
        """Time to serve ``tokens``."""
        return tokens / self.rate(now_ns) * 1_000

    def retry_after_s(self, excess_ms: float, cost: int, now_ns: int) -> float:
        """When a request of ``cost`` that would wait ``excess_ms`` too long should come again; notes the promise."""
        config, rate = self._config, self.rate(now_ns)
        gone_s = (now_ns - self._promised_ns) / 1e9
        self._promised = max(0.0, self._promised - rate * gone_s)
        self._promised_ns = now_ns
        seconds = max(0.0, excess_ms) / 1_000 + self._promised / rate
        self._promised = min(self._promised + cost, rate * PROMISED_S_MAX)
        seconds = min(max(seconds, config.retry_after_s), config.retry_after_s_max)
        return seconds * (1 + config.retry_after_jitter_share * self._rng.random())
