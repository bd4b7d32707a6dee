"""Depth of one replica: the one with the most goodput at the batch size it runs.

Goodput per depth and class of batch sizes is measured by the engine and kept by ``goodput.py``; trying other depths is
the engine's own affair (``explorer.py``) and within bounds. Here the depth that is asked for follows what was found::

    batch  = most sequences that ran, or wait and fit, at once in the window
    depth  = argmax goodput(batch_class(batch), depth), with hysteresis:
             lower at once      the batch grew, or the gain is above CLEAR_LOWER_GAIN
             lower              a gain above LOWER_GAIN for PATIENCE_TICKS
             deeper at once     a gain above CLEAR_RAISE_GAIN, measured
             deeper             a gain above RAISE_GAIN for PATIENCE_TICKS

Deeper drafts count by what they bring for certain: less the standard error of what was accepted. Small gains need more
than one block of steps to be believed, and do not raise a depth that was lowered at the same
batch size within :data:`REST_NS`: going back and forth between near equals gains nothing. Where drafts bring a clear
gain and the deepest were not measured just now, the deepest are asked for: what is asked for is measured within a
second, and too deep is left at once.

The batch size counts at once when it grows and with the window when it shrinks, so a depth that would hold up a burst
is gone at the next tick, and a batch that wavers around a power of two moves nothing. Where nothing is known of a
larger batch, the depth is halved for each doubling.

The share of accepted drafts steers nothing: drafts that are all accepted still lose where their verification costs
more than they bring. Another life of the engine forgets everything; after a drift all is measured anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policies.config_guard import SpeculationConfig
from policies.speculation.depths import batch_class, depths
from policies.speculation.goodput import Goodput, GoodputBook
from policies.types import Reason, ReplicaReport, Sampled, StepCoefficients

LOWER_GAIN = 1.02
"""Goodput over that of the present depth from which less is drafted."""

RAISE_GAIN = 1.08
"""The same, from which more is drafted: between both nothing moves, whatever the noise."""

CLEAR_LOWER_GAIN = 1.2
CLEAR_RAISE_GAIN = 1.5
"""Gains that need no second look."""

BLOCKS_MIN = 2
"""Blocks of steps that a smaller gain must rest on; without drafts, where nothing is left to chance, one is enough."""

PATIENCE_TICKS = 4
"""Ticks in a row that must say the same where the gain is smaller."""

REST_NS = 600_000_000_000
"""Time for which a small gain does not raise what was lowered."""

RECENT_NS = 5_000_000_000
"""A figure at most this old was measured on the present text."""

MODEL_SAMPLES_MIN = 32
"""Steps a step model must have seen to predict from."""

MODEL_ERROR_MAX = 0.5
"""A step model that is wrong by more than this on average predicts nothing."""


@dataclass(frozen=True, slots=True)
class SpeculationMove:
    """One tick's answer for one replica."""

    before: int | None
    after: int | None
    reason: Reason
    inputs: Mapping[str, float | int | str | None] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)
    """``decode_tps``: tokens decoded per second, and ``itl_ms``: mean time per token of one stream."""
    urgent: bool = False
    """The batch grew: less is drafted before it holds everybody up."""

    @property
    def changed(self) -> bool:
        """Whether the wish differs from the last one."""
        return self.before != self.after


class SpeculationTuner:
    """The wish for one replica, tick by tick; ``None`` where its engine does not speculate."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self.wish: int | None = None
        self._book = GoodputBook(config.steps_min)
        self._seen_seq = -1
        self._hard: int | None = None
        self._drifts = 0
        self._batch_max = 1
        self._lowered_ns: dict[int, int] = {}
        """When the depth was lowered last, by class of batch sizes."""
        self._leaning = 0
        """Ticks in a row that asked for less (negative) or for more."""
        self._held: SpeculationMove | None = None

    def adopt(self, depth: int | None) -> None:
        """Go on from ``depth``, which stands although it was not the wish."""
        if depth is not None and depth != self.wish:
            self.wish, self._leaning = depth, 0

    def step(self, window: Sequence[Sampled[ReplicaReport]], now_ns: int) -> SpeculationMove:
        """Decide from the reports of the sliding window (oldest first; empty when the replica is silent)."""
        if not window:
            return self._hold("Silent", "no recent report: the last wish stands")
        latest = window[-1].value
        if not latest.speculative_depth_hard:
            self.wish = None
            return self._hold("NoSpeculation", "the engine does not speculate")
        model = _trusted(latest.step_model)
        self._notice(latest, latest.speculative_depth_hard)
        self._learn(window, model, now_ns)
        batch, doublings = self._batch(window, latest)
        if batch == 0:
            return self._hold("Idle", "nothing ran in the window: the last wish stands")
        return self._decide(latest, batch, doublings, model, now_ns)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _notice(self, latest: ReplicaReport, hard: int) -> None:
        """Begin with the depth an engine already follows; doubt or forget what was known of another one."""
        drifts = latest.step_model.drifts if latest.step_model is not None else self._drifts
        if hard != self._hard or latest.seq < self._seen_seq:
            if hard != self._hard:
                self.wish = None
            self._hard, self._seen_seq, self._leaning = hard, -1, 0
            self._book.clear()
            self._lowered_ns.clear()
        elif drifts != self._drifts:
            self._book.doubt()
            self._lowered_ns.clear()
        self._drifts = drifts
        if self.wish is None:
            depth = latest.knobs.speculative_depth
            self.wish = hard if depth is None else max(0, min(depth, hard))

    def _learn(self, window: Sequence[Sampled[ReplicaReport]], model: StepCoefficients | None, now_ns: int) -> None:
        for sampled in window:
            report = sampled.value
            if report.seq > self._seen_seq:
                self._seen_seq = report.seq
                self._book.add(report.depth_use, _kv_per_seq(report), model, now_ns)

    def _batch(self, window: Sequence[Sampled[ReplicaReport]], latest: ReplicaReport) -> tuple[int, int]:
        """Largest batch of the window, and how many doublings its class is above the one decided on last."""
        seqs_max = latest.knobs.running_seqs_max or latest.running_seqs_hard
        batch = max(max(s.value.running, min(s.value.running + s.value.waiting, seqs_max)) for s in window)
        if batch == 0:
            return 0, 0
        before, self._batch_max = self._batch_max, batch_class(batch)
        return batch, max(0, self._batch_max.bit_length() - before.bit_length())

    def _decide(
        self, latest: ReplicaReport, batch: int, doublings: int, model: StepCoefficients | None, now_ns: int
    ) -> SpeculationMove:
        assert self._hard is not None
        assert self.wish is not None
        found: dict[int, Goodput] = {}
        for depth in {*depths(self._hard), self.wish}:
            known = self._book.goodput(self._batch_max, depth, _kv_per_seq(latest), model, now_ns)
            if known is not None:
                found[depth] = known
        present = found.get(self.wish)
        if present is None or len(found) < 2:
            return self._unknown(batch, doublings)
        worth = {d: g.per_ms * (1 - g.doubt if d > self.wish else 1) for d, g in found.items()}
        best = max(found, key=lambda d: (worth[d], d == self.wish, -d))
        gain = worth[best] / present.per_ms if present.per_ms > 0 else CLEAR_RAISE_GAIN
        grew = doublings > 0
        if not self._is_due(best, gain, grew, found[best].blocks, now_ns):
            return self._hold("Steady", f"depth {self.wish} stands: nothing else is clearly better")
        return self._move(best, batch, grew, found, now_ns)

    def _is_due(self, best: int, gain: float, grew: bool, blocks: int, now_ns: int) -> bool:
        """Whether the evidence for ``best`` is enough to move now."""
        assert self.wish is not None
        lower = best < self.wish
        needed = LOWER_GAIN if lower else RAISE_GAIN
        if best == self.wish or gain < needed:
            self._leaning = 0
            return False
        rested_ns = now_ns - self._lowered_ns.get(self._batch_max, now_ns - REST_NS)
        if not lower and gain < CLEAR_RAISE_GAIN and rested_ns < REST_NS:
            return False
        side = -1 if lower else 1
        self._leaning = self._leaning + side if self._leaning * side >= 0 else side
        if lower and grew:
            return True
        if gain >= (CLEAR_LOWER_GAIN if lower else CLEAR_RAISE_GAIN) and (lower or blocks):
            return True
        return abs(self._leaning) >= PATIENCE_TICKS and (best == 0 or blocks == 0 or blocks >= BLOCKS_MIN)

    def _unknown(self, batch: int, doublings: int) -> SpeculationMove:
        """Too little was measured to compare."""
        if not doublings or not self.wish:
            return self._hold("Measuring", "goodput of other depths is not known yet")
        before, self.wish, self._leaning = self.wish, self.wish >> doublings, 0
        text = f"{batch} sequences at once and no goodput known for them: depth {before} is cut to {self.wish}"
        return SpeculationMove(before, self.wish, Reason("BatchGrew", text), {"batch": batch}, urgent=True)

    def _move(self, best: int, batch: int, grew: bool, found: Mapping[int, Goodput], now_ns: int) -> SpeculationMove:
        assert self._hard is not None
        assert self.wish is not None
        before, known = self.wish, found[best]
        gain = known.per_ms / found[before].per_ms if found[before].per_ms > 0 else CLEAR_RAISE_GAIN
        deepest = found.get(self._hard)
        unknown = deepest is None or now_ns - deepest.at_ns > RECENT_NS
        unknown = unknown and before < best < self._hard and gain >= CLEAR_RAISE_GAIN
        self.wish, self._leaning = self._hard if unknown else best, 0
        if unknown:
            self._book.forget(self._batch_max, self._hard)
        if best < before:
            self._lowered_ns[self._batch_max] = now_ns
        tps_before, tps_after = 1_000 * found[before].per_ms, 1_000 * known.per_ms
        text = (
            f"depth {best} decodes {tps_after:,.0f} tokens/s ({'measured' if known.blocks else 'predicted'}) with "
            f"{batch} running, depth {before} {tps_before:,.0f}"
        )
        if unknown:
            text += f"; depth {self._hard} is unknown and tried"
        code = "MoreGoodput" if best > before else "BatchGrew" if grew else "LessGoodput"
        inputs: dict[str, float | int | str | None] = {"batch": batch, "batch_max": self._batch_max}
        inputs |= {f"tps_depth_{d}": 1_000 * found[d].per_ms for d in sorted(found)}
        predicted = {"decode_tps": tps_after, "itl_ms": self._batch_max / known.per_ms if known.per_ms > 0 else 0.0}
        urgent = grew and best < before
        return SpeculationMove(before, self.wish, Reason(code, text), inputs, predicted, urgent)

    def _hold(self, code: str, text: str) -> SpeculationMove:
        held = self._held
        if held is None or held.after != self.wish or held.reason.text != text:
            held = self._held = SpeculationMove(self.wish, self.wish, Reason(code, text))
        return held


def _trusted(model: StepCoefficients | None) -> StepCoefficients | None:
    """The step model where it can be predicted from."""
    if model is None or model.samples < MODEL_SAMPLES_MIN:
        return None
    return model if model.error_share is None or model.error_share <= MODEL_ERROR_MAX else None


def _kv_per_seq(report: ReplicaReport) -> float:
    """Context of one running sequence, in tokens."""
    return report.kv_tokens_used / report.running if report.running else 0.0
