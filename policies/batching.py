"""Batch size of one engine: how many sequences run at once and how many tokens one step may hold.

The step model predicts a step's duration (``policies/step_model.py``), and a step is the gap every stream sees.
:func:`solve` takes the largest values whose predicted step stays within the ITL objective::

    step_tokens_max   = running + largest prefill with step_ms(running, kv, prefill) <= itl_ms * itl_share
    running_seqs_max  = largest n with step_ms(n, n * kv_per_seq, 0) <= max(itl_ms * DECODE_SHARE, 1.5 * step_ms(1))
                        and, once the KV cache is half full, n * kv_per_seq <= kv_tokens_max

between the floors of the configuration and the engine's start-up values. Where nobody decodes no gap is at stake, and
the token budget goes up to its start-up value, for TTFT.

A budget that holds every gap may be too small to keep up with the prompts that come: each step has a fixed cost, and
small steps pay it often. A queue of prompts costs TTFT far more than a few long gaps cost a stream, whose mean gap
stays what it was while the engine keeps up (``decode_ms / (1 - prefill share)``, whatever the budget). So the budget is
at least what computes prompts :data:`KEEP_UP_FACTOR` times as fast as they come, while a step stays within the
objective or :data:`KEEP_UP_STEPS` decode steps, whichever is longer::

    room / (decode_ms + d * room) >= KEEP_UP_FACTOR * prefill_tps / 1000

An objective that no setting can hold is no reason to starve the engine: where decoding alone takes longer, a prompt may
at most double the gap (:data:`OUT_OF_REACH_FACTOR`); and as many sequences may run as lengthen the gap of a single one
by half (:data:`BATCH_FACTOR_MIN`): below that fewer sequences cost throughput and gain little.

:class:`BatchTuner` adds what one prediction cannot know. It trusts a model only after ``samples_min`` steps; it leaves
the engine alone for ``settle_ticks`` after a change; it lowers at once but raises only what was asked for
:data:`RAISE_TICKS` in a row, by a bounded factor; it makes no change below :data:`CHANGE_SHARE_MIN`. It checks the
outcome: gaps measured above the objective though predicted within shrink the budget by the measured ratio. And
preemptions are a brake on running sequences, released slowly.

The wish is always complete, so a lost message or a new engine heals with the next plan. This module must not know of
other replicas: unlike engines get unlike settings because each is tuned alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from policies.config import BatchingConfig, ObjectivesConfig
from policies.step_model import largest, predict_step_ms
from policies.types import LATENCY_BOUNDS_MS, Histogram, Knobs, Reason, ReplicaReport, Sampled, StepCoefficients

DECODE_SHARE = 0.8
"""Share of the ITL objective that decoding alone may fill; the rest is room for prompts that join."""

PREFILL_TOKENS_MIN = 16
"""Prompt tokens a step must always have room for, or waiting prompts would never start."""

OUT_OF_REACH_FACTOR = 2.0
"""Longest step over a step that only decodes, when decoding alone is above the objective."""

BATCH_FACTOR_MIN = 1.5
"""Decode step over that of one sequence up to which the number of sequences is never limited for the objective."""

KEEP_UP_FACTOR = 3.0
"""Prompts must be computable this much faster than they come, so that those that come at once do not queue long."""

KEEP_UP_STEPS = 3.0
"""Longest step that keeping up may cost over one that only decodes, where that is above the ITL objective: prompts then
get two thirds of the engine."""

KEEP_UP_FADING = 0.97
"""Share of the remembered prefill rate that is left after each tick: a lull of seconds does not lower the budget."""

KEEP_UP_SLACK = 0.6
"""A budget that keeps up is lowered only to less than this share of it."""

STEP_TOKENS_GRAIN = 8
"""Token budgets are rounded down to a multiple of this."""

CHANGE_SHARE_MIN = 0.1
"""Smaller relative changes are not worth disturbing an engine."""

RAISE_TICKS = 8
"""Consecutive solutions that must ask for more before a knob rises; it rises to the least of them."""

KV_SHARE_TIGHT = 0.5
"""From this share of the KV cache on, what the present sequences hold says how many fit."""

RAISE_SHARE_MIN = 0.25
"""A rise smaller than this is not made: raising and lowering must not meet within 20 % noise."""

OUTCOME_SAMPLES_MIN = 50
"""Token gaps needed before an outcome is judged."""

OUTCOME_HIGH = 1.1
"""Measured over objective from which the model's value is not believed."""

OUTCOME_LOW = 0.7
"""Measured over objective up to which it is believed again, step by step."""

ITL_SHARE_MAX = 0.95
"""Share of the objective that is aimed at: half of all steps take longer than predicted, and aiming at the objective
itself would make every second stream of a busy engine miss it by a millisecond."""

ITL_SHARE_MIN = 0.25
"""The correction by outcome never goes below this share of the objective."""

BRAKE_QUIET_TICKS = 10
"""Ticks without a preemption before the brake is released by a tenth."""

ERROR_SHARE_MAX = 0.5
"""A step model that is wrong by more than this on average is not trusted."""


@dataclass(slots=True)
class BatchPoint:
    """What an engine is asked to carry, and its limits."""

    model: StepCoefficients
    running: int
    """Sequences decoding at once."""
    kv_tokens: int
    """KV tokens they hold."""
    kv_tokens_max: int
    running_seqs_hard: int
    step_tokens_hard: int
    prefill_only: bool = False
    """Nobody decodes: the ITL objective has nothing to protect."""
    itl_share: float = 1.0
    """Share of the ITL objective to aim at, below 1 after the model proved too hopeful."""
    prefill_tps: float = 0.0
    """Prompt tokens computed per second lately."""

    @property
    def kv_per_seq(self) -> float | None:
        """Mean KV tokens of one sequence; ``None`` when none runs."""
        return self.kv_tokens / self.running if self.running > 0 and self.kv_tokens > 0 else None


def solve(
    point: BatchPoint, objectives: ObjectivesConfig, config: BatchingConfig
) -> tuple[Knobs, Reason, dict[str, float]]:
    """Knobs that the step model allows, the reason, and what they should lead to (``itl_ms``, ``decode_itl_ms``)."""
    tokens, reason = _solve_tokens(point, objectives, config)
    seqs = _solve_seqs(point, objectives, config)
    room = max(0, tokens - point.running)
    predicted = {
        "itl_ms": predict_step_ms(point.model, point.running, point.kv_tokens, room),
        "decode_itl_ms": predict_step_ms(point.model, point.running, point.kv_tokens, 0),
    }
    return Knobs(running_seqs_max=seqs, step_tokens_max=tokens), reason, predicted


def step_tokens_floor(running: int, step_tokens_hard: int, config: BatchingConfig) -> int:
    """Least token budget that lets ``running`` sequences decode and a prompt progress."""
    return min(step_tokens_hard, max(config.step_tokens_min, running + PREFILL_TOKENS_MIN))


def trusted(model: StepCoefficients | None, config: BatchingConfig) -> bool:
    """Whether a step model has seen enough real steps, and predicts them well enough, to act on."""
    if model is None or model.samples < config.samples_min:
        return False
    return model.error_share is None or model.error_share <= ERROR_SHARE_MAX


def _solve_tokens(point: BatchPoint, objectives: ObjectivesConfig, config: BatchingConfig) -> tuple[int, Reason]:
    tokens, reason = _solve_for_gaps(point, objectives, config)
    needed = _keep_up_tokens(point, objectives)
    if needed <= tokens:
        return tokens, reason
    text = f"{point.prefill_tps:,.0f} prompt tokens/s come: {needed} tokens a step keep their queue short"
    return needed, Reason("KeepsUp", text)


def _keep_up_tokens(point: BatchPoint, objectives: ObjectivesConfig) -> int:
    """Least budget that computes prompts fast enough, as far as a gap may be stretched for it; 0: no prompts come."""
    rate = point.prefill_tps * KEEP_UP_FACTOR / 1000
    if rate <= 0:
        return 0
    decode_ms = predict_step_ms(point.model, point.running, point.kv_tokens, 0)
    d_ms = point.model.d_ms
    room = rate * decode_ms / (1 - rate * d_ms) if rate * d_ms < 1 else math.inf
    if d_ms > 0:
        room = min(room, (max(objectives.itl_ms, KEEP_UP_STEPS * decode_ms) - decode_ms) / d_ms)
    return int(min(point.step_tokens_hard, point.running + room))


def _solve_for_gaps(point: BatchPoint, objectives: ObjectivesConfig, config: BatchingConfig) -> tuple[int, Reason]:
    hard = point.step_tokens_hard
    if point.prefill_only:
        return hard, Reason("PrefillOnly", f"nobody decodes, so TTFT alone matters: token budget {hard}")
    limit_ms = objectives.itl_ms * point.itl_share

    def within(tokens: int) -> bool:
        return predict_step_ms(point.model, point.running, point.kv_tokens, tokens - point.running) <= limit_ms

    def guess() -> float:
        return point.running + (limit_ms - decode_ms) / point.model.d_ms if point.model.d_ms > 0 else math.inf

    decode_ms = predict_step_ms(point.model, point.running, point.kv_tokens, 0)
    floor = step_tokens_floor(point.running, hard, config)
    best = largest(floor, hard, within, guess())
    if best is None:
        limit_ms = max(limit_ms, OUT_OF_REACH_FACTOR * decode_ms)
        tokens = largest(floor, hard, within, guess()) or floor
        return tokens, Reason(
            "OutOfReach",
            f"even {floor} tokens a step take more than {objectives.itl_ms:.0f} ms with {point.running} running: "
            f"{tokens} tokens keep gaps near {limit_ms:.0f} ms",
        )
    tokens = best if best == hard else max(floor, best - best % STEP_TOKENS_GRAIN)
    return tokens, Reason(
        "WithinItl", f"{tokens} tokens a step keep gaps within {limit_ms:.0f} ms with {point.running} running"
    )


def _solve_seqs(point: BatchPoint, objectives: ObjectivesConfig, config: BatchingConfig) -> int:
    hard = point.running_seqs_hard
    per_seq = point.kv_per_seq
    if per_seq is None:
        return hard
    one_ms = predict_step_ms(point.model, 1, per_seq, 0)
    limit_ms = max(objectives.itl_ms * DECODE_SHARE, BATCH_FACTOR_MIN * one_ms)
    kv_max = point.kv_tokens_max or math.inf
    tight = point.kv_tokens >= KV_SHARE_TIGHT * kv_max

    def within(seqs: int) -> bool:
        kv_tokens = seqs * per_seq
        fits = not tight or kv_tokens <= kv_max
        return fits and predict_step_ms(point.model, seqs, min(kv_tokens, kv_max), 0) <= limit_ms

    floor = min(hard, config.running_seqs_min)
    per_seq_ms = point.model.b_ms + point.model.c_ms * per_seq / 1000
    guess = (limit_ms - point.model.a_ms) / per_seq_ms if per_seq_ms > 0 else math.inf
    return largest(floor, hard, within, min(guess, kv_max / per_seq) if tight else guess) or floor


@dataclass(frozen=True, slots=True)
class BatchMove:
    """One tick's answer for one replica."""

    before: Knobs
    after: Knobs
    reason: Reason
    inputs: Mapping[str, float | int | str | None] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether the wish differs from the last one."""
        return self.before is not self.after and self.before != self.after


class BatchTuner:
    """The wish for one replica, tick by tick."""

    def __init__(self, config: BatchingConfig, objectives: ObjectivesConfig) -> None:
        self._config = config
        self._objectives = objectives
        self.wish = Knobs()
        self._begun = False
        self._settle = 0
        self._judged_from_ns = -1
        """Reports received after this are outcomes of the present wish."""
        self._itl_share = ITL_SHARE_MAX
        self._brake: int | None = None
        self._quiet = 0
        self._raise: list[Knobs] = []
        self._prefill_tps = 0.0
        self._held: BatchMove | None = None
        """The last answer that changed nothing."""
        self._looked_seq = self._worked_seq = -1
        """Last report that was looked at, and the last one of an engine that worked."""
        self._high_bucket = bisect_right(LATENCY_BOUNDS_MS, objectives.itl_ms * OUTCOME_HIGH)
        """First bucket of gaps that are too long: where none is in it or above, no quantile is."""

    def step(self, window: Sequence[Sampled[ReplicaReport]], now_ns: int) -> BatchMove:
        """Decide from the reports of the sliding window (oldest first; empty when the replica is silent)."""
        if not window:
            return self._hold("Silent", "no recent report: the last wish stands")
        latest = window[-1].value
        self._adopt(latest)
        if not trusted(latest.step_model, self._config) or latest.step_model is None:
            samples = latest.step_model.samples if latest.step_model else 0
            return self._hold("ModelUntrusted", f"step model has {samples} steps of {self._config.samples_min} needed")
        if self._settle > 0:
            self._settle -= 1
            if self._settle == 0:
                self._judged_from_ns = now_ns
            return self._hold("Settling", "waits for the effect of the last change")
        reports = [s.value for s in window]
        since = reports
        if window[0].received_ns <= self._judged_from_ns:
            since = [s.value for s in window if s.received_ns > self._judged_from_ns]
        if self.wish.step_tokens_max is not None and not self._worked(reports):
            self._prefill_tps *= KEEP_UP_FADING
            self._release_brake()
            return self._hold("Idle", "no step in the window: the last wish stands")
        point = _point(reports, latest.step_model, self._itl_share)
        self._prefill_tps = max(point.prefill_tps, self._prefill_tps * KEEP_UP_FADING)
        braked = self._update_brake(since, point)
        corrected = self._judge(since, point, now_ns)
        point.itl_share, point.prefill_tps = self._itl_share, self._prefill_tps
        if self.wish.step_tokens_max is not None and not any(r.steps for r in reports):
            return self._hold("Idle", "no step in the window: the last wish stands")
        return self._move(point, braked, corrected, now_ns)

    def _worked(self, reports: Sequence[ReplicaReport]) -> bool:
        """Whether the engine did anything in the window; only reports that are new are looked at."""
        if reports[-1].seq < self._looked_seq:
            self._looked_seq = self._worked_seq = -1
        for report in reversed(reports):
            if report.seq <= self._looked_seq:
                break
            if report.steps or report.prefill_tokens or report.preemptions:
                self._worked_seq = max(self._worked_seq, report.seq)
        self._looked_seq = reports[-1].seq
        return self._worked_seq >= reports[0].seq

    def _adopt(self, latest: ReplicaReport) -> None:
        """Begin with the knobs an engine already follows: a new controller takes over where the last one was."""
        if self._begun:
            return
        self._begun = True
        tokens, seqs = latest.knobs.step_tokens_max, latest.knobs.running_seqs_max
        self.wish = Knobs(
            running_seqs_max=seqs if seqs is not None and seqs < latest.running_seqs_hard else None,
            step_tokens_max=tokens if tokens is not None and tokens < latest.step_tokens_hard else None,
        )

    def _move(self, point: BatchPoint, braked: bool, corrected: bool, now_ns: int) -> BatchMove:
        solved, reason, predicted = solve(point, self._objectives, self._config)
        if self._brake is not None:
            seqs = solved.running_seqs_max or point.running_seqs_hard
            if self._brake >= seqs:
                self._brake = None
            else:
                solved = replace(solved, running_seqs_max=self._brake)
        seqs_max = self._pace("running_seqs_max", solved, point.running_seqs_hard, math.inf)
        tokens_max = self._pace(
            "step_tokens_max", solved, point.step_tokens_hard, self._config.step_tokens_up_factor_max
        )
        if reason.code == "KeepsUp":
            tokens_max = self._keep_up(solved.step_tokens_max or tokens_max)
        if braked and solved.running_seqs_max is not None:
            seqs_max = min(seqs_max, solved.running_seqs_max)
        if tokens_max < step_tokens_floor(point.running, point.step_tokens_hard, self._config):
            tokens_max = solved.step_tokens_max or tokens_max
        after = Knobs(running_seqs_max=seqs_max, step_tokens_max=tokens_max)
        self._remember(solved)
        before = self.wish
        if after == before:
            return self._hold("Steady", "the last wish still fits")
        if braked:
            reason = Reason("PreemptionBrake", f"preemptions: at most {after.running_seqs_max} sequences run")
        elif corrected:
            text = f"gaps came out above the objective: aims at {self._itl_share:.2f} of it with {tokens_max} tokens"
            reason = Reason("OutcomeCorrection", text)
        predicted["itl_ms"] = _full_step_ms(point, tokens_max)
        self.wish, self._settle = after, self._config.settle_ticks
        self._judged_from_ns, self._raise = now_ns, []
        return BatchMove(before, after, reason, self._inputs(point), predicted)

    def _pace(self, knob: str, solved: Knobs, hard: int, up_factor_max: float) -> int:
        """One knob's next value: down at once, up slowly, small changes not at all."""
        current: int | None = getattr(self.wish, knob)
        want: int = getattr(solved, knob)
        if current is None or want <= current * (1 - CHANGE_SHARE_MIN):
            return want
        if want <= current:
            return current
        asked = [*(getattr(k, knob) for k in self._raise), want]
        least = min(asked)
        worth = least >= current * (1 + RAISE_SHARE_MIN) or least == hard
        if len(asked) < RAISE_TICKS or least <= current or not worth:
            return current
        return max(current + 1, int(min(least, current * up_factor_max)))

    def _keep_up(self, want: int) -> int:
        """A budget for prompts that come: up at once, because they queue, and down only where it is far too large."""
        current = self.wish.step_tokens_max
        if current is None or not current * KEEP_UP_SLACK <= want <= current * (1 + RAISE_SHARE_MIN):
            return want
        return current

    def _remember(self, solved: Knobs) -> None:
        self._raise = [*self._raise, solved][-(RAISE_TICKS - 1) :]

    def _update_brake(self, since: Sequence[ReplicaReport], point: BatchPoint) -> bool:
        """Lower the cap after preemptions, raise it a tenth after a quiet while. True when it was lowered."""
        if not any(r.preemptions for r in since):
            self._release_brake()
            return False
        self._quiet = 0
        current = self.wish.running_seqs_max or point.running_seqs_hard
        base = min(current, max(point.running, 1))
        lowered = min(math.floor(base * self._config.preemption_brake), base - 1)
        self._brake = max(min(self._config.running_seqs_min, point.running_seqs_hard), lowered)
        return True

    def _release_brake(self) -> None:
        """One more tick without preemptions."""
        self._quiet += 1
        if self._brake is not None and self._quiet >= BRAKE_QUIET_TICKS:
            self._brake += max(1, self._brake // 10)
            self._quiet = 0

    def _judge(self, since: Sequence[ReplicaReport], point: BatchPoint, now_ns: int) -> bool:
        """Compare measured gaps with the objective; true when the budget must shrink below the model's value."""
        tokens_max, objective = self.wish.step_tokens_max, self._objectives.itl_ms
        if tokens_max is None or _full_step_ms(point, tokens_max) > objective * OUTCOME_HIGH:
            return False
        if self._itl_share >= ITL_SHARE_MAX and not any(any(r.itl.counts[self._high_bucket :]) for r in since):
            return False
        in_force = [r.itl.counts for r in since if r.knobs.step_tokens_max == tokens_max]
        counts = tuple(map(sum, zip(*in_force, strict=True)))
        if sum(counts) < OUTCOME_SAMPLES_MIN:
            return False
        measured = Histogram(counts).quantile_ms(self._objectives.quantile)
        if measured is None:
            return False
        if measured > objective * OUTCOME_HIGH:
            self._itl_share = max(ITL_SHARE_MIN, self._itl_share * max(0.5, objective / measured))
        elif measured < objective * OUTCOME_LOW and self._itl_share < ITL_SHARE_MAX:
            self._itl_share = min(ITL_SHARE_MAX, self._itl_share * 1.1)
        else:
            return False
        self._judged_from_ns = now_ns
        return measured > objective

    def _hold(self, code: str, text: str) -> BatchMove:
        held = self._held
        if held is None or held.after is not self.wish or held.reason.text != text:
            held = self._held = BatchMove(self.wish, self.wish, Reason(code, text))
        return held

    def _inputs(self, point: BatchPoint) -> dict[str, float | int | str | None]:
        model = point.model
        return {
            "running": point.running,
            "kv_tokens": point.kv_tokens,
            "kv_tokens_max": point.kv_tokens_max,
            "step_a_ms": model.a_ms,
            "step_b_ms": model.b_ms,
            "step_c_ms": model.c_ms,
            "step_d_ms": model.d_ms,
            "step_samples": model.samples,
            "itl_objective_ms": self._objectives.itl_ms,
            "itl_share": self._itl_share,
            "brake_seqs": self._brake,
        }


def _full_step_ms(point: BatchPoint, step_tokens_max: int) -> float:
    """Predicted duration of a step that uses the whole budget."""
    return predict_step_ms(point.model, point.running, point.kv_tokens, max(0, step_tokens_max - point.running))


def _point(reports: Sequence[ReplicaReport], model: StepCoefficients, itl_share: float) -> BatchPoint:
    """The heaviest moment of the window: most sequences at once, and the KV they held."""
    latest = reports[-1]
    running, kv_tokens = max([(r.running, r.kv_tokens_used) for r in reports])
    prefill_tokens = sum([r.prefill_tokens for r in reports])
    decoding = any(any(r.itl.counts) for r in reports)
    return BatchPoint(
        model=model,
        running=max(1, running),
        kv_tokens=kv_tokens if running else 0,
        kv_tokens_max=latest.kv_tokens_max,
        running_seqs_hard=latest.running_seqs_hard,
        step_tokens_hard=latest.step_tokens_hard,
        prefill_only=prefill_tokens > 0 and not decoding,
        itl_share=itl_share,
        prefill_tps=prefill_tokens / (sum([r.window_ms for r in reports]) / 1000 or 1.0),
    )
