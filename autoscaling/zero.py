"""Scale to zero: when a model sleeps, what wakes it, and when its starts are given up. For ``replicas_min`` 0.

    awake      some replica serves: the number is the scaler's, at least 1
    asleep     target 0; a request makes it 1
    starting   target 1 or more and nobody serves
    failed     start_tries_max starts in a row failed, one takes longer than start_s_max, or what runs says nothing for
               so long and gets none of the requests that wait: target 0, and requests wake the model again after
               start_backoff_s, doubled with each failure up to BACKOFF_FACTOR_MAX

A model falls asleep when nothing was *busy* for ``zero_after_s``::

    busy = requests came or were sent, tokens flow,
           or gateways hold open requests and the engines do not contradict
    contradict: Serve's word is there, every replica reports and one serves, and none holds a request

So a count that nobody gives back holds nothing up: what gateways say of themselves must move or be found at an engine.
What replicas alone say holds nothing up either, unless tokens flow: requests come through gateways. A gateway that fell
silent counts by its last word until it is forgotten. Without any fresh gateway nothing falls asleep.

What is open when the model falls asleep wakes nobody; more than that does, and so do requests that come or were refused
because the model sleeps. Questions to the gateway itself (health, models, metrics, control) are no requests. A start
under way is not given up because nobody waits for it, and idle time counts from its end, or from the time at which the
last of those come who were told to come again.

What this must not do: count more than one replica when it wakes a model. The scaler follows once it serves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from policies.admission.cold import WAKE_S
from policies.config import PolicyConfig
from policies.control.signals import Signals
from policies.steering import ColdModel, ColdPhase
from policies.types import Reason

STARTS_KEPT = 5
"""The longest of so many starts stands for the next one: what clients are told must be true."""

BACKOFF_FACTOR_MAX = 16
"""Longest back-off, as a multiple of the first."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What stands instead of the scaler's number."""

    replicas: int
    reason: Reason
    cold: ColdModel


class ZeroRule:
    """See the module; one per model, asked once per tick."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config.scaling
        self._late_share = config.admission.retry_after_jitter_share
        self._busy_ns: int | None = None
        """When something was last busy; ``None``: nobody could tell yet."""
        self._since_ns: int | None = None
        """When the start under way began."""
        self._expected_ns = 0
        """Until when those may come whom gateways told of the last start."""
        self._mute_ns: int | None = None
        """Since when replicas run that say nothing and get nothing, while requests wait."""
        self._dark = False
        """Nobody served at some tick since then."""
        self._slept_with = 0
        """Open requests that were there when it fell asleep, and nobody gave back since."""
        self._failed_at_ns: int | None = None
        self._failures = 0
        """Times in a row that starts were given up."""
        self._starts_s: deque[float] = deque(maxlen=STARTS_KEPT)
        self._told_s = 0.0
        """Longest cold start of the last replicas: from their process to their open port."""
        self._why = ""
        self._failed_before = 0
        """Failed starts that an earlier attempt has counted already."""

    def step(self, signals: Signals, target: int | None, now_ns: int) -> Rest | None:
        """What stands at this tick; ``None``: the scaler's number.

        Args:
            signals: of this tick.
            target: number of replicas that stands; ``None``: not known yet.
            now_ns: the controller's clock.
        """
        told = [ms / 1_000 for r in signals.fresh if (ms := r.latest.cold_start_ms)]
        self._told_s = max(told, default=self._told_s)
        if signals.blind or target is None:
            return None
        if self._busy_ns is None or _busy(signals):
            self._busy_ns = now_ns
        if target == 0:
            return self._asleep(signals, now_ns)
        if signals.serving or (signals.fleet is not None and signals.fleet.replicas_running):
            return self._awake(signals, now_ns)
        return self._starting(signals, target, now_ns)

    def _awake(self, signals: Signals, now_ns: int) -> Rest | None:
        if self._dark and self._since_ns is not None and signals.serving:
            self._starts_s.append((now_ns - self._since_ns) / 1e9)
            self._since_ns, self._busy_ns = None, now_ns
        self._dark = self._dark and not signals.serving
        if signals.serving:
            self._failed_at_ns, self._failures, self._failed_before = None, 0, 0
        if (mute_s := self._mute_s(signals, now_ns)) > self._config.start_s_max:
            return self._give_up(signals, mute_s, 0, now_ns)
        assert self._busy_ns is not None
        idle_s = (now_ns - max(self._busy_ns, self._expected_ns)) / 1e9
        if signals.traffic is None or idle_s < self._config.zero_after_s:
            return None
        self._slept_with = _open(signals)
        self._since_ns = None
        return self._rest(0, ColdPhase.ASLEEP, Reason("FallsAsleep", f"no request for {idle_s:.0f} s"), now_ns)

    def _mute_s(self, signals: Signals, now_ns: int) -> float:
        """For how long requests have waited in gateways and none was sent or served, while the replicas that run, as
        Serve says, say nothing.
        """
        traffic = signals.traffic
        if signals.fresh or traffic is None or not traffic.queued or traffic.routed_ps > 0 or traffic.succeeded_ps > 0:
            self._mute_ns = None
            return 0.0
        self._mute_ns = now_ns if self._mute_ns is None else self._mute_ns
        return (now_ns - self._mute_ns) / 1e9

    def _asleep(self, signals: Signals, now_ns: int) -> Rest:
        self._since_ns = None
        opened = _open(signals)
        self._slept_with = min(self._slept_with, opened)
        left_s = self._backoff_left_s(now_ns)
        if left_s > 0:
            text = f"it cannot start ({self._why}): a request may wake it in {left_s:.0f} s"
            return self._rest(0, ColdPhase.FAILED, Reason("CannotStart", text), now_ns)
        came = signals.traffic is not None and signals.traffic.arrivals_ps > 0
        if not came and opened <= self._slept_with:
            return self._rest(0, ColdPhase.ASLEEP, Reason("Asleep", "nobody asks for the model"), now_ns)
        self._since_ns = self._busy_ns = now_ns
        self._failed_before = signals.starts.failed_in_a_row
        self._expect(signals)
        return self._rest(1, ColdPhase.STARTING, Reason("Woken", "a request came for a model that sleeps"), now_ns)

    def _starting(self, signals: Signals, target: int, now_ns: int) -> Rest:
        woken_long_ago = self._since_ns is not None and now_ns - self._since_ns > self._start_s * 1e9
        if self._since_ns is None or (woken_long_ago and not self._dark):
            self._since_ns = now_ns  # whoever served until now died: this start is not the one of that wake
        self._dark = True
        self._expect(signals)
        took_s = (now_ns - self._since_ns) / 1e9
        failed = signals.starts.failed_in_a_row - self._failed_before
        if failed < self._config.start_tries_max and took_s <= self._config.start_s_max:
            reason = Reason("Starting", f"no replica serves yet, the start began {took_s:.0f} s ago")
            return self._rest(target, ColdPhase.STARTING, reason, now_ns)
        return self._give_up(signals, took_s, failed, now_ns)

    def _give_up(self, signals: Signals, took_s: float, failed: int, now_ns: int) -> Rest:
        """What gateways hold now wakes it no more: they refuse it, and what stays is nobody's."""
        self._failed_at_ns, self._since_ns, self._mute_ns = now_ns, None, None
        self._failures += 1
        self._slept_with = _open(signals)
        self._why = f"no replica served within {took_s:.0f} s"
        if failed >= self._config.start_tries_max:
            self._why = f"{failed} starts failed: {signals.starts.failed_why or 'they do not say why'}"
        return self._rest(0, ColdPhase.FAILED, Reason("CannotStart", f"given up: {self._why}"), now_ns)

    def _expect(self, signals: Signals) -> None:
        """Who is refused during a start comes again when it was told to, at the latest."""
        by_class = signals.traffic.by_class.values() if signals.traffic is not None else ()
        if self._since_ns is not None and any(c.refused_ps > 0 for c in by_class):
            latest_s = (self._start_s + WAKE_S) * (1 + self._late_share)
            self._expected_ns = max(self._expected_ns, self._since_ns + round(latest_s * 1e9))

    @property
    def _start_s(self) -> float:
        return max(self._starts_s, default=self._told_s) or self._config.start_s_prior

    def _backoff_left_s(self, now_ns: int) -> float:
        if self._failed_at_ns is None:
            return 0.0
        factor = min(1 << min(self._failures - 1, 8), BACKOFF_FACTOR_MAX)
        return self._config.start_backoff_s * factor - (now_ns - self._failed_at_ns) / 1e9

    def _rest(self, replicas: int, phase: ColdPhase, reason: Reason, now_ns: int) -> Rest:
        cold = ColdModel(
            phase,
            self._start_s,
            measured=bool(self._starts_s) or self._told_s > 0,
            elapsed_s=(now_ns - self._since_ns) / 1e9 if self._since_ns is not None else 0.0,
            retry_after_s=max(0.0, self._backoff_left_s(now_ns)) if phase is ColdPhase.FAILED else 0.0,
            why=self._why if phase is ColdPhase.FAILED else "",
        )
        return Rest(replicas, reason, cold)


def _open(signals: Signals) -> int:
    """Requests that gateways hold open, the silent ones by their last word."""
    return sum([g.latest.inflight for g in signals.gateways])


def _busy(signals: Signals) -> bool:
    """Whether anybody needs a replica; see the module."""
    traffic, work = signals.traffic, signals.work
    if traffic is not None and (traffic.arrivals_ps > 0 or traffic.routed_ps > 0):
        return True
    if work is not None and (work.prefill_tps > 0 or work.decode_tps > 0):
        return True
    if not _open(signals):
        return False
    held = work is not None and (work.running or work.waiting or work.http_inflight)
    known = signals.fleet is not None and not signals.unknown_replicas and bool(signals.serving)
    return bool(held) or not known
