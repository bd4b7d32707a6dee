"""Warm pool: how many replicas stand by, started and out of rotation, and which of them. The newsvendor's rule.

A replica asked for now serves one start-up later; what the load asked for meanwhile beyond what had been asked for by
then is missed. The k-th warm replica would have served its part of that::

    filled     = replicas that the load of this tick fills to the brim, refused requests included
    there      = least number of hot replicas that was asked for within the last start-up: those that have started
    missed(n)  = arrivals * max(0, 1 - (there + n) / filled)         requests per second, with n warm ones
    saved_k    = sum over time of missed(k - 1) - missed(k), fading with HALF_LIFE_S
    worth_k    = saved_k / (time watched + PRIOR_S) * 3600 * prices.missed_usd           USD per hour
    kept       the k-th while worth_k exceeds prices.replica_usd_per_hour; ADD_FACTOR and DROP_FACTOR lie between

``filled - there`` is the error, at exactly that horizon, of forecast and scaler together, whether or not a warm replica
took it: a pool does not talk itself away. This is the newsvendor's fractile with the distribution that was seen, ``P(k
or more are short) > price of idling / worth of an hour served``, where what is short is counted in parts.

Where engines can sleep (``scaling.asleep_price_share`` below 1), one that sleeps costs less and saves less, because
waking takes its part of what a start takes::

    sleeps     the k-th, where worth_k * wake_s / start is less than what sleeping spares
    its price  is then share * price / (1 - wake_s / start)

At most ``scaling.warm_max``, at least ``warm_min``; a person's override wins over both, Serve's maximum over all.

Which: the ones that came last (they are also the ones that Serve stops first), as many as are ready beyond the number
that should serve. One that is woken, because that number rose or a hot one fell silent, loses its mark in the same
tick: gateways send to it from their next plan on. A warm one that Serve is to stop keeps its mark until it is gone.

What this must not do: decide how many serve, or wake anybody for want of a scaler's word.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from policies.config import PolicyConfig
from policies.control.joint import cold_start_ms
from policies.control.ledger import Draft
from policies.control.objective import USD_PER_HOUR_UNPRICED
from policies.control.pool import Spares
from policies.control.scaler import ScaleAdvice
from policies.control.signals import Signals
from policies.steering import ColdPhase, Knob, Lever
from policies.types import Mode, Reason, ReplicaId

HALF_LIFE_S = 86_400.0
"""What was short a day ago counts half."""

PRIOR_S = 1_800.0
"""Time without any want that counts beside what was watched: one burst after a start says little."""

ADD_FACTOR, DROP_FACTOR = 1.2, 0.8
"""A warm replica is added, and given up, where its worth is this multiple of its price."""

TARGETS_MAX = 1_024
"""Changes of the hot target that are remembered for the length of a start."""

TICK_S_MAX = 10.0
"""A tick stands for no more time than this: a controller that stood still watched nothing."""

GIVEN_NS = 30_000_000_000
"""Serve follows what it was given, and says so, within this time."""


@dataclass(slots=True)
class Want:
    """What was missed for want of replicas that had started, and what the first, second, ... warm one had saved."""

    watched_s: float = 0.0
    saved: list[float] = field(default_factory=list)
    """Requests; the first is of the first."""
    _targets: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=TARGETS_MAX))
    """When a hot target began, and which."""
    _last_ns: int | None = None

    def add(self, filled: float, target: int, arrivals_ps: float, start_s: float, most: int, now_ns: int) -> float:
        """Note one tick; how many replicas were missing at it.

        Args:
            filled: replicas the load fills.
            target: those that should serve.
            arrivals_ps: requests per second.
            start_s: how long a start takes.
            most: largest number of warm replicas that is of interest.
            now_ns: the tick's time.
        """
        seconds = 0.0 if self._last_ns is None else min(TICK_S_MAX, max(0.0, (now_ns - self._last_ns) / 1e9))
        self._last_ns = now_ns
        if not self._targets or self._targets[-1][1] != target:
            self._targets.append((now_ns, target))
        while len(self._targets) > 1 and self._targets[1][0] <= now_ns - start_s * 1e9:
            self._targets.popleft()
        there = min(asked for _, asked in self._targets)
        kept = 0.5 ** (seconds / HALF_LIFE_S)
        self.watched_s = self.watched_s * kept + seconds
        self.saved = [m * kept for m in self.saved[:most]] + [0.0] * (most - len(self.saved))
        if filled > there:
            for k in range(most):
                missed = [arrivals_ps * max(0.0, 1 - (there + n) / filled) for n in (k, k + 1)]
                self.saved[k] += (missed[0] - missed[1]) * seconds
        return max(0.0, filled - there)

    def saved_ph(self, k: int) -> float:
        """Requests per hour that the ``k``-th warm replica would have saved."""
        return self.saved[k - 1] / (self.watched_s + PRIOR_S) * 3_600 if k <= len(self.saved) else 0.0


_NOBODY = Spares()


class WarmPool:
    """The control loop's ``Pool``; see the module."""

    def __init__(self, config: PolicyConfig) -> None:
        self._scaling = config.scaling
        self._low = max(1, config.scaling.replicas_min)
        self._missed_usd = config.prices.missed_usd
        self._usd_per_hour = config.prices.replica_usd_per_hour or USD_PER_HOUR_UNPRICED
        self._want = Want()
        self._wanted = 0
        self._found = config.scaling.warm_min if config.control.mode is Mode.ACT else 0
        """Of the replicas that the first word of Serve tells of: the controller before this one kept them."""
        self._by_price = 0
        self._awake = 0
        """Of those that stand by, how many are worth more awake."""
        self._warm: list[ReplicaId] = []
        """In the order in which they became so."""
        self._came: dict[ReplicaId, int] = {}
        """Known replicas by the order in which they were first seen."""
        self._seen = 0
        self._ids: tuple[ReplicaId, ...] = ()
        self._given: deque[tuple[int, int, int]] = deque(maxlen=TARGETS_MAX)
        """When Serve was last given a total, the total, and the hot ones of it."""

    # --- the fleet without them ---------------------------------------------------------------------------------------

    def hot(self, signals: Signals, now_ns: int) -> Signals:
        """See :class:`policies.control.pool.Pool`."""
        while self._given and now_ns - self._given[0][0] > GIVEN_NS and len(self._given) > 1:
            self._given.popleft()
        ours = any(total != hot for _, total, hot in self._given) if self._given else self._found > 0
        if not self._warm and not ours:
            return signals
        known = {r.replica_id for r in signals.serving}
        warm = [r for r in self._warm if r in known]
        fleet = signals.fleet
        if fleet is not None:
            target, running = self._hot_of(fleet.replicas_target), fleet.replicas_running
            resting = min(
                len(warm), max(0, running - target)
            )  # one that is gone is in no report, and marked until then
            fleet = replace(fleet, replicas_running=running - resting, replicas_target=target)
        serving = tuple([r for r in signals.serving if r.replica_id not in warm])
        chosen = {"fresh": signals.fresh, "serving": serving}
        return replace(signals, fleet=fleet, warm=len(warm), warm_wanted=self._wanted, _chosen=chosen)

    def _hot_of(self, total: int) -> int:
        """Hot ones of Serve's target: those of a total that it was given, else somebody else's number without ours."""
        others = max(min(total, self._low), total - (self._wanted if self._given else self._found))
        return next((hot for _, given, hot in reversed(self._given) if given == total), others)

    # --- how many -----------------------------------------------------------------------------------------------------

    def step(
        self,
        seen: Signals,
        hot: Signals,
        target: int | None,
        advice: ScaleAdvice | None,
        allowed: Callable[[int], tuple[int, bool]],
        now_ns: int,
    ) -> Spares:
        """See :class:`policies.control.pool.Pool`."""
        self._meet(seen)
        if target is None or seen.blind:
            return self._held(seen, target, now_ns)
        if not self._scaling.warm_max and not self._wanted and not self._warm and not allowed(0)[0]:
            self._give(target, now_ns)
            return _NOBODY
        high = min(self._scaling.replicas_max, seen.fleet.replicas_max if seen.fleet else self._scaling.replicas_max)
        wish, reason, inputs = self._wish(hot, target, advice, high, now_ns)
        wanted, acting = allowed(wish)
        wanted = min(wanted, max(0, high - target)) if acting else 0
        written: list[Draft] = []
        if wanted != self._wanted or (not acting and wish != self._by_price):
            after = wanted if acting else wish
            if wanted != wish and acting:
                reason = Reason("WarmBounded", f"{reason.text}; {wanted} by hand or within bounds")
            written.append(_draft(seen.model, self._wanted, after, reason, inputs, acting))
        self._by_price = wish
        self._wanted = wanted
        self._give(target, now_ns)
        woken, rest = self._choose(seen, target, wanted)
        written.extend(_told(seen.model, woken, rest, inputs))
        return Spares(wanted, frozenset(self._warm), self._asleep, tuple(written))

    def _held(self, seen: Signals, target: int | None, now_ns: int) -> Spares:
        """Nobody reports: what stands stays. No number of hot ones: nobody is warm."""
        if target is None:
            self._warm, self._wanted = [], 0
            return _NOBODY
        known = set(seen.ids)
        self._warm = [r for r in self._warm if r in known]
        self._give(target, now_ns)
        return Spares(self._wanted, frozenset(self._warm), self._asleep)

    def _wish(
        self, hot: Signals, target: int, advice: ScaleAdvice | None, high: int, now_ns: int
    ) -> tuple[int, Reason, dict[str, float | int | str | None]]:
        """Warm replicas that are worth their price."""
        scaling = self._scaling
        filled = min(float(high), filled_by(hot, advice, scaling.inflight_target))
        arrivals_ps = hot.traffic.arrivals_ps if hot.traffic is not None else 0.0
        start_s = cold_start_ms(hot) / 1_000
        short = self._want.add(filled, target, arrivals_ps, start_s, scaling.warm_max, now_ns)
        lost = min(1.0, scaling.wake_s / start_s) if start_s > 0 else 1.0
        asleep_usd = scaling.asleep_price_share * self._usd_per_hour / (1 - lost) if lost < 1 else math.inf
        price, count = min(self._usd_per_hour, asleep_usd), 0
        while count < scaling.warm_max:
            factor = DROP_FACTOR if count < self._by_price else ADD_FACTOR
            if self._worth(count + 1) <= factor * price:
                break
            count += 1
        spared_usd = (1 - scaling.asleep_price_share) * self._usd_per_hour
        self._awake = len([k for k in range(1, count + 1) if self._worth(k) * lost >= spared_usd])
        inputs: dict[str, float | int | str | None] = {
            "filled": round(filled, 2), "short": round(short, 2), "start_s": round(start_s, 1),
            "arrivals_ps": round(arrivals_ps, 3),
            "watched_s": round(self._want.watched_s), "worth_usd_ph": round(self._worth(max(1, count)), 4),
            "next_worth_usd_ph": round(self._worth(count + 1), 4), "idle_usd_ph": self._usd_per_hour,
        }  # fmt: skip
        if count < scaling.warm_min:
            return scaling.warm_min, Reason("WarmLeast", f"{scaling.warm_min} are kept whatever they cost"), inputs
        figures = f"{self._worth(max(1, count)):.2f} USD an hour, idling costs {self._usd_per_hour:.2f}"
        code, text = ("WarmPays", f"the last of them would have served for {figures}") if count else (
            "WarmCostsMore", f"one would have served for {figures}")  # fmt: skip
        return count, Reason(code, text), inputs

    def _worth(self, k: int) -> float:
        return self._want.saved_ph(k) * self._missed_usd

    @property
    def _asleep(self) -> frozenset[ReplicaId]:
        """Those that rest for longest; what is woken first is awake."""
        if self._scaling.asleep_price_share >= 1:
            return frozenset()
        return frozenset(self._warm[: max(0, len(self._warm) - self._awake)])

    # --- which --------------------------------------------------------------------------------------------------------

    def _give(self, target: int, now_ns: int) -> None:
        total = target + self._wanted
        if self._given and self._given[-1][1:] == (total, target):
            self._given.pop()
        self._given.append((now_ns, total, target))

    def _meet(self, seen: Signals) -> None:
        """Note who came, and forget who went."""
        if seen.ids is self._ids:
            return
        self._ids, known = seen.ids, set(seen.ids)
        self._came = {r: at for r, at in self._came.items() if r in known}
        for replica_id in seen.ids:
            if replica_id not in self._came:
                self._seen += 1
                self._came[replica_id] = self._seen

    def _choose(self, seen: Signals, target: int, wanted: int) -> tuple[list[ReplicaId], list[ReplicaId]]:
        """Mark those that are ready beyond ``target``; who was woken, and who rests from now on."""
        ready = set(seen.serving_ids)
        free = max(0, len(ready) - target)
        before = self._warm
        self._warm = [r for r in before if r in ready][:free]
        room = min(wanted, free) - len(self._warm)
        if room > 0:
            others = sorted(ready.difference(self._warm), key=lambda r: -self._came[r])
            self._warm += others[:room]
        return [r for r in before if r in ready and r not in self._warm], [r for r in self._warm if r not in before]


def filled_by(signals: Signals, advice: ScaleAdvice | None, inflight_target: int) -> float:
    """Replicas that the load of this tick fills, whatever there are."""
    if advice is None:
        return 0.0
    if advice.cold is not None:
        return float(advice.cold.phase is ColdPhase.STARTING)
    share, inflight = advice.inputs.get("demand_share"), advice.inputs.get("inflight")
    filled = 0.0
    if isinstance(share, int | float) and math.isfinite(share):
        filled = share
    elif isinstance(inflight, int | float):
        filled = inflight / inflight_target
    traffic = signals.traffic
    refused_ps = sum([c.refused_ps for c in traffic.by_class.values()]) if traffic is not None else 0.0
    served_ps = traffic.demand_ps - refused_ps if traffic is not None else 0.0
    if refused_ps > 0 and served_ps > 0:
        filled = max(filled, len(signals.serving) * (1 + refused_ps / served_ps))
    return filled


def _draft(
    model: str,
    before: int,
    after: int,
    reason: Reason,
    inputs: dict[str, float | int | str | None],
    acting: bool,
) -> Draft:
    name = Knob.WARM_REPLICAS.value
    return Draft(Lever.REPLICAS.value, model, {name: before}, {name: after}, reason, inputs, acted=acting)


def _told(
    model: str, woken: list[ReplicaId], rest: list[ReplicaId], inputs: dict[str, float | int | str | None]
) -> list[Draft]:
    """Entries of those that were woken or taken out of rotation."""
    words = (("WarmWoken", "serves from now on", woken), ("WarmRests", "is started and gets no requests", rest))
    lever = Lever.REPLICAS.value
    return [
        Draft(lever, model, {}, {}, Reason(code, f"{replica_id} {text}"), inputs)
        for code, text, ids in words
        for replica_id in ids
    ]
