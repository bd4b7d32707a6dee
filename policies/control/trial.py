"""Every change is an experiment: what the objective did before it, what it did after, and what is to be said of it.

    baseline   the last effect_ticks ticks before the change, without those in which others changed much or settled if
               enough are left
    effect     effect_ticks ticks, from SETTLE_TICKS after the change on (replicas: after all of them run)
    verdict    comparison.py, against the baseline and what the same settings were seen to carry (history.py); the early
               one after EARLY_TICKS only when the share of kept promises collapsed
    cause      the change whose time fits the fall best (onset.py), if that is decisive

One trial per lever is open at a time: whatever a lever changes between its first change and the verdict is one
experiment, because nobody could tell the parts from each other. A change of one replica in a thousand cannot be seen in
the fleet's objective; *reach* is the share of the fleet a change touches (1 for knobs of the model). A fall is blamed
on it only up to that share, and changes of others disturb a trial only when their reach is large beside its own.

A fall that began before the change, or with what another lever changed, is not the trial's. Where two large changes
came so close that their times do not tell them apart, it is attributed to neither, and :attr:`Outcome.crowded` says so:
the guard then lets levers move one at a time for a while. A collapse cannot wait for that: it is taken back from all
who moved in its span, and counts against the one who moved first, because the others may have answered to it.

This module must not change a knob; it answers what should be taken back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from policies.config_guard import GuardConfig
from policies.control.comparison import COLLAPSE, Comparison, Span, compare, span_of
from policies.control.history import History
from policies.control.moves import Place, Value
from policies.control.objective import ObjectiveSample
from policies.control.onset import DECISIVE, Ended, evidence
from policies.control.signals import Signals
from policies.steering import ANY, Lever, Verdict

SETTLE_TICKS = 5
"""Ticks after a change in which requests of before still come to their ends."""

START_TICKS_MAX = 600
"""Longest time a trial waits for replicas to start or to go."""

EARLY_TICKS = 6
"""Ticks of effect after which a collapse is taken back without waiting for the rest."""

REACH_LARGE = 0.25
"""Changes of others that touch less than this share of what a trial touches do not disturb it."""

REACH_SLACK = 2.0
"""A fall may be this many times as large as the share of the fleet that was touched, because routers move load."""

FLEET_SHARE_MAX = 0.15
"""Change of the number of replicas that serve, beyond which a trial of another lever says nothing."""

QUIET_SHARE_MIN = 0.5
"""Share of the baseline's ticks that must be free of others' changes; else it has all of them, and the time of the fall
says whose it is."""

BLIND_SHARE_MAX = 1 / 3
"""Share of ticks without a fresh gateway beyond which a stretch says nothing."""

SEQS_MAX = 4_096
"""Ledger entries remembered per trial."""

CHANGES_MAX = 1_024
"""Changes remembered for telling who disturbed whom."""


@dataclass(frozen=True, slots=True)
class _Tick:
    """What is remembered of one tick."""

    number: int
    sample: ObjectiveSample
    serving: int
    known: bool
    """Whether any gateway was fresh."""


@dataclass(slots=True)
class Trial:
    """One experiment."""

    lever: Lever
    opened: int
    """Tick of its first change."""
    baseline: tuple[_Tick, ...]
    before: dict[Place, Value] = field(default_factory=dict)
    """What stood at each place before the trial's first change of it."""
    after: dict[Place, Value] = field(default_factory=dict)
    """What the lever made of it last."""
    seqs: list[int] = field(default_factory=list)
    """Entries of the ledger that get the verdict."""
    settled: int | None = None
    """Tick from which on the effect counts; ``None``: replicas have not started yet."""
    reach: float = 0.0
    changes: list[int] = field(default_factory=list)
    """Ticks in which it changed something."""
    settings: list[tuple[int, int]] = field(default_factory=list)
    """Numbers of the settings that stood before and after each change that made others of them."""
    proven_ps: float = 0.0
    """Requests per second and replica that kept their promises in some stretch at the settings before it."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Replicas touched, sorted; :data:`ANY` for knobs of the model."""
        return tuple(sorted({target for _, target in self.before}))

    def note(self, seq: int) -> None:
        """Remember an entry of the ledger that gets the verdict."""
        if len(self.seqs) < SEQS_MAX:
            self.seqs.append(seq)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is to be said of one trial."""

    trial: Trial
    verdict: Verdict
    text: str
    realised: Mapping[str, float]
    harmful: bool
    """The share of kept promises fell beyond noise, and this trial is to blame."""
    crowded: bool = False
    """It fell, and another lever changed much in the same span."""
    counts: bool = True
    """Whether a roll-back counts towards a freeze."""


class Trials:
    """Open trials and the ticks they are judged by.

    Args:
        config: how long effects are measured, and what is noise.
        quantile: of the latencies that are written down as realised.
    """

    def __init__(self, config: GuardConfig, quantile: float) -> None:
        self._open: dict[Lever, Trial] = {}
        self._tick = 0
        self._changes: deque[tuple[int, Lever | None, float]] = deque(maxlen=CHANGES_MAX)
        """Tick, lever (``None``: guard or people) and reach of each change."""
        self._ticks: deque[_Tick] = deque()
        self._history = History()
        self.reconfigure(config, quantile)

    def reconfigure(self, config: GuardConfig, quantile: float) -> None:
        """Follow a new configuration; open trials go on under it."""
        self._config, self._quantile = config, quantile
        self._ticks = deque(self._ticks, maxlen=2 * (config.effect_ticks + SETTLE_TICKS))

    @property
    def open(self) -> Mapping[Lever, Trial]:
        """Trials without a verdict yet."""
        return self._open

    def step(self, sample: ObjectiveSample, signals: Signals) -> tuple[Outcome, ...]:
        """Take one tick's figures, and judge what is due."""
        self._tick += 1
        serving = len(signals.serving)
        self._ticks.append(_Tick(self._tick, sample, serving, signals.gateways_fresh > 0))
        self._history.note(sample, serving)
        outcomes = []
        for trial in list(self._open.values()):
            self._settle(trial, signals)
            outcome = self._judge(trial, signals)
            if outcome is not None:
                del self._open[trial.lever]
                outcomes.append(outcome)
                if outcome.verdict in (Verdict.NEUTRAL, Verdict.BETTER):
                    for was, became in trial.settings:
                        self._history.harmless(became, was)
        return tuple(outcomes)

    def changed(
        self, lever: Lever, before: Mapping[Place, Value], after: Mapping[Place, Value], replicas: int
    ) -> Trial:
        """A lever's change was acted on: it opens a trial, or joins the one of its lever."""
        trial = self._open.get(lever)
        if trial is None:
            settled = None if lever is Lever.REPLICAS else self._tick + SETTLE_TICKS
            proven_ps = self._history.proven_ps(self._history.settings, self._config.effect_ticks)
            trial = Trial(lever, self._tick, self._baseline(), settled=settled, proven_ps=proven_ps)
            self._open[lever] = trial
        elif lever is Lever.REPLICAS:
            trial.settled = None
        for place, value in after.items():
            trial.before.setdefault(place, before.get(place))
            trial.after[place] = value
        small, reach = trial.reach < REACH_LARGE, reach_of(after, replicas)
        trial.reach = reach_of(trial.before, replicas)
        trial.changes.append(self._tick)
        self._changes.append((self._tick, lever, reach))
        if lever is not Lever.REPLICAS and (reach >= REACH_LARGE or (small and trial.reach >= REACH_LARGE)):
            was = self._history.settings
            self._history.changed()
            trial.settings.append((was, self._history.settings))
        return trial

    def disturbed(self, places: Mapping[Place, Value], replicas: int) -> None:
        """Something changed that no lever asked for: an override, somebody else."""
        reach = reach_of(places, replicas)
        self._changes.append((self._tick, None, reach))
        if reach >= REACH_LARGE:
            self._history.changed()

    def taken_back(self, trials: Sequence[Trial], places: Mapping[Place, Value], replicas: int) -> None:
        """``places`` were put back to what stood before ``trials``."""
        self._changes.append((self._tick, None, reach_of(places, replicas)))
        steps = sorted([step for trial in trials for step in trial.settings])
        whole = all(p in places for trial in trials for p, v in trial.before.items() if v != trial.after[p])
        alone = all(one[1] == other[0] for one, other in pairwise(steps))
        if steps and whole and alone and steps[-1][1] == self._history.settings:
            self._history.restored(steps[0][0])
        elif steps:
            self._history.changed()

    def _baseline(self) -> tuple[_Tick, ...]:
        """The quiet ticks up to now, or all of them where too few were quiet."""
        large = [tick for tick, _, reach in self._changes if reach >= REACH_LARGE]
        begin = max(large) + SETTLE_TICKS if large else -1
        ticks = list(self._ticks)[-self._config.effect_ticks :]
        quiet = [t for t in ticks if t.number > begin]
        return tuple(quiet if len(quiet) >= QUIET_SHARE_MIN * len(ticks) else ticks)

    def _settle(self, trial: Trial, signals: Signals) -> None:
        """Replicas take time to start: the effect counts from when all that were asked for run."""
        if trial.settled is not None:
            return
        target = next(iter(trial.after.values()))
        running = signals.fleet.replicas_running if signals.fleet else len(signals.serving)
        if target is None or running == target:
            trial.settled = self._tick + SETTLE_TICKS

    def _judge(self, trial: Trial, signals: Signals) -> Outcome | None:
        """Its outcome, if it is time."""
        if trial.settled is None:
            if self._tick - trial.opened < START_TICKS_MAX:
                return None
            return _overtaken(trial, f"not in place after {START_TICKS_MAX} ticks")
        effect = [t for t in self._ticks if t.number > trial.settled][: self._config.effect_ticks]
        over = len(effect) >= self._config.effect_ticks
        if not over and len(effect) < EARLY_TICKS:
            return None
        if over and trial.before == trial.after:
            return Outcome(trial, Verdict.NEUTRAL, "taken back by the lever itself", {}, harmful=False)
        outcome = self._compare(trial, effect, signals)
        collapsed = outcome.harmful and outcome.realised["met_share_before"] - outcome.realised["met_share"] >= COLLAPSE
        return outcome if over or collapsed else None

    def _compare(self, trial: Trial, effect: Sequence[_Tick], signals: Signals) -> Outcome:
        before, after = _span(trial.baseline), _span(effect)
        if before is None or after is None:
            quiet = "no quiet stretch before it" if before is None else "too few requests after it"
            return _overtaken(trial, f"nothing to compare: {quiet}")
        if trial.lever is not Lever.REPLICAS and _fleet_changed(trial.baseline, effect):
            return _overtaken(trial, "the number of replicas that serve changed meanwhile")
        distance = effect[len(effect) // 2].number - trial.baseline[len(trial.baseline) // 2].number
        proven_ps = trial.proven_ps * _serving(trial.baseline)
        noise_share = self._config.noise_share
        found = compare(before, after, noise_share, trial.lever is Lever.REPLICAS, distance, proven_ps)
        realised = self._realised(before, after, signals) | {"met_share_expected": round(found.expected, 4)}
        if found.share_fell and not self._could_cause(trial, found):
            text = f"{found.text}: more than the {trial.reach:.0%} of the fleet that were touched can do"
            return Outcome(trial, Verdict.OVERTAKEN, text, realised, harmful=False)
        if found.verdict in (Verdict.BETTER, Verdict.WORSE):
            return self._attribute(trial, found, before.share - after.share, realised)
        return Outcome(trial, found.verdict, found.text, realised, harmful=False)

    def _attribute(self, trial: Trial, found: Comparison, fall: float, realised: Mapping[str, float]) -> Outcome:
        """Whose the difference is, by when it began."""
        others = self._others(trial)
        crowded = math.fsum(others.values()) >= REACH_LARGE * trial.reach
        ours = self._evidence(trial, [tick for tick, reach in others.items() if reach >= REACH_LARGE * trial.reach])
        about_share = found.share_fell or found.verdict is Verdict.BETTER
        if about_share and ours <= -DECISIVE:
            text = f"{found.text}, but that began {'with what others changed' if crowded else 'before this change'}"
            return Outcome(trial, Verdict.OVERTAKEN, text, realised, harmful=False)
        if not crowded or (about_share and ours >= DECISIVE):
            return Outcome(trial, found.verdict, found.text, realised, harmful=found.share_fell)
        collapsed = found.share_fell and fall >= COLLAPSE
        if collapsed and min(others) > trial.opened:
            text = f"{found.text}; what others changed came later"
            return Outcome(trial, Verdict.WORSE, text, realised, harmful=True, crowded=True)
        text = f"{found.text}, but other levers changed in the same span: attributed to none"
        return Outcome(trial, Verdict.OVERTAKEN, text, realised, collapsed, found.share_fell, counts=False)

    def _evidence(self, trial: Trial, others: Sequence[int]) -> float:
        """For the trial's own changes as the beginning of the difference, against everything else."""
        begin = trial.baseline[0].number
        ticks = {t.number: t for t in (*trial.baseline, *self._ticks) if t.number >= begin}
        ended = [Ended(number, t.sample.met, t.sample.ended) for number, t in sorted(ticks.items())]
        lag = max(SETTLE_TICKS, (trial.settled or trial.opened) - trial.opened) + 1
        return evidence(ended, trial.changes, others, lag)

    def _others(self, trial: Trial) -> dict[int, float]:
        """What others touched from the beginning of its baseline on: reach by tick."""
        begin = trial.baseline[0].number if trial.baseline else trial.opened
        reach: dict[int, float] = {}
        for tick, lever, share in self._changes:
            if tick >= begin and lever is not trial.lever:
                reach[tick] = reach.get(tick, 0.0) + share
        return reach

    def _could_cause(self, trial: Trial, found: Comparison) -> bool:
        fell = -found.difference / found.expected if found.expected > 0 else 0.0
        return fell <= REACH_SLACK * trial.reach + self._config.noise_share

    def _realised(self, before: Span, after: Span, signals: Signals) -> dict[str, float]:
        realised = after.figures() | {f"{name}_before": value for name, value in before.figures().items()}
        traffic = signals.traffic
        if traffic is not None:
            for name, histogram in (("ttft_ms", traffic.ttft), ("itl_ms", traffic.itl)):
                value = histogram.quantile_ms(self._quantile)
                if value is not None:
                    realised[name] = round(value, 1)
        return realised


def reach_of(places: Mapping[Place, Value], replicas: int) -> float:
    """Share of the fleet that ``places`` touch: 1 for knobs of the model."""
    targets = {target for _, target in places}
    return 1.0 if ANY in targets else min(1.0, len(targets) / max(1, replicas))


def _span(ticks: Sequence[_Tick]) -> Span | None:
    known = [t.sample for t in ticks if t.known]
    if not ticks or len(known) < (1 - BLIND_SHARE_MAX) * len(ticks):
        return None
    return span_of(known)


def _serving(ticks: Sequence[_Tick]) -> float:
    return math.fsum(t.serving for t in ticks) / len(ticks)


def _fleet_changed(before: Sequence[_Tick], after: Sequence[_Tick]) -> bool:
    was, now = _serving(before), _serving(after)
    return abs(now - was) > FLEET_SHARE_MAX * max(was, 1.0)


def _overtaken(trial: Trial, text: str) -> Outcome:
    return Outcome(trial, Verdict.OVERTAKEN, text, {}, harmful=False)
