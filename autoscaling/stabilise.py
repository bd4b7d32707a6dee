"""Stabilise and bound: from what the load asks for at each tick to a target that moves seldom and for a reason.

Stages, each with a named reason:

1. *Adopt*: the target is Serve's until this controller has decided one, and again when someone else moves it. Serve
   tells its target before it follows the plan it gets for that: one that was given to it lately is an echo of our own.
2. *Up*: a rise needs ``up_ticks`` consecutive ticks that ask for more than the target; it goes to the least of them
   (``UpConfirmed``), at most ``up_replicas_max`` at once (``RiseLimited``). Until then ``UpWaiting``. What pending
   replicas cover asks for nothing more (``PendingCovers``).
3. *Down*: the target falls to the highest ask of the last ``down_window_s`` (``DownConfirmed``), else
   ``ScaleDownStabilised``. Every hold that ignorance gives reason for is named: ``HeldBlind``, ``HeldPartial`` and so
   on. Ticks without sight leave no mark in the window; a gap longer than :data:`GAP_MAX_NS` starts it anew.
4. *Bound*: the configured minimum and maximum and Serve's own (``BoundedByMax``, ``BoundedByMin``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from policies.config import ScalingConfig
from policies.types import FleetView, Reason

GAP_MAX_NS = 10_000_000_000
"""Longest stretch without sight inside a down window."""

ADOPT_AFTER_NS = 5_000_000_000
"""Serve has followed a target after this time: a different one that appears later is someone else's, and so is one that
was not given to it for this long."""

WINDOW_SAMPLES_MAX = 1_024
"""Samples kept of a down window; with more ticks than that, neighbours are merged into their larger one."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What the load asks for at one tick."""

    up: int
    """Replicas needed to carry the load with headroom."""
    down: int
    """Fewest replicas that carry it with headroom and tolerance; at least ``up``."""
    reason: Reason
    """Why ``up`` is what it is."""


@dataclass(frozen=True, slots=True)
class Stabilised:
    """The target and every stage that spoke."""

    target: int
    reason: Reason
    stages: tuple[Reason, ...]
    held: bool
    """The load asked for something else and was held back for a reason worth telling."""


class DownWindow:
    """Highest ask of a sliding window, with the time it covers."""

    def __init__(self, window_ns: int) -> None:
        self._window_ns = window_ns
        self._grain_ns = max(1, window_ns // (WINDOW_SAMPLES_MAX - 2))
        self._samples: deque[tuple[int, int]] = deque(maxlen=WINDOW_SAMPLES_MAX)
        self._since_ns = 0
        self._last_ns: int | None = None

    def add(self, ask: int, now_ns: int) -> None:
        """Note one tick's ask."""
        if self._last_ns is None or now_ns - self._last_ns > GAP_MAX_NS:
            self._samples.clear()
            self._since_ns = now_ns
        self._last_ns = now_ns
        if self._samples and now_ns - self._samples[-1][0] < self._grain_ns:
            start_ns, highest = self._samples.pop()
            self._samples.append((start_ns, max(highest, ask)))
        else:
            self._samples.append((now_ns, ask))
        # The oldest sample is kept until the next one is out of the window too: it may stand for asks up to that one.
        while len(self._samples) > 1 and self._samples[1][0] <= now_ns - self._window_ns:
            self._samples.popleft()

    def highest(self, now_ns: int) -> int | None:
        """Highest ask; ``None`` while the window is not covered."""
        if self._last_ns is None or now_ns - self._since_ns < self._window_ns:
            return None
        return max(ask for _, ask in self._samples)

    def __len__(self) -> int:
        return len(self._samples)


class Stabiliser:
    """The target from tick to tick."""

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._window = DownWindow(int(config.down_window_s * 1e9))
        self._asks: deque[int] = deque(maxlen=config.up_ticks)
        self._before: tuple[int | None, int | None, tuple[int, ...]] = (None, None, ())
        """Target, time of the last decision and asks, as they were before the last decision."""
        self._serve_target: int | None = None
        self._decided_ns: int | None = None
        self._given_ns: dict[int, int] = {}
        """Targets of the last :data:`ADOPT_AFTER_NS` and when they were last given to Serve."""
        self.target: int | None = None
        """Last decided or adopted target; ``None`` until anything is known of the fleet."""

    def adopt(self, fleet: FleetView | None, known: int, now_ns: int) -> Reason | None:
        """Take over Serve's target at the start and when someone else moved it; else the number of known replicas."""
        if fleet is None:
            if self.target is None and known:
                self.target = known
            return None
        moved, self._serve_target = fleet.replicas_target != self._serve_target, fleet.replicas_target
        settled = self._decided_ns is None or now_ns - self._decided_ns > ADOPT_AFTER_NS
        others = fleet.replicas_target != self.target and not self._is_echo(fleet.replicas_target, now_ns)
        if self.target is None or (moved and settled and others):
            first, self.target = self.target is None, fleet.replicas_target
            self._asks.clear()
            return None if first else Reason("Adopted", f"someone else set the target to {self.target}")
        return None

    def _is_echo(self, target: int, now_ns: int) -> bool:
        given_ns = self._given_ns.get(target)
        return given_ns is not None and now_ns - given_ns <= ADOPT_AFTER_NS

    def _give(self, target: int, now_ns: int) -> int:
        self._given_ns = {t: ns for t, ns in self._given_ns.items() if now_ns - ns <= ADOPT_AFTER_NS}
        self._given_ns[target] = now_ns
        return target

    def overrule(self, target: int, now_ns: int) -> None:
        """Stand at ``target`` from now on, and not at what was decided at this tick: someone above said so.

        Where that is the target of before, nothing was decided. What the load asked for beyond ``target`` in the last
        ticks in a row stays counted, so that a load that goes on asking is not confirmed anew each time.
        """
        before, decided_ns, asks = self._before
        self._decided_ns = decided_ns if target == before else now_ns
        kept: list[int] = []
        for ask in asks or tuple(self._asks):
            kept = [*kept, ask] if ask > target else []
        self._asks = deque(kept, maxlen=self._config.up_ticks)
        self.target = self._give(target, now_ns)

    def put(self, target: int, now_ns: int) -> None:
        """Stand at ``target`` whatever the load: the model falls asleep, sleeps or starts (``zero.py``)."""
        self._asks.clear()
        self._before = (self.target, self._decided_ns, ())
        if target != self.target:
            self._decided_ns = now_ns
        self.target = self._give(target, now_ns)

    def hold(self, reason: Reason, fleet: FleetView | None, now_ns: int) -> Stabilised | None:
        """Keep the target whatever the load, within its bounds; ``None`` when there is none yet."""
        self._asks.clear()
        self._before = (self.target, self._decided_ns, ())
        if self.target is None:
            return None
        low, high = self._bounds(fleet)
        bounded = max(low, min(high, self.target))
        if bounded < self.target and fleet is not None and fleet.capped:
            reason = Reason("BoundedByFleet", f"{bounded} replicas are the most allowed, whatever the load")
        return Stabilised(self._give(bounded, now_ns), reason, (reason,), True)

    def step(
        self, ask: Ask, running: int, fleet: FleetView | None, hold_down: Reason | None, now_ns: int
    ) -> Stabilised:
        """One tick. ``hold_down`` names why the target must not fall now; :meth:`adopt` must have found a target."""
        if self.target is None:
            raise ValueError("adopt() has found no target yet")
        low, high = self._bounds(fleet)
        self._before = (self.target, self._decided_ns, ())
        stages = [ask.reason]
        held = False
        target = self.target
        if hold_down is None:
            self._window.add(max(ask.up, ask.down), now_ns)
        if ask.up > self.target:
            target, held = self._up(ask.up, high, _max_code(fleet), stages)
        else:
            self._asks.clear()
            if ask.up > running:
                stages.append(
                    Reason("PendingCovers", f"{running} replicas run, {self.target} are coming: enough for the load")
                )
            if ask.down < self.target:
                target, held = self._down(ask.down, hold_down, stages, now_ns)
        bounded = max(low, min(high, target))
        if bounded != target:
            code, word = (_max_code(fleet), "most") if bounded < target else ("BoundedByMin", "fewest")
            stages.append(Reason(code, f"{target} replicas would fit, {bounded} are the {word} allowed"))
        if bounded != self.target:
            self._before = (self.target, self._decided_ns, tuple(self._asks))
            self.target, self._decided_ns = bounded, now_ns
            self._asks.clear()
        return Stabilised(self._give(bounded, now_ns), stages[-1], tuple(stages), held)

    def _bounds(self, fleet: FleetView | None) -> tuple[int, int]:
        low, high = self._config.replicas_min, self._config.replicas_max
        if fleet is not None:
            low, high = max(low, fleet.replicas_min), min(high, fleet.replicas_max)
        return low, max(low, high)

    def _up(self, up: int, high: int, max_code: str, stages: list[Reason]) -> tuple[int, bool]:
        assert self.target is not None
        self._asks.append(up)
        if self.target >= high:
            stages.append(Reason(max_code, f"the load asks for {up} replicas, {high} are the most allowed"))
            return self.target, True
        if len(self._asks) < self._config.up_ticks:
            ticks = f"{len(self._asks)} of {self._config.up_ticks} ticks in a row"
            stages.append(Reason("UpWaiting", f"asked for {up} replicas {ticks}"))
            return self.target, False
        wanted, most = min(self._asks), self.target + self._config.up_replicas_max
        stages.append(Reason("UpConfirmed", f"{stages[0].text}, {self._config.up_ticks} ticks in a row"))
        if wanted > most:
            wanted = most
            text = f"{stages[0].text}; at most {self._config.up_replicas_max} more at once"
            stages.append(Reason("RiseLimited", text))
        return wanted, False

    def _down(self, down: int, hold_down: Reason | None, stages: list[Reason], now_ns: int) -> tuple[int, bool]:
        assert self.target is not None
        if hold_down is not None:
            stages.append(hold_down)
            return self.target, self.target > self._config.replicas_min
        highest = self._window.highest(now_ns)
        window_s = self._config.down_window_s
        if highest is None or highest >= self.target:
            asked = f"up to {highest}" if highest is not None else "an unknown number of"
            stages.append(
                Reason(
                    "ScaleDownStabilised", f"the load asks for {down} replicas, in the last {window_s:g} s for {asked}"
                )
            )
            return self.target, False
        stages.append(Reason("DownConfirmed", f"{highest} replicas carried the load of the last {window_s:g} s"))
        return highest, False


def _max_code(fleet: FleetView | None) -> str:
    """Why there are not more than the most that are allowed."""
    return "BoundedByFleet" if fleet is not None and fleet.capped else "BoundedByMax"
