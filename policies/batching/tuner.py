"""The wish for one replica, tick by tick.

:class:`BatchTuner` adds what one prediction cannot know: it trusts a model only after ``samples_min`` steps; it leaves
the engine alone for ``settle_ticks`` after a change; it moves at a pace (``pace.py``); it checks the outcome
(``outcome.py``); preemptions are a brake (``brake.py``); and a load that comes back gets the setting that proved good
for it (``memory.py``).

The wish is always complete, so a lost message or a new engine heals with the next plan. This module must not know of
other replicas: unlike engines get unlike settings because each is tuned alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from policies.batching.brake import Brake
from policies.batching.choose import CALM_LOAD, MARGIN, Choice, Judge, choose
from policies.batching.load import FADING_QUICK, REQUESTS_QUICK, LoadMeter, OfferedLoad
from policies.batching.memory import CHANGED_SHARE, PROVEN_TICKS, Classes, Good, KnownGood, sizes_of
from policies.batching.outcome import ITL_SHARE_MAX, Outcome
from policies.batching.pace import Pace, keep_up
from policies.batching.reach import Reach, within_reach
from policies.batching.recent import Recent
from policies.batching.solve import BatchPoint, full_step_ms, solve, solve_gaps, step_tokens_floor, trusted
from policies.config import BatchingConfig, ObjectivesConfig
from policies.queueing import Offered, decode_ms
from policies.types import Knobs, Reason, ReplicaReport, Sampled, StepCoefficients

KEEP_UP_FADING = 0.97
"""Share of the remembered prefill rate that is left after each tick: a lull of seconds does not lower the budget."""

MANY = 1.64
"""Standard deviations of a Poisson number of sequences above its mean: 95 % of the time fewer run."""

LONG_PROMPTS_SHARE = 0.95
"""Share of the aim that chunks of an average prompt may take: attention to its beginning makes later ones longer."""

ALIKE_SHARE = 0.05
"""Relative change of a figure up to which the last solution is taken again: a tick over a steady fleet is cheap."""

_Inputs: TypeAlias = tuple[tuple[Knobs | bool | int, ...], tuple[float, ...]]
"""What must be the same, and what must be alike, for a solution to hold."""


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


@dataclass(frozen=True, slots=True)
class _Solution:
    """What one tick's figures ask for."""

    knobs: Knobs
    reason: Reason
    predicted: dict[str, float]
    choice: Choice | None = None


class BatchTuner:
    """The wish for one replica, tick by tick."""

    def __init__(self, config: BatchingConfig, objectives: ObjectivesConfig) -> None:
        self._config = config
        self.wish = Knobs()
        self._begun = False
        self._settle = 0
        self._judged_from_ns = -1
        """Reports received after this are outcomes of the present wish."""
        self._in_force_ticks = 0
        self._outcome = Outcome(objectives)
        self._brake = Brake(config)
        self._pace = Pace()
        self._meter, self._quick = LoadMeter(), LoadMeter(FADING_QUICK, REQUESTS_QUICK)
        self._classes, self._known = Classes(), KnownGood()
        self._prefill_tps = 0.0
        self._drifts = 0
        self._held: BatchMove | None = None
        """The last answer that changed nothing."""
        self._recent = Recent()
        self._solved: tuple[_Inputs, _Solution] | None = None
        """The last solution, and what it was for."""
        self.reconfigure(objectives)

    def reconfigure(self, objectives: ObjectivesConfig) -> None:
        """Aim at ``objectives`` from now on; what was learned of the replica stays, what proved good does not."""
        self._objectives = objectives
        self._outcome.reconfigure(objectives)
        self._known = KnownGood()
        self._held = self._solved = None

    def adopt(self, knobs: Knobs, now_ns: int) -> None:
        """Go on from ``knobs``: somebody else (a guard, an override) has them stand instead of the wish."""
        self.wish = Knobs(running_seqs_max=knobs.running_seqs_max, step_tokens_max=knobs.step_tokens_max)
        self._made(now_ns)

    def receive(self, sampled: Sampled[ReplicaReport], left_ns: int = 0) -> None:
        """Count an accepted report as it comes, which leaves less to the next :meth:`step`; it may be left out.

        Reports received before ``left_ns`` have left the window.
        """
        if self._recent.receive(sampled, self._outcome.high_bucket, left_ns):
            self._meter.receive(sampled.value)
            self._quick.receive(sampled.value)

    def step(
        self, window: Sequence[Sampled[ReplicaReport]], now_ns: int, demand: OfferedLoad | None = None
    ) -> BatchMove:
        """Decide from the reports of the sliding window (oldest first; empty when the replica is silent).

        ``demand`` is what is sent to this replica, queues in front of it included; ``None``: what its reports show.
        """
        if not window:
            return self._hold("Silent", "no recent report: the last wish stands")
        latest = window[-1].value
        model = latest.step_model
        for report in self._recent.look(window, self._outcome.high_bucket):
            self._meter.receive(report)
            self._quick.receive(report)
        self._take_over(latest)
        if model is None or not trusted(model, self._config):
            samples = model.samples if model else 0
            return self._hold("ModelUntrusted", f"step model has {samples} steps of {self._config.samples_min} needed")
        self._pace.tick()
        if self._settle > 0:
            self._settle -= 1
            if self._settle == 0:
                self._judged_from_ns = now_ns
            return self._hold("Settling", "waits for the effect of the last change")
        self._in_force_ticks += 1
        if self.wish.step_tokens_max is not None and not self._recent.worked:
            self._prefill_tps *= KEEP_UP_FADING
            self._brake.ease()
            return self._hold("Idle", "no step in the window: the last wish stands")
        return self._consider(latest, model, demand, now_ns)

    # --- what the reports say -----------------------------------------------------------------------------------------

    def _take_over(self, latest: ReplicaReport) -> None:
        """Begin with the knobs an engine already follows: a new controller goes on where the last one was."""
        if self._begun:
            return
        self._begun = True
        tokens, seqs = latest.knobs.step_tokens_max, latest.knobs.running_seqs_max
        self.wish = Knobs(
            running_seqs_max=seqs if seqs is not None and seqs < latest.running_seqs_hard else None,
            step_tokens_max=tokens if tokens is not None and tokens < latest.step_tokens_hard else None,
        )

    def _consider(
        self, latest: ReplicaReport, model: StepCoefficients, demand: OfferedLoad | None, now_ns: int
    ) -> BatchMove:
        """A working engine with a trusted model: outcome, load, solution, move."""
        if model.drifts != self._drifts:
            self._drifts, self._outcome.itl_share = model.drifts, ITL_SHARE_MAX
            self._pace.forget()
        point = self._recent.point(model)
        prompts = point.prefill_tps > 0
        self._prefill_tps = max(point.prefill_tps, self._prefill_tps * KEEP_UP_FADING)
        point.prefill_tps = self._prefill_tps
        braked = self._recent.preempted(self._judged_from_ns)
        if braked:
            current = self.wish.running_seqs_max or point.running_seqs_hard
            self._brake.pull(current, point.running, point.running_seqs_hard)
        else:
            self._brake.ease()
        corrected = self._judge(point, now_ns)
        point.itl_share = self._outcome.aim(model)
        offered = self._meter.offered(latest.waiting, demand)
        lately = self._quick.offered(latest.waiting, demand)
        waiting = latest.waiting + (demand.waiting if demand is not None else 0.0)
        held = self._brake.seqs is not None
        reach = Reach(max(point.running, _most(self._meter.running)), waiting, prompts, held, self._tokens_min(point))
        if lately is not None and not braked and not corrected and (again := self._recall(point, lately)):
            again = within_reach(self.wish, again, point, reach)
            if again != self.wish:
                return self._become(again, point, now_ns)
        return self._move(point, self._solve(point, offered, corrected), reach, braked, corrected, now_ns)

    def _judge(self, point: BatchPoint, now_ns: int) -> bool:
        """Measured gaps against the objective; true when the budget must shrink below the model's value."""
        tokens_max, after_ns = self.wish.step_tokens_max, self._judged_from_ns
        if tokens_max is None or (self._outcome.itl_share >= ITL_SHARE_MAX and not self._recent.late(after_ns)):
            return False
        if not self._outcome.judge(self._recent.since(after_ns), tokens_max, full_step_ms(point, tokens_max)):
            return False
        self._judged_from_ns = now_ns
        return self._outcome.bad

    # --- what follows -------------------------------------------------------------------------------------------------

    def _recall(self, point: BatchPoint, offered: Offered) -> Knobs | None:
        """The setting that proved good for a load that has just come back; else keeps what proves good."""
        sizes, wish = sizes_of(offered), self.wish
        changed = self._classes.step(sizes, self._quick.error)
        load, tokens = self._classes.now, wish.step_tokens_max
        if load is None:
            return None
        if not changed:
            calm = not self._outcome.bad and self._brake.seqs is None and offered.waiting <= point.running
            if tokens is not None and calm and self._in_force_ticks >= PROVEN_TICKS:
                step_ms = full_step_ms(point, tokens)
                self._known.keep(load, Good(wish, self._outcome.itl_share, point.model.drifts, step_ms))
            return None
        self._in_force_ticks = 0
        self._meter.follow(self._quick)
        self._pace.forget()
        good = self._known.find(sizes, point.model.drifts)
        if good is None or good.knobs == wish or good.knobs.step_tokens_max is None:
            return None
        judge = Judge(point, offered, self._objectives, good.itl_share / ITL_SHARE_MAX)
        if judge.worth(good.knobs) < judge.worth(wish):
            return None
        step_ms = full_step_ms(point, good.knobs.step_tokens_max)
        floor = self._tokens_min(point)
        if abs(step_ms / good.step_ms - 1) > CHANGED_SHARE or good.knobs.step_tokens_max < floor:
            return None
        self._outcome.itl_share = good.itl_share
        return good.knobs

    def _become(self, knobs: Knobs, point: BatchPoint, now_ns: int) -> BatchMove:
        """Go back to a setting that proved good."""
        text = f"this load was served well before with {knobs.running_seqs_max} sequences and {knobs.step_tokens_max}"
        before, self.wish = self.wish, knobs
        self._made(now_ns)
        tokens = point.step_tokens_hard if knobs.step_tokens_max is None else knobs.step_tokens_max
        predicted = {"itl_ms": full_step_ms(point, tokens)}
        return BatchMove(before, knobs, Reason("KnownGood", f"{text} tokens a step"), self._inputs(point), predicted)

    def _solve(self, point: BatchPoint, offered: Offered | None, corrected: bool) -> _Solution:
        """The last solution while what it was for is about the same, else a new one."""
        if offered is not None and (offered.arrivals_ps <= 0 or (point.prefill_only and offered.output_tokens < 2)):
            offered = None
        running = self._meter.running if offered is not None else point.running
        inputs = _inputs(point, offered, corrected or self._pace.calm, self.wish, max(1.0, running))
        if self._solved is None or not _alike(self._solved[0], inputs):
            self._solved = inputs, self._solve_anew(self._usual(point) if offered is not None else point, offered)
        solution = self._solved[1]
        self._pace.busy(solution.choice is not None and solution.choice.expected.utilisation >= CALM_LOAD)
        return solution

    def _solve_anew(self, point: BatchPoint, offered: Offered | None) -> _Solution:
        """By gaps alone where nothing is known of the load, else for both objectives."""
        if offered is None:
            return _Solution(*solve(point, self._objectives, self._config))
        knobs, reason, predicted = solve_gaps(point, self._objectives, self._config)
        choice = choose(
            point, offered, knobs, self.wish, self._objectives, self._config, self._pace.calm, self._meter.error,
            self._outcome.itl_share / ITL_SHARE_MAX,
        )  # fmt: skip
        found = choice.expected
        predicted |= {"met_share": found.met_share, "ttft_ms": found.ttft_ms, "gap_ms": found.gap_ms}
        if choice.knobs != knobs:
            text = (
                f"{found.met_share:.0%} of {offered.arrivals_ps:.2g} requests/s keep both objectives with "
                f"{choice.knobs.running_seqs_max} sequences and {choice.knobs.step_tokens_max} tokens a step, "
                f"{choice.gaps_alone.met_share:.0%} where every gap is held"
            )
            reason = Reason("BothObjectives", text)
        return _Solution(choice.knobs, reason, predicted, choice)

    def _usual(self, point: BatchPoint) -> BatchPoint:
        """``point`` with as many sequences as run at once but for few moments: some dozen arrivals come as they like.

        And with room for what the law does not know: the later part of a long prompt takes longer than its first.
        """
        running = max(1, math.ceil(_most(self._meter.running)))
        return BatchPoint(
            model=point.model,
            running=running,
            kv_tokens=round(running * (point.kv_per_seq or 0.0)),
            kv_tokens_max=point.kv_tokens_max,
            running_seqs_hard=point.running_seqs_hard,
            step_tokens_hard=point.step_tokens_hard,
            prefill_only=point.prefill_only,
            itl_share=point.itl_share * LONG_PROMPTS_SHARE,
            prefill_tps=point.prefill_tps,
        )

    def _move(
        self, point: BatchPoint, solution: _Solution, reach: Reach, braked: bool, corrected: bool, now_ns: int
    ) -> BatchMove:
        before, choice = self.wish, solution.choice
        chosen = None
        if choice is not None and choice.stands is not None and not self._pace.calm:
            chosen = self._pace.lose(choice.gain - MARGIN, before, choice.knobs)
            if not chosen and not braked and self._brake.seqs is None and self._holds(point):
                return self._hold("Steady", "the last wish still fits")
        after, solved = self._next(point, solution, braked, chosen)
        self._pace.remember(solved)
        after = within_reach(before, after, point, reach)
        if after == before:
            return self._hold("Steady", "the last wish still fits")
        reason, predicted = solution.reason, dict(solution.predicted)
        if braked:
            reason = Reason("PreemptionBrake", f"preemptions: at most {after.running_seqs_max} sequences run")
        elif corrected:
            share = self._outcome.itl_share
            text = f"gaps came out above the objective: aims at {share:.2f} of it with {after.step_tokens_max} tokens"
            reason = Reason("OutcomeCorrection", text)
        predicted["itl_ms"] = full_step_ms(point, after.step_tokens_max or point.step_tokens_hard)
        self.wish = after
        self._made(now_ns)
        self._pace.moved(before, after)
        return BatchMove(before, after, reason, self._inputs(point), predicted)

    def _holds(self, point: BatchPoint) -> bool:
        """The budget that stands lets those that run decode and a prompt progress."""
        tokens = self.wish.step_tokens_max
        return tokens is not None and tokens >= self._tokens_min(point)

    def _tokens_min(self, point: BatchPoint) -> int:
        return step_tokens_floor(point.running, point.step_tokens_hard, self._config)

    def _next(self, point: BatchPoint, solution: _Solution, braked: bool, chosen: bool | None) -> tuple[Knobs, Knobs]:
        """The next wish, and the solution under the brake; ``chosen``: whether both knobs are set as chosen.

        ``None``: each is moved at its own pace.
        """
        solved, wish, hard = solution.knobs, self.wish, point.running_seqs_hard
        if self._brake.seqs is not None:
            if self._brake.seqs >= (solved.running_seqs_max or hard):
                self._brake.release()
            else:
                solved = replace(solved, running_seqs_max=self._brake.seqs)
        if chosen is not None:
            taken = solved if chosen else wish
            seqs_max, tokens_max = taken.running_seqs_max or hard, taken.step_tokens_max or point.step_tokens_hard
            if not chosen and self._brake.seqs is not None:
                seqs_max = self._pace.seqs(wish.running_seqs_max, solved, hard)
        else:
            seqs_max = self._pace.seqs(wish.running_seqs_max, solved, hard)
            up_factor_max = self._config.step_tokens_up_factor_max
            tokens_max = self._pace.tokens(wish.step_tokens_max, solved, point.step_tokens_hard, up_factor_max)
            if solution.reason.code == "KeepsUp":
                tokens_max = keep_up(wish.step_tokens_max, solved.step_tokens_max or tokens_max)
        if braked and solved.running_seqs_max is not None:
            seqs_max = min(seqs_max, solved.running_seqs_max)
        floor = self._tokens_min(point)
        if tokens_max < floor:
            tokens_max = max(floor, solved.step_tokens_max or floor)
        return Knobs(running_seqs_max=seqs_max, step_tokens_max=tokens_max), solved

    def _made(self, now_ns: int) -> None:
        """A change was made: the engine settles, and outcomes before now are not the new wish's."""
        self._settle, self._in_force_ticks = self._config.settle_ticks, 0
        self._judged_from_ns = now_ns
        self._pace.settle()

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
            "itl_share": point.itl_share,
            "brake_seqs": self._brake.seqs,
        }


def _most(mean: float) -> float:
    """Sequences at once but for few moments, where ``mean`` run on average."""
    return mean + MANY * math.sqrt(mean)


def _inputs(point: BatchPoint, offered: Offered | None, corrected: bool, wish: Knobs, running: float) -> _Inputs:
    model = point.model
    per_seq = point.kv_tokens / point.running if offered is None else offered.kv_tokens_seq
    must = (
        wish, corrected, point.prefill_only, point.running_seqs_hard, point.step_tokens_hard, point.kv_tokens_max,
        offered is None, offered is not None and offered.refusing,
    )  # fmt: skip
    one_ms, all_ms = decode_ms(model, 1, per_seq), decode_ms(model, running, per_seq)
    may = (running, per_seq, one_ms, all_ms, model.d_ms, point.itl_share)
    if offered is None:
        return must, (*may, point.prefill_tps)
    sizes = offered.arrivals_ps, offered.prompt_tokens, offered.output_tokens
    return must, (*may, *sizes, 1 + offered.waiting / running)


def _alike(old: _Inputs, new: _Inputs) -> bool:
    """Whether figures differ by less than :data:`ALIKE_SHARE`, and everything else not at all."""
    if old[0] != new[0]:
        return False
    pairs = zip(old[1], new[1], strict=True)
    return all(-ALIKE_SHARE * a <= a - b <= ALIKE_SHARE * a for a, b in pairs)
