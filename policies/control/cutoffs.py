"""How close to what is promised admission may let requests in, and how early less important classes are cut off.

The gateways refuse by forecast (``policies/admission/gate.py``); a forecast can be too careful or too hopeful, and only
what became of those it let in says which. With ``late`` the share of the answers whose first token came too late and
``quantile`` that of the objectives::

    forecast share   falls by a tenth     while late > LATE_FACTOR * (1 - quantile) and PRESSED_MIN requests were
                                          refused in the window of the reports, or wait
                     rises by STEP        while late < (1 - quantile) / 2 and more than 1 - quantile are refused, for
                                          REST_TICKS in a row: room is given away
                     returns              after QUIET_TICKS without refusals
    shed factor      falls by a quarter   while the first class that asks is refused or late, and others are served
                     returns              step by step after QUIET_TICKS of that class being served in time

One step each :data:`REST_TICKS`, since it takes the window of the reports to see what came of it; a step back only
after :data:`TURN_TICKS`, so that noise turns no knob to and fro. Both return to what is configured by themselves, so
that a lull leaves nothing behind.

What this must not do: know a gateway's queue, or refuse anybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.config import AdmissionConfig, ObjectivesConfig
from policies.control.signals import Traffic
from policies.control.traffic import ClassTraffic
from policies.control.windows import WINDOW_MS
from policies.types import Priority, Reason

FORECAST_SHARE_MIN = 0.4
"""Never lower: below that a fleet idles while it refuses."""

STEP = 0.05
"""One step up of the forecast share, or one step of its return."""

SHED_FACTOR_MIN = 0.2
"""Never lower: a class that is cut off at a fifth of its usual pressure is as good as closed."""

REST_TICKS = 15
"""Ticks between two steps: the window of the reports."""

TURN_TICKS = 300
"""Ticks between two steps of the forecast share in opposite directions."""

LATE_FACTOR = 2.0
"""Late answers over what the objectives' quantile allows from which fewer are let in."""

PRESSED_MIN = 3
"""Requests refused in the window, or waiting, from which room is short. One that is refused among late ones says that
some are too long for their objective, which letting fewer of the others in does not cure."""

QUIET_TICKS = 300
"""Ticks without trouble before a knob returns."""

ENDED_PS_MIN = 0.5
"""Answers per second below which their lateness says nothing."""


@dataclass(frozen=True, slots=True)
class CutoffMove:
    """One tick's answer."""

    forecast_share: float
    shed_factor: float
    reason: Reason
    changed: bool = False
    inputs: Mapping[str, float | int | str | None] = field(default_factory=dict)


class Cutoffs:
    """Both knobs, tick by tick."""

    def __init__(self, config: AdmissionConfig, objectives: ObjectivesConfig) -> None:
        self._config, self._objectives = config, objectives
        self.forecast_share = config.forecast_share
        self.shed_factor = 1.0
        self._rest = 0
        self._unrefused = self._untroubled = self._refusing = 0
        self._since_step, self._rose = TURN_TICKS, False

    def reconfigure(self, config: AdmissionConfig, objectives: ObjectivesConfig) -> None:
        """Return to other values from now on."""
        if self.forecast_share == self._config.forecast_share:
            self.forecast_share = config.forecast_share
        self._config, self._objectives = config, objectives

    def step(self, traffic: Traffic | None) -> CutoffMove:
        """Move one knob by one step where it is time to, else stay."""
        self._rest = max(0, self._rest - 1)
        if traffic is None:
            return self._stay("NoGateway", "no gateway reports")
        classes = list(traffic.by_class.values())
        served_ps = sum(c.succeeded_ps for c in classes)
        refused_ps = sum(c.refused_ps for c in classes)
        late = sum(c.late_ttft_ps for c in classes) / served_ps if served_ps > 0 else 0.0
        first, troubled = self._first(traffic)
        allowed = 1 - self._objectives.quantile
        refused = refused_ps / (refused_ps + served_ps) if refused_ps > 0 else 0.0
        self._unrefused = 0 if refused_ps > 0 else self._unrefused + 1
        self._refusing = self._refusing + 1 if refused > allowed else 0
        self._since_step += 1
        self._untroubled = 0 if troubled else self._untroubled + 1
        if self._rest:
            return self._stay("Settling", "waits for the effect of the last change")
        inputs: dict[str, float | int | str | None] = {
            "served_ps": round(served_ps, 3),
            "refused_ps": round(refused_ps, 3),
            "late_ttft_share": round(late, 4),
            "queued": traffic.queued,
        }
        reason = None
        if troubled and len([c for c in classes if c.arrivals_ps > 0]) > 1:
            reason = self._shed(first)
        elif served_ps >= ENDED_PS_MIN or refused_ps > 0:
            reason = self._admit(late, refused_ps, traffic.queued)
        reason = reason or self._return()
        if reason is None:
            return self._stay("Steady", "what is let in is served in time")
        self._rest = REST_TICKS
        return CutoffMove(self.forecast_share, self.shed_factor, reason, True, inputs)

    def _stay(self, code: str, text: str) -> CutoffMove:
        return CutoffMove(self.forecast_share, self.shed_factor, Reason(code, text))

    def _first(self, traffic: Traffic) -> tuple[str, bool]:
        """The most important class that asks, and whether it is refused or late while others are served."""
        asking = [(p.value, c) for p in Priority if (c := traffic.by_class.get(p.value)) and c.arrivals_ps > 0]
        if not asking:
            return "", False
        name, of_class = asking[0]
        others = any(c.succeeded_ps > 0 for _, c in asking[1:])
        return name, others and self._suffers(of_class)

    def _suffers(self, of_class: ClassTraffic) -> bool:
        lost_ps = of_class.refused_ps + of_class.late_ttft_ps + of_class.abandoned_ps
        return of_class.demand_ps > 0 and lost_ps > (1 - self._objectives.quantile) * of_class.demand_ps

    def _shed(self, first: str) -> Reason | None:
        if self.shed_factor <= SHED_FACTOR_MIN:
            return None
        self.shed_factor = round(max(SHED_FACTOR_MIN, self.shed_factor * 0.75), 3)
        text = f"class {first} is refused or late while others are served: those are cut off at {self.shed_factor:g}"
        return Reason("ProtectFirst", f"{text} of their usual pressure")

    def _admit(self, late: float, refused_ps: float, queued: int) -> Reason | None:
        allowed = 1 - self._objectives.quantile
        pressed = max(refused_ps * WINDOW_MS / 1_000, queued) >= PRESSED_MIN
        lowers = late > LATE_FACTOR * allowed and pressed
        if lowers and self.forecast_share > FORECAST_SHARE_MIN and self._may_step(up=False):
            self.forecast_share = round(max(FORECAST_SHARE_MIN, self.forecast_share * 0.9), 3)
            text = f"{late:.0%} of the answers begin late: forecasts were too hopeful, {self.forecast_share:g} of what"
            return Reason("ForecastHopeful", f"{text} is due is let in")
        raises = late < allowed / 2 and self._refusing >= REST_TICKS
        if raises and self.forecast_share < 1 and self._may_step(up=True):
            self.forecast_share = round(min(1.0, self.forecast_share + STEP), 3)
            text = f"{refused_ps:.1f} requests/s are refused and {late:.1%} of the answers begin late: room is given"
            return Reason("ForecastCareful", f"{text} away, {self.forecast_share:g} of what is due is let in")
        return None

    def _may_step(self, *, up: bool) -> bool:
        """Whether a step that way is no hasty turn; the step is taken where it is not."""
        if up != self._rose and self._since_step < TURN_TICKS:
            return False
        self._rose, self._since_step = up, 0
        return True

    def _return(self) -> Reason | None:
        usual = self._config.forecast_share
        wanted = self._unrefused >= QUIET_TICKS and self.forecast_share != usual
        if wanted and self._may_step(up=usual > self.forecast_share):
            step = max(-STEP, min(STEP, usual - self.forecast_share))
            self.forecast_share = round(self.forecast_share + step, 3)
            return Reason("Quiet", f"nobody was refused for {self._unrefused} ticks: back towards {usual:g}")
        if self._untroubled >= QUIET_TICKS and self.shed_factor < 1:
            self.shed_factor = round(min(1.0, self.shed_factor * 1.25), 3)
            return Reason("Quiet", "the most important class is served in time: others are let in again")
        return None
