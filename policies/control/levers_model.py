"""Levers of the model as a whole: who is let in, and how many replicas there are. See ``levers.py``.

This module must not compute a value itself: ``cutoffs.py`` and a :class:`~policies.control.scaler.Scaler` do.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.config import PolicyConfig
from policies.control.cutoffs import Cutoffs
from policies.control.levers import FORECAST, SHED, TARGET, LeverView
from policies.control.moves import Move, Wishes
from policies.control.scaler import Overrulable, Reconfigurable, ScaleAdvice, Scaler
from policies.control.signals import Signals
from policies.steering import Lever

HOLD_REPEAT_NS = 60_000_000_000
"""The same hold of the same lever is written again at most this often."""


class AdmissionLever:
    """How close to what is promised requests are let in, and how early less important classes are cut off."""

    lever = Lever.ADMISSION

    def __init__(self, config: PolicyConfig) -> None:
        self._cutoffs = Cutoffs(config.admission, config.objectives)

    @property
    def wishes(self) -> Wishes:
        """Both knobs."""
        return {FORECAST: self._cutoffs.forecast_share, SHED: self._cutoffs.shed_factor}

    def propose(self, view: LeverView, now_ns: int) -> Sequence[Move]:  # noqa: ARG002 - it counts ticks
        """At most one step."""
        before = self.wishes
        move = self._cutoffs.step(view.signals.traffic)
        if not move.changed:
            return ()
        after = self.wishes
        places = [place for place in before if before[place] != after[place]]
        cures = _CURES.get(move.reason.code, frozenset()) & view.active
        return (
            Move(
                self.lever,
                view.signals.model,
                {place: before[place] for place in places},
                {place: after[place] for place in places},
                move.reason,
                move.inputs,
                cures=cures,
            ),
        )

    def adopt(self, in_force: Wishes, now_ns: int) -> None:  # noqa: ARG002 - the protocol's arguments
        """Take over what stands."""
        if (share := in_force.get(FORECAST)) is not None:
            self._cutoffs.forecast_share = float(share)
        if (factor := in_force.get(SHED)) is not None:
            self._cutoffs.shed_factor = float(factor)

    def reconfigure(self, config: PolicyConfig) -> None:
        """Follow other settings from now on."""
        self._cutoffs.reconfigure(config.admission, config.objectives)


_CURES = {
    "ProtectFirst": frozenset({"slo_burn_fast", "slo_burn_slow"}),
    "ForecastHopeful": frozenset({"slo_burn_fast", "slo_burn_slow"}),
}


class ReplicasLever:
    """How many replicas there are, as ``autoscaling/`` decides."""

    lever = Lever.REPLICAS

    def __init__(self, scaler: Scaler) -> None:
        self._scaler = scaler
        self._target: int | None = None
        self._hold_code: str | None = None
        self._held_at_ns: dict[str, int] = {}
        self.advice: ScaleAdvice | None = None
        """Of the last tick."""

    @property
    def overrulable(self) -> bool:
        """Whether its scaler can go on from another number than its own."""
        return isinstance(self._scaler, Overrulable)

    @property
    def wishes(self) -> Wishes:
        """The target."""
        return {TARGET: self._target}

    def propose(self, view: LeverView, now_ns: int) -> Sequence[Move]:
        """The scaler's advice, where it changes the target or holds for a reason that is new."""
        advice = self.advice = self._scaler.recommend(view.signals, now_ns)
        before, after = self._target, advice.replicas
        self._target = after
        changed = before is not None and after is not None and after != before
        news = self._is_news(advice, view.signals, now_ns)
        if not changed and not news:
            return ()
        wish = {TARGET: after}
        urgent = 0 in (before, after)  # it falls asleep or wakes
        move = Move(self.lever, view.signals.model, {TARGET: before}, wish, advice.reason, advice.inputs, urgent=urgent)
        return (move,)

    def adopt(self, in_force: Wishes, now_ns: int) -> None:
        """Take over the target that stands."""
        target = in_force.get(TARGET, self._target)
        if target is not None and target != self._target:
            self._target = int(target)
            if isinstance(self._scaler, Overrulable):
                self._scaler.adopt(self._target, now_ns)

    def reconfigure(self, config: PolicyConfig) -> None:
        """The scaler steers by these objectives, if it can."""
        if isinstance(self._scaler, Reconfigurable):
            self._scaler.reconfigure(config)

    def _is_news(self, advice: ScaleAdvice, signals: Signals, now_ns: int) -> bool:
        """Whether a hold has just begun and was not written lately."""
        code = advice.reason.code if advice.held else None
        begun, self._hold_code = code is not None and code != self._hold_code, code
        anyone = bool(signals.replicas) or signals.gateways_known > 0
        if code is None or not begun or not anyone:
            return False
        last_ns = self._held_at_ns.get(code)
        if last_ns is not None and now_ns - last_ns < HOLD_REPEAT_NS:
            return False
        self._held_at_ns[code] = now_ns
        return True
