"""The joint plan: what the levers propose, weighed against each other by what it does to successes per dollar.

Four rules, in this order:

1. *One lever per symptom.* A move is meant to end named conditions (``Move.cures``). Where two moves of a tick are
   meant for the same one, the cheaper lever goes first and the other waits until that has settled; it is kept among the
   alternatives. Brakes (``urgent``) and housekeeping wait for nobody.
2. *Nothing on a replica that settles* from a change of another lever, for ``batching.settle_ticks``.
3. *A device that became slow is replaced, not bought for beside* (:mod:`policies.control.retire`).
4. *The number of replicas is bought by its prediction* (:mod:`policies.control.fleet_model`)::

       need   = fewest replicas whose predicted met share is within the objectives' quantile of the best that can be had
       up     when need is above the target for BUY_SHARE of a cold start (at least scaling.up_ticks; warm replicas are
              woken after those alone); a tick that needs
              no more takes back one that did while promises are broken, else the time starts anew
       down   when need, with a margin for chance, was below the target for DOWN_S, and no promise is being broken

   What is seen counts beside what is predicted: where gates refuse more than the quantile allows, the fleet is too
   small by that share; where promises are broken and the scaler, which counts queues, wants more, by one.

   A load that has lasted for a time ``t`` lasts that long again with odds of one to one where nothing else is known
   (Gott, Nature 363, 1993), so a replica bought at once for a burst arrives after it; until then the cheaper levers
   decide who is served in time. Where it is not the load that rose but a device that became slow, nothing is gained by
   waiting. Going down waits longer each time it proved wrong. A change of direction is bought by a change of the load,
   not by chance (:mod:`policies.control.chance`); what is seen is never chance.

The scaler's advice (``autoscaling/``) is the answer where nothing can be predicted, and always an alternative. Its
ignorance is respected: nothing falls while it holds for want of sight.

What this must not do: compute a lever's own value.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.config import PolicyConfig
from policies.control.chance import Chance
from policies.control.fleet_model import FleetModel, Outlook
from policies.control.levers import TARGET, LeverView
from policies.control.moves import Move, Value, Wishes
from policies.control.objective import USD_PER_HOUR_UNPRICED
from policies.control.retire import Retirement
from policies.control.scaler import ScaleAdvice
from policies.control.signals import Signals
from policies.steering import Alternative, Lever
from policies.types import Reason

BUY_SHARE = 1.0
"""Part of a cold start for which more replicas must have been needed before they are bought: what has lasted for one
start is there with even odds when another one is over."""

COLD_START_MS = 60_000.0
"""Cold start where no replica has told one."""

STARTS_COUNTED = 9
"""Ended starts that the expected one is taken from."""

DOWN_S = 60.0
"""Time for which fewer replicas must have been enough, if ``scaling.down_window_s`` is not shorter; doubled up to that
each time going down proved wrong."""

REGRET_S = 180.0
"""Going up within this time after going down says that going down was wrong."""

SETTLE_S = 15.0
"""After a change of the number, figures of this time are of the old fleet: nothing falls."""

SEEN_S = 600.0
"""Time for which a number that was bought by what was seen, against what is predicted, is not sold by predictions."""

SEEN_GONE_SHARE = 0.67
"""Share of the load at that time below which they sell it all the same."""

CANCEL_S = 10.0
"""Replicas that still start are given back when fewer were enough for this time."""

HOLD_REPEAT_NS = 60_000_000_000
"""The same hold is written again at most this often."""

BURNS = frozenset({"slo_burn_fast", "slo_burn_slow"})
"""While one of these is active nothing is sold, unless what is missing is not replicas."""


@dataclass(frozen=True, slots=True)
class Count:
    """The joint answer for the number of replicas."""

    target: int | None
    reason: Reason
    predicted: Outlook | None = None
    alternatives: tuple[Alternative, ...] = ()
    news: bool = False
    """A hold that should be written down although nothing changes."""
    free: bool = False
    """Nothing starts and nothing stops: a warm replica wakes or rests."""


class ReplicaCount:
    """Rule 4, tick by tick."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config.scaling
        self._quantile = config.objectives.quantile
        self._tick_s = config.control.tick_ms / 1000
        self._tick_ns = round(config.control.tick_ms * 1e6)
        self._needs: deque[tuple[int, int]] = deque()
        """Time and need with margin, over the down window."""
        self._short_since_ns: int | None = None
        """Since when more is needed, later by what was taken back."""
        self._seen_until_ns = 0
        """What was bought by sight is not sold by prediction before this, unless the load of then is gone."""
        self._seen_ps = 0.0
        self._felt_more = False
        """What is seen asks for more than what is predicted."""
        self._changed_ns: int | None = None
        self._sold_ns: int | None = None
        self._down_s = min(DOWN_S, config.scaling.down_window_s)
        self._down_s_max = max(self._down_s, config.scaling.down_window_s)
        self._told_ns: int | None = None
        self._chance = Chance()
        self._running: int | None = None
        self._arrived_ns = 0
        """When the number of replicas that run last changed."""
        self._replaced = 0
        """Slow devices that a replacement was bought for."""

    def reconfigure(self, config: PolicyConfig) -> None:
        """Keep the promises of ``config`` from now on."""
        self._quantile = config.objectives.quantile

    def step(self, view: LeverView, model: FleetModel, target: int | None, advice: ScaleAdvice, now_ns: int) -> Count:
        """The number that should stand, where ``target`` stands now."""
        signals = view.signals
        low, high = _bounds(self._config.replicas_min, self._config.replicas_max, signals)
        self._follow(signals, model, now_ns)
        if advice.cold is not None:
            self._needs.clear()
            self._short_since_ns = None
            return Count(advice.replicas, advice.reason)
        adopted = any(stage.code == "Adopted" for stage in advice.stages)
        need = enough = None
        if target is not None and not signals.blind:
            need, enough = self._chance.needs(model, low, high, now_ns)
        if need is not None and target is not None:
            predicted, need = need, min(high, max(need, self._felt(view, target, advice, now_ns)))
            self._felt_more = need > max(predicted, target)
        if target is None or adopted or need is None or enough is None:
            self._needs.clear()
            self._short_since_ns = None
            known = target is None or adopted or need is not None or _pressed(view, target)
            if known or (advice.replicas or 0) <= (target or 0):
                return Count(advice.replicas, advice.reason)
            return Count(target, Reason("NotKnownYet", "promises are kept, and what a replica carries is not known"))
        if not low <= target <= high:
            bound = max(low, min(high, target))
            code = "BoundedByFleet" if bound < target and _is_capped(signals) else "Bounded"
            return Count(bound, Reason(code, f"{low} to {high} replicas are allowed"), model.outlook(bound))
        self._note(max(enough, need), now_ns)
        if need > target:
            return self._up(need, target, high, signals, model, now_ns)
        if self._short_since_ns is not None:
            flickers = self._burns(view) and now_ns - self._short_since_ns > 2 * self._tick_ns
            self._short_since_ns = self._short_since_ns + 2 * self._tick_ns if flickers else None
        return self._down(target, low, view, model, advice, now_ns)

    def _follow(self, signals: Signals, model: FleetModel, now_ns: int) -> None:
        running = signals.fleet.replicas_running if signals.fleet else None
        if running != self._running:
            self._running, self._arrived_ns = running, now_ns
        self._replaced = min(self._replaced, len(model.lost))

    def _felt(self, view: LeverView, target: int, advice: ScaleAdvice, now_ns: int) -> int:
        """Replicas that are seen to be needed, whatever is predicted: 0 where nothing is missing.

        What is refused is refused by those that run; those that start are the answer to it already, and for a while
        after they began figures are of the fleet without them.
        """
        if now_ns - self._arrived_ns < SETTLE_S * 1e9:
            return 0
        traffic, fleet = view.signals.traffic, view.signals.fleet
        running = min(target, fleet.replicas_running) if fleet is not None else target
        refused_ps = sum(c.refused_ps for c in traffic.by_class.values()) if traffic is not None else 0.0
        served_ps = traffic.demand_ps - refused_ps if traffic is not None else 0.0
        if refused_ps > (1 - self._quantile) * (served_ps + refused_ps) and served_ps > 0:
            return math.ceil(running * (1 + refused_ps / served_ps))
        advised = (advice.replicas or 0) > target
        return target + 1 if advised and running == target and view.active & BURNS else 0

    def moved(self, before: int, after: int, now_ns: int) -> None:
        """Told that the number changed."""
        self._chance.moved(before, after)
        self._changed_ns = now_ns
        self._short_since_ns = None
        if after < before:
            self._sold_ns = now_ns
        elif self._sold_ns is not None and now_ns - self._sold_ns <= REGRET_S * 1e9:
            self._down_s = min(self._down_s_max, self._down_s * 2)
            self._sold_ns = None

    def _note(self, need: int, now_ns: int) -> None:
        self._needs.append((now_ns, need))
        while self._needs[0][0] < now_ns - self._down_s * 1e9:
            self._needs.popleft()

    def _up(self, need: int, target: int, high: int, signals: Signals, model: FleetModel, now_ns: int) -> Count:
        if self._short_since_ns is None:
            self._short_since_ns = now_ns
        age_s = (now_ns - self._short_since_ns) / 1e9
        cold_s = cold_start_ms(signals) / 1000
        pending = signals.fleet is not None and signals.fleet.replicas_running < target
        whole = model.least(1, high, repaired=True) or high
        slow = len(model.lost)
        lost = not pending and slow > self._replaced and whole <= target < whole + slow
        confirm_s = self._config.up_ticks * self._tick_s
        wait_s = confirm_s if lost else max(BUY_SHARE * cold_s, confirm_s)
        wanted = min(need, high, target + self._config.up_replicas_max)
        woken = min(signals.warm, wanted - target)
        if woken > 0:
            wait_s, wanted = confirm_s, target + woken
        stay, more = model.outlook(target), model.outlook(wanted)
        share = stay.met_share if stay else 0.0
        words = f"{need} replicas keep the promises, {target} keep {share:.0%} of the requests"
        if self._felt_more:
            words = f"refusals and broken promises ask for {need} replicas, though {target} should keep {share:.0%}"
        if wanted <= target:
            code = "BoundedByFleet" if _is_capped(signals) else "BoundedByMax"
            return Count(target, Reason(code, f"{words}; {high} are the most allowed"), stay)
        if age_s < wait_s:
            text = f"{words} for {age_s:.0f} s: a start takes {cold_s:.0f} s and pays from {wait_s:.0f} s on"
            options = _alternatives([(more, "too early: the burst may be over before it is ready")])
            return Count(target, Reason("WaitsForBurst", text), stay, options, self._is_news(now_ns))
        options = _alternatives([(stay, "breaks promises")])
        if woken > 0:
            reason = Reason("WakesWarm", f"{words} for {age_s:.0f} s, and {woken} stand by")
            return Count(wanted, reason, more, options, free=True)
        if lost:
            self._replaced = slow
            text = f"{words}: {slow} of them are slow and stay, one more costs less than it keeps"
            return Count(wanted, Reason("Replacement", text), more, options)
        if self._felt_more:
            self._seen_until_ns = now_ns + round(SEEN_S * 1e9)
            self._seen_ps = model.load.arrivals_ps if model.load is not None else 0.0
        text = f"{words} for {age_s:.0f} s, and no cheaper lever cures it"
        return Count(wanted, Reason("KeepsPromises", text), more, options)

    def _down(
        self, target: int, low: int, view: LeverView, model: FleetModel, advice: ScaleAdvice, now_ns: int
    ) -> Count:
        stay = model.outlook(target)
        signals = view.signals
        running = signals.fleet.replicas_running if signals.fleet else target
        pending = running < target
        since_ns = now_ns - CANCEL_S * 1e9 if pending else 0
        highest = max(need for at_ns, need in self._needs if at_ns >= since_ns)
        seen_s = (now_ns - self._needs[0][0]) / 1e9
        steady = Count(target, Reason("Steady", f"{target} replicas are the fewest that keep the promises"), stay)
        if highest >= target or target <= low:
            return steady
        if signals.fleet is None or signals.unknown_replicas or signals.traffic is None:
            return Count(target, Reason("HeldPartial", "not everybody reports: the number does not fall"), stay)
        settling = self._changed_within(SETTLE_S, now_ns)
        if self._burns(view) or self._was_seen(model, now_ns):
            return steady
        if not pending and (settling or seen_s < 0.95 * self._down_s):
            return steady
        if pending and (seen_s < CANCEL_S * 0.9 or self._changed_within(CANCEL_S, now_ns)):
            return steady
        fewer = max(highest, low, running if pending else low)
        less = model.outlook(fewer)
        if stay is None or less is None or fewer >= target:
            return steady
        text = (
            f"{fewer} replicas keep {less.met_share:.0%} of the requests at {less.successes_per_usd:,.0f} successes "
            f"per USD, {target} keep {stay.met_share:.0%} at {stay.successes_per_usd:,.0f}"
        )
        options: list[tuple[Outlook | None, str]] = [(stay, "costs more than it keeps")]
        if advice.replicas is not None and advice.replicas not in (target, fewer):
            options.append((model.outlook(advice.replicas), f"the scaler's own advice: {advice.reason.code}"))
        if fewer > low:
            options.append((model.outlook(fewer - 1), "would break promises, or not yet shown for long enough"))
        rest = signals.warm + target - fewer <= signals.warm_wanted
        return Count(fewer, Reason("FewerSuffice", text), less, _alternatives(options), free=rest)

    def _was_seen(self, model: FleetModel, now_ns: int) -> bool:
        """Whether the present number was bought by what was seen, and what was seen may still be there."""
        gone = model.load is not None and model.load.arrivals_ps < SEEN_GONE_SHARE * self._seen_ps
        return now_ns < self._seen_until_ns and not gone

    def _changed_within(self, seconds: float, now_ns: int) -> bool:
        return self._changed_ns is not None and now_ns - self._changed_ns < seconds * 1e9

    @staticmethod
    def _burns(view: LeverView) -> bool:
        """Whether a promise is being broken while somebody waits: where nobody does, it is not for want of replicas."""
        return bool(view.active & BURNS) and bool(view.signals.queue)

    def _is_news(self, now_ns: int) -> bool:
        if self._told_ns is not None and now_ns - self._told_ns < HOLD_REPEAT_NS:
            return False
        self._told_ns = now_ns
        return True


def cold_start_ms(signals: Signals) -> float:
    """Median of the last starts from the wish for them, else of the cold starts that replicas told of their processes,
    else :data:`COLD_START_MS`.
    """
    known = sorted([start.total_ms for start in signals.starts.ended[-STARTS_COUNTED:] if start.age_ms > 0])
    known = known or sorted([ms for r in signals.fresh if (ms := r.latest.cold_start_ms)])
    return known[len(known) // 2] if known else COLD_START_MS


def _bounds(low: int, high: int, signals: Signals) -> tuple[int, int]:
    if signals.fleet is not None:
        low, high = max(low, signals.fleet.replicas_min), min(high, signals.fleet.replicas_max)
    low = max(1, low)
    return low, max(low, high)


def _is_capped(signals: Signals) -> bool:
    """Whether the most replicas are what the caps of the whole fleet leave, not what is configured."""
    return signals.fleet is not None and signals.fleet.capped


def _pressed(view: LeverView, target: int) -> bool:
    """Whether promises are broken, or more wait than replicas: or nobody can say."""
    queue = view.signals.queue
    return queue is None or queue > target or bool(view.active & BURNS)


def _alternatives(options: Sequence[tuple[Outlook | None, str]]) -> tuple[Alternative, ...]:
    return tuple(
        Alternative(Lever.REPLICAS.value, f"{outlook.replicas} replicas", outlook.figures(), why_not)
        for outlook, why_not in options
        if outlook is not None
    )


class Arbiter:
    """Rules 1 and 2."""

    def __init__(self, config: PolicyConfig) -> None:
        self._settle_ns = round((config.batching.settle_ticks + 1) * config.control.tick_ms * 1e6)
        self._cured_ns: dict[str, tuple[Lever, int]] = {}
        """By condition: which lever moved for it last, and when."""
        self._touched_ns: dict[str, tuple[Lever, int]] = {}
        """By replica, likewise."""

    def choose(self, moves: Sequence[Move], now_ns: int) -> tuple[list[Move], list[Move]]:
        """Which moves are made, and which are not."""
        made: list[Move] = []
        refused: list[Move] = []
        for move in sorted(moves, key=lambda m: m.lever.rank):
            if not move.changes or move.urgent or self._is_free(move, now_ns):
                made.append(move)
                if move.changes:
                    self._note(move, now_ns)
            else:
                refused.append(move)
        return [_with_refused(move, refused) for move in made], refused

    def _is_free(self, move: Move, now_ns: int) -> bool:
        if any(self._held(self._cured_ns, name, move.lever, now_ns) for name in move.cures):
            return False
        return not self._held(self._touched_ns, move.target, move.lever, now_ns)

    def _held(self, book: dict[str, tuple[Lever, int]], name: str, lever: Lever, now_ns: int) -> bool:
        """Whether another lever has just moved there."""
        entry = book.get(name)
        return entry is not None and entry[0] is not lever and now_ns - entry[1] < self._settle_ns

    def _note(self, move: Move, now_ns: int) -> None:
        for name in move.cures:
            self._cured_ns[name] = (move.lever, now_ns)
        if any(knob.per_replica for knob, _ in move.after):
            self._touched_ns[move.target] = (move.lever, now_ns)

    def forget(self, now_ns: int) -> None:
        """Drop what has settled."""
        for book in (self._cured_ns, self._touched_ns):
            for name in [n for n, (_, at_ns) in book.items() if now_ns - at_ns >= self._settle_ns]:
                del book[name]


def _with_refused(move: Move, refused: Sequence[Move]) -> Move:
    """``move`` with those that were not made for its sake."""
    others = tuple(
        Alternative(
            other.lever.value,
            ", ".join(f"{knob.value} {_words(value)}" for (knob, _), value in other.after.items()),
            dict(other.predicted),
            f"{move.lever.value} is cheaper and moves for the same end first",
        )
        for other in refused
        if other.lever is not move.lever and (other.cures & move.cures or other.target == move.target)
    )
    return replace(move, alternatives=(*move.alternatives, *others)) if others else move


def _words(value: Value) -> str:
    return "as configured" if value is None else f"{value:g}"


class Joint:
    """The rules together.

    Args:
        config: objectives, prices and bounds.
        replaces: whether slow replicas may be told to leave, because Serve starts others in their place.
    """

    def __init__(self, config: PolicyConfig, *, replaces: bool = False) -> None:
        self._refusing = config.admission.engine_wait_share is not None
        usd_per_hour = config.prices.replica_usd_per_hour or USD_PER_HOUR_UNPRICED
        self.model = FleetModel(config.objectives, usd_per_hour, config.batching.samples_min)
        self._arbiter = Arbiter(config)
        self._rule = ReplicaCount(config)
        self._retirement = Retirement() if replaces else None
        self._leaving: list[Move] = []
        """What it said at this tick."""
        self.target: int | None = None
        """Its answer of the last tick for the number of replicas."""

    def reconfigure(self, config: PolicyConfig) -> None:
        """Predict for the objectives of ``config`` from now on."""
        self.model.reconfigure(config.objectives)
        self._rule.reconfigure(config)

    def observe(self, view: LeverView, now_ns: int) -> LeverView:
        """``view`` with what the model knows of each replica."""
        self.model.observe(view.signals, now_ns)
        self._retire(view.signals, now_ns)
        offered = self.model.offered(view.signals, self._refusing)
        return replace(view, offered=offered, slow=frozenset(self.model.slow), leaving=self.model.replaced)

    def _retire(self, signals: Signals, now_ns: int) -> None:
        if self._retirement is None:
            return
        slow = self.model.slow
        repaired = self.model.outlook(len(signals.serving), repaired=True) if slow else None
        figures = repaired.figures() if repaired is not None else {}
        self._leaving = self._retirement.step(signals, self.model.quick, slow, figures, now_ns)
        self.model.replaced = self._retirement.replaced

    @property
    def wishes(self) -> Wishes:
        """Who should leave and be replaced."""
        return self._retirement.wishes if self._retirement is not None else {}

    def adopt(self, in_force: Wishes) -> None:
        """Told what stands of that."""
        if self._retirement is not None:
            self._retirement.adopt(in_force)

    def choose(self, moves: Sequence[Move], now_ns: int) -> tuple[list[Move], list[Move]]:
        """Rules 1 and 2: which moves are made, and which are not."""
        self._arbiter.forget(now_ns)
        return self._arbiter.choose(moves, now_ns)

    def count(
        self, view: LeverView, moves: Sequence[Move], before: int | None, advice: ScaleAdvice, now_ns: int
    ) -> list[Move]:
        """Rules 3 and 4, where ``before`` stands and the scaler made ``moves``."""
        if before is not None and self.target is not None and before != self.target:
            self._rule.moved(self.target, before, now_ns)
        count = self._rule.step(view, self.model, before, advice, now_ns)
        self.target = count.target
        changed = before is not None and count.target is not None and count.target != before
        if changed and before is not None and count.target is not None:
            self._rule.moved(before, count.target, now_ns)
        if changed or count.news:
            return [*self._leaving, self._move(view.signals.model, before, count, advice)]
        return [*self._leaving, *[move for move in moves if not move.changes]]

    def _move(self, model_name: str, before: int | None, count: Count, advice: ScaleAdvice) -> Move:
        inputs = {k: v for k, v in advice.inputs.items() if not (isinstance(v, float) and not math.isfinite(v))}
        load = self.model.load
        if load is not None:
            inputs |= {
                "arrivals_ps": round(load.arrivals_ps, 3),
                "prompt_tokens_mean": round(load.prompt_tokens, 1),
                "output_tokens_mean": round(load.output_tokens, 1),
                "work_factor": round(self.model.work_factor, 3),
                "load_factor": round(self.model.load_factor, 3),
                "scaler_advice": advice.replicas,
            }
        predicted = count.predicted.figures() if count.predicted is not None else {}
        return Move(
            Lever.REPLICAS, model_name, {TARGET: before}, {TARGET: count.target}, count.reason, inputs, predicted,
            urgent=0 in (before, count.target), free=count.free, alternatives=count.alternatives,
        )  # fmt: skip
