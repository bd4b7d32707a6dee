"""What one engine does with a load at given settings, by the step law and queueing theory: the shared estimate.

With ``u(n) = a + (b + c k / 1000) n`` the step that decodes ``n`` sequences of ``k`` KV tokens, ``P`` and ``O`` the
prompt and output tokens of a request, ``l`` the arrivals per ms, ``C`` the cap and ``T`` the token budget::

    most at once      m = min(C, T / (1 + P/O), KV cache / k)        beyond, prompts do not come through the budget
    capacity          1 / (P d + O u(m) / m)                         requests per ms with m running
    prefill share     phi = l P d                                    of the engine's time
    running           n = l O a / (1 - phi - l O (b + c k / 1000))   Little's law, below capacity; else m
    mean gap          s = u(n) / (1 - phi)                           at most u(m) + (m - 1) P d / O, all places taken
    first token       own + waits;  own = L d + ceil(L / (T - n)) u(n)
    wait for prompts  M/G/1: mean l E[own^2] / (2 (1 - l E[own])), tail exponential
    wait for a place  M/M/m: probability by Sakasegawa (1977), tail exponential

For first tokens, prompts are taken to be of two sizes, none and ``L = P (1 + cv2)``, which gives them their mean and
second moment. For gaps the short ones count as well: what of a prompt is longer than the room ``x`` that a step leaves
within the objective stretches a gap. There their lengths are an exponential of deviation ``sqrt(cv2) P``, moved to the
mean ``P``, and one prompt stretches ``sum over k >= 0 of P(length > k (T - n) + x)`` steps. With all places taken at
all times each of the other sequences begins anew every ``O`` steps; a mean gap is never longer than then, and that is
what a cap is for.

The *met share* is the part of what arrives that is served, gets its first token in time and keeps its pace. A pace is
kept by the mean gap (as goodput is counted) and by the gaps at the objective's quantile; a request that keeps only the
mean counts ``1 - QUANTILE_WORTH``. Where admission refuses what would be late, an overload costs the excess, and
prompts that wait for each other lose ``(1 - r) w / (1 - r w)`` (a queue with impatience: ``w`` late where nobody is
refused, ``r`` busy). Where it does not, the queue grows and everybody is late once the wait is longer than the
objective, looked at over :data:`HORIZON_MS`.

Estimates for comparing settings, good to some ten percent, not promises. It must not decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.config import ObjectivesConfig
from policies.step_model import predict_step_ms
from policies.types import StepCoefficients

HORIZON_MS = 60_000.0
"""How far ahead an overload is looked at."""

NOISE_MIN = 0.05
"""Least relative deviation of a step from its prediction that is reckoned with."""

DEVIATION_FACTOR = 1.25
"""Standard deviation over mean absolute error, of a normal distribution."""

QUANTILE_WORTH = 0.2
"""What a request that keeps its mean gap loses when its gaps at the quantile are too long. Goodput counts means."""

SURE = 0.999
"""Probability from which nothing that could add to it is looked at."""

LOAD_MAX = 0.995
"""Load from which a queue is looked at as one that only grows."""

ROOM_SHARE = 0.25
"""Share of the TTFT objective that a prompt must leave for the wait that admission allows before it in the engine."""

REFUSED_LATE_SHARE = 0.05
"""Part of what admission lets in that is late all the same."""


@dataclass(slots=True)
class Offered:
    """What is sent to one engine. To be read only."""

    arrivals_ps: float
    prompt_tokens: float
    """Mean of a request, what the prefix cache spares not counted."""
    output_tokens: float
    kv_tokens_seq: float
    """Mean KV tokens of a running sequence."""
    waiting: float = 0.0
    """Requests that wait for a place already."""
    refusing: bool = True
    """Admission refuses what would be late."""
    prompt_cv2: float = 1.0
    """Squared coefficient of variation of the prompts."""


@dataclass(slots=True)
class Setting:
    """Knobs to be judged. To be read only."""

    running_seqs: float
    step_tokens: float


@dataclass(slots=True)
class Estimate:
    """See the module. To be read only."""

    met_share: float
    served_share: float
    ttft_share: float
    """Of those served, with their first token in time."""
    pace_share: float
    ttft_ms: float
    """Mean."""
    gap_ms: float
    """Mean gap of a stream."""
    step_ms: float
    """Longest step: decoding and a full chunk."""
    running: float
    utilisation: float
    """Arrivals over capacity."""
    capacity_ps: float


def noise_share(model: StepCoefficients) -> float:
    """Relative standard deviation of one step from its prediction."""
    return max(NOISE_MIN, DEVIATION_FACTOR * (model.error_share or 0.0))


def decode_ms(model: StepCoefficients, running: float, kv_tokens_seq: float) -> float:
    """Step that decodes ``running`` sequences: ``u(n)``."""
    return predict_step_ms(model, running, kv_tokens_seq * running, 0)


def saturated_gap_ms(model: StepCoefficients, running: float, offered: Offered) -> float:
    """Mean gap with ``running`` places that are never empty: each of the others begins anew every ``output_tokens``."""
    joins = (running - 1) * offered.prompt_tokens / max(1.0, offered.output_tokens)
    return decode_ms(model, running, offered.kv_tokens_seq) + model.d_ms * joins


def saturated_seqs(model: StepCoefficients, gap_ms: float, offered: Offered) -> float:
    """Sequences at which :func:`saturated_gap_ms` is ``gap_ms``; infinite where none is too many."""
    one_ms = saturated_gap_ms(model, 1, offered)
    more_ms = saturated_gap_ms(model, 2, offered) - one_ms
    return max(1.0, 1 + (gap_ms - one_ms) / more_ms) if more_ms > 0 else math.inf


def places(setting: Setting, offered: Offered, kv_tokens_max: float) -> float:
    """Sequences that can run at once: by the cap, by prompts through the token budget, by the KV cache."""
    through = setting.step_tokens / (1 + offered.prompt_tokens / max(1.0, offered.output_tokens))
    kept = kv_tokens_max / offered.kv_tokens_seq if kv_tokens_max > 0 and offered.kv_tokens_seq > 0 else math.inf
    return max(1.0, min(setting.running_seqs, through, kept))


def estimate(
    model: StepCoefficients,
    offered: Offered,
    setting: Setting,
    objectives: ObjectivesConfig,
    kv_tokens_max: float,
    gap_share: float = 1.0,
) -> Estimate:
    """What comes of ``offered`` at ``setting``; see the module. About 10 us.

    ``gap_share``: share of the ITL objective that single steps are held against, below 1 where they proved longer than
    the model says. Mean gaps are not.
    """
    point = _Point(model, offered, setting, kv_tokens_max)
    in_time, lost, mean_ms = _first_tokens(point, offered, objectives.ttft_ms)
    share, load = 1.0, point.load
    if offered.refusing:
        room = max(0.0, min(1.0, (1 - point.own_ms / objectives.ttft_ms) / ROOM_SHARE))
        kept = (1 - REFUSED_LATE_SHARE) * (1 - point.long_share * (1 - room)) * (1 - lost)
        let_in = min(1.0, 1 / load) if load > 0 else 1.0
        if in_time < let_in * kept:
            share, in_time = let_in, kept
    pace = _pace(point, model, offered, objectives, gap_share)
    met = share * in_time * pace
    return Estimate(
        met, share, in_time, pace, mean_ms, point.gap_ms, point.step_ms, point.running, load, point.per_ms_max * 1000
    )


class _Point:
    """Where the engine comes to rest; names as in the module."""

    __slots__ = (
        "chunks", "decode_ms", "gap_ms", "gap_ms_most", "load", "long_share", "most", "own_ms", "per_ms", "per_ms_max",
        "room", "running", "seq_ms", "served", "stay_ms", "step_ms",
    )  # fmt: skip

    def __init__(self, model: StepCoefficients, offered: Offered, setting: Setting, kv_tokens_max: float) -> None:
        prompt, output = offered.prompt_tokens, max(1.0, offered.output_tokens)
        self.seq_ms = model.b_ms + model.c_ms * offered.kv_tokens_seq / 1000
        self.per_ms = offered.arrivals_ps / 1000
        self.most = most = places(setting, offered, kv_tokens_max)
        cost_ms = prompt * model.d_ms + output * (model.a_ms + self.seq_ms * most) / most
        self.per_ms_max = 1 / max(cost_ms, 1e-6)
        self.load = self.per_ms / self.per_ms_max
        self.served = min(self.per_ms, self.per_ms_max)
        prefill = self.served * prompt * model.d_ms
        left = 1 - prefill - self.served * output * self.seq_ms
        alone = self.served * output * model.a_ms
        self.running = max(1.0, min(most, alone / left)) if left > 0 and self.load < 1 else most
        self.decode_ms = model.a_ms + self.seq_ms * self.running
        self.gap_ms_most = model.a_ms + self.seq_ms * most + model.d_ms * (most - 1) * prompt / output
        self.gap_ms = min(self.decode_ms / max(0.02, 1 - prefill), max(self.gap_ms_most, self.decode_ms))
        self.stay_ms = output * self.gap_ms
        long = prompt * (1 + offered.prompt_cv2)
        self.long_share = 1 / (1 + offered.prompt_cv2)
        self.room = room = max(1.0, setting.step_tokens - self.running)
        self.chunks = math.ceil(long / room) if long > 0 else 1
        self.own_ms = long * model.d_ms + self.chunks * self.decode_ms
        self.step_ms = self.decode_ms + model.d_ms * min(room, long)


def _first_tokens(point: _Point, offered: Offered, ttft_ms: float) -> tuple[float, float, float]:
    """First tokens within ``ttft_ms``: their share, what prompts still lose where late ones are refused, mean time."""
    shares = (point.long_share, point.own_ms), (1 - point.long_share, point.decode_ms)
    own_ms = sum([share * ms for share, ms in shares])
    backlog_ms = offered.waiting / point.per_ms_max
    growth = point.per_ms - point.per_ms_max
    if point.load >= LOAD_MAX:
        in_time = sum([share * _overtaken(point, ttft_ms - ms, offered.waiting, growth) for share, ms in shares])
        return in_time, 0.0, own_ms + backlog_ms
    place = point.load ** (math.sqrt(2 * (point.most + 1)) - 1)
    place_ms = point.stay_ms / (point.most * (1 - point.load))
    busy = min(0.98, point.per_ms * own_ms)
    square = sum([share * ms * ms for share, ms in shares])
    busy_ms = square / max(1e-9, own_ms) / 2 / (1 - busy)
    in_time = late = 0.0
    for share, ms in shares:
        left_ms = ttft_ms - ms
        if left_ms > 0:
            behind = busy * math.exp(-left_ms / busy_ms)
            late += share * behind
            ready = (1 - place * math.exp(-left_ms / place_ms)) * (1 - behind)
            in_time += share * ready * _overtaken(point, left_ms, offered.waiting, growth)
    lost = (1 - busy) * late / (1 - busy * late)
    return in_time, lost, own_ms + backlog_ms + place * place_ms + busy * busy_ms


def _overtaken(point: _Point, left_ms: float, waiting: float, growth: float) -> float:
    """Share of :data:`HORIZON_MS` in which a queue that grows or shrinks is short enough; 0 without time left."""
    if left_ms <= 0:
        return 0.0
    room = left_ms * point.per_ms_max - waiting
    if growth > 0:
        return min(1.0, max(0.0, room) / (growth * HORIZON_MS))
    if room >= 0:
        return 1.0
    return 1 - min(1.0, -room / max(1e-9, -growth * HORIZON_MS))


def _pace(
    point: _Point, model: StepCoefficients, offered: Offered, objectives: ObjectivesConfig, gap_share: float
) -> float:
    """Share of the streams that keep their pace, by the mean gap and, for a part, by the gaps at the quantile."""
    limit, noise = objectives.itl_ms, noise_share(model)
    output = max(1.0, offered.output_tokens)
    stay = point.served * point.stay_ms
    steady = (model.d_ms * offered.prompt_tokens / output) ** 2 * stay * (1 + offered.prompt_cv2)
    steady += (noise * point.gap_ms) ** 2 / output
    joins = point.seq_ms * math.sqrt(point.running)
    stretch = point.gap_ms / max(1e-9, point.decode_ms)
    mean = max(
        _below(limit, point.step_ms, noise * point.step_ms),
        _below(limit, point.gap_ms, math.sqrt(steady + (joins * stretch) ** 2)),
        _below(limit, point.gap_ms_most, math.sqrt(steady)),
    )
    limit *= gap_share
    short = _below(limit, point.step_ms, math.hypot(noise * point.step_ms, joins))
    if short < SURE:
        allowed = math.floor((1 - objectives.quantile) * (output - 1) + 1e-9)
        few = _poisson_at_most(allowed, stay * stretched_steps(point.decode_ms, point.room, model.d_ms, limit, offered))
        short = max(short, _below(limit, point.decode_ms, max(noise * point.decode_ms, joins)) * few)
    return mean * (1 - QUANTILE_WORTH + QUANTILE_WORTH * short)


def stretched_steps(decoding_ms: float, room: float, d_ms: float, limit_ms: float, offered: Offered) -> float:
    """Steps longer than ``limit_ms`` that one prompt leads to, with ``room`` prompt tokens in a step."""
    mean = offered.prompt_tokens
    if mean <= 0:
        return 0.0
    fits = max(0.0, (limit_ms - decoding_ms) / d_ms) if d_ms > 0 else math.inf
    if fits >= room:
        return 0.0
    deviation = mean * math.sqrt(offered.prompt_cv2)
    least = mean - deviation
    sure = max(0, math.ceil((least - fits) / room))
    if deviation < 1e-3 * mean:
        return float(sure)
    rest = math.exp(-max(0.0, sure * room + fits - least) / deviation)
    return sure + rest / (1 - math.exp(-room / deviation))


def _below(limit: float, mean: float, deviation: float) -> float:
    """Probability that a normal value is at most ``limit``."""
    if deviation <= 0:
        return 1.0 if mean <= limit else 0.0
    return 0.5 * (1 + math.erf((limit - mean) / (deviation * math.sqrt(2))))


def _poisson_at_most(most: int, mean: float) -> float:
    """Probability of at most ``most`` events; normal approximation where many are allowed."""
    if most > 12:
        return _below(most + 0.5, mean, math.sqrt(max(mean, 1e-9)))
    term = total = math.exp(-mean)
    for i in range(1, most + 1):
        term *= mean / i
        total += term
    return min(1.0, total)
