"""Shared memory between a replica process and its engine-core child: knobs go down, gauges and step records come up.

One mapped file, no locks, one writer per part: the replica writes knobs, the engine writes gauges and steps. Neither
side ever waits for the other, so an engine step costs a few microseconds more and a stuck replica cannot stop it.

Layout (little-endian, :data:`VERSION`)::

    header   magic, version, ring length
    knobs    two slots, written in turn
    gauges   two slots, written in turn
    ring     ``ring_steps`` slots, step ``seq`` lives in slot ``seq % ring_steps``

Every slot is ``payload + crc32(payload)`` and each payload starts with its own sequence number. A reader copies a slot
and believes it only if the checksum fits, so a torn write is never mistaken for a value, whatever the processor's
memory order; a slot of zeroes does not pass either. Two slots in turn mean that a writer killed in the middle of a
write leaves the previous value readable. A ring slot that was overwritten before it was read is counted as lost.

It must not decide anything, and nothing that depends on a request's text passes through it.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from policies.speculation import NO_EXPLORATION, Bounds
from policies.types import Knobs

MAGIC = b"TIDEGATE"
VERSION = 4
RING_STEPS_MAX = 1 << 20
_READ_TRIES_MAX = 100

_HEADER = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_KNOBS = struct.Struct("<Q6q")
_GAUGES = struct.Struct("<Q20q")
_STEP = struct.Struct("<Q11q")
_NONE = -(1 << 63)
_PPM = 1_000_000

_HEADER_BYTES = 64
_KNOBS_SLOT_BYTES = 64
_GAUGES_SLOT_BYTES = 192
_STEP_SLOT_BYTES = 112
_KNOBS_AT = _HEADER_BYTES
_GAUGES_AT = _KNOBS_AT + 2 * _KNOBS_SLOT_BYTES
_RING_AT = _GAUGES_AT + 2 * _GAUGES_SLOT_BYTES


class SharedFileError(RuntimeError):
    """The file is not a mapping of this version, or no undamaged value could be read from it."""


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """State of the engine after its last step or change. Totals count from the engine's start."""

    running: int = 0
    waiting: int = 0
    kv_tokens_used: int = 0
    kv_tokens_max: int = 0
    prefill_backlog_tokens: int = 0
    """Prompt tokens of waiting and running requests that are still to be computed."""
    running_seqs_hard: int = 0
    """Start-up ``max_num_seqs``; 0 until the engine is up."""
    step_tokens_hard: int = 0
    """Start-up ``max_num_batched_tokens``; 0 until the engine is up."""
    running_seqs_now: int = 0
    step_tokens_now: int = 0
    speculative_depth_now: int | None = None
    """Depth asked for, in force; ``None``: the engine does not speculate."""
    speculative_depth_hard: int = 0
    """Start-up depth that can be moved; 0: the engine does not speculate, or its depth stands still."""
    finished_total: int = 0
    aborted_total: int = 0
    preemptions_total: int = 0
    prefix_query_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    progress_ns: int = 0
    """CLOCK_MONOTONIC when the last step finished; 0 before the first."""
    work_since_ns: int = 0
    """CLOCK_MONOTONIC since when the engine has had work without a pause; 0: it has none."""
    step_tokens_floor: int = 0
    """Least token budget that a step may have, whatever is asked for."""
    compile_ms: int = 0
    """What the engine spent on compiling in its start."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Composition and duration of one engine step."""

    seq: int
    """1 for the first step of the engine's life, then one more each."""
    start_ns: int
    duration_us: int
    running: int
    """Sequences computed in the step."""
    prefill_tokens: int
    """Prompt tokens computed in the step (cached ones not counted)."""
    decode_seqs: int
    """Sequences in the step that were past their prompt."""
    kv_tokens: int
    """Tokens of KV cache held when the step began, in whole blocks."""
    preempted: int
    """Sequences thrown out of the KV cache to make room in this step."""
    output_tokens: int | None = None
    """Tokens generated; ``None``: one for each decoded sequence."""
    depth: int = 0
    """Speculative depth at which the drafts of this step were cut."""
    draft_tokens: int = 0
    """Draft tokens verified in the step."""
    accepted_tokens: int = 0
    """Of those the ones that were kept."""


def sizes_within(asked: Knobs, seqs_hard: int, tokens_hard: int, tokens_floor: int, running: int) -> tuple[int, int]:
    """Running sequences and token budget of a step: what is asked for, within the engine's own limits.

    No sequence that runs is sent away, and no step is smaller than ``tokens_floor`` or larger than at start-up.
    """
    seqs = seqs_hard if asked.running_seqs_max is None else asked.running_seqs_max
    tokens = tokens_hard if asked.step_tokens_max is None else asked.step_tokens_max
    return max(1, running, min(seqs, seqs_hard)), min(tokens_hard, max(tokens, tokens_floor))


def depth_within(asked: Knobs, depth_hard: int) -> int:
    """Speculative depth of a step: what is asked for, within what the engine was started with."""
    return max(0, min(depth_hard if asked.speculative_depth is None else asked.speculative_depth, depth_hard))


def next_step(gauges: EngineGauges, asked: Knobs) -> EngineGauges:
    """Gauges with the knobs of the next step.

    An engine reads them before each step, so that one without work tells those of its last step, although nothing keeps
    it from following. One that follows none (it tells no cap) is left as it is.
    """
    if gauges.running or gauges.waiting or gauges.work_since_ns or not gauges.running_seqs_now:
        return gauges
    seqs, tokens = sizes_within(
        asked, gauges.running_seqs_hard, gauges.step_tokens_hard, gauges.step_tokens_floor, running=0
    )
    depth = depth_within(asked, gauges.speculative_depth_hard) if gauges.speculative_depth_hard else None
    depth = gauges.speculative_depth_now if depth is None else depth
    if (seqs, tokens, depth) == (gauges.running_seqs_now, gauges.step_tokens_now, gauges.speculative_depth_now):
        return gauges
    return replace(gauges, running_seqs_now=seqs, step_tokens_now=tokens, speculative_depth_now=depth)


class EngineShared:
    """One end of the mapping. The creator removes the file on :meth:`close`.

    Each part has one writer (see the module text); readers may be many. Not safe for two threads writing one part.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, ring_steps: int, owner: bool) -> None:
        """Use :meth:`create` or :meth:`open`."""
        self.path = path
        self.ring_steps = ring_steps
        self._map = mapping
        self._owner = owner
        self._knobs_raw = b""
        self._knobs_seq, self._knobs, self._bounds = self._newest_knobs() or (0, Knobs(), NO_EXPLORATION)
        self._gauges_seq, self._gauges = self._newest_gauges() or (0, EngineGauges())

    @classmethod
    def create(cls, path: str | Path, ring_steps: int = 4096) -> EngineShared:
        """Make the file, mode 0600, with no opinion in the knobs and zero gauges. ``FileExistsError``: there is one."""
        if not 2 <= ring_steps <= RING_STEPS_MAX:
            raise ValueError(f"ring_steps must be in 2..{RING_STEPS_MAX}, is {ring_steps}")
        size = _RING_AT + ring_steps * _STEP_SLOT_BYTES
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # a full disk is an error here, not a SIGBUS later
            mapping = mmap.mmap(fd, size)
        except OSError:
            Path(path).unlink()
            raise
        finally:
            os.close(fd)
        _HEADER.pack_into(mapping, 0, MAGIC, VERSION, ring_steps)
        shared = cls(Path(path), mapping, ring_steps, owner=True)
        shared.write_knobs(Knobs())
        shared.write_gauges(EngineGauges())
        return shared

    @classmethod
    def open(cls, path: str | Path) -> EngineShared:
        """Map an existing file. :class:`SharedFileError`: it is not one of ours; ``OSError``: it cannot be read."""
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size < _RING_AT:
                raise SharedFileError(f"{path}: {size} bytes are too few for a mapping")
            mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        magic, version, ring_steps = _HEADER.unpack_from(mapping, 0)
        if magic != MAGIC or version != VERSION or size != _RING_AT + ring_steps * _STEP_SLOT_BYTES:
            mapping.close()
            raise SharedFileError(f"{path}: not a mapping of version {VERSION}")
        return cls(Path(path), mapping, ring_steps, owner=False)

    def close(self) -> None:
        """Unmap; the creator also removes the file. May be called twice."""
        self._map.close()
        self.unlink()

    def unlink(self) -> None:
        """Creator only: remove the file, keep the mapping. Once both ends are open nothing can be left behind."""
        if self._owner:
            self._owner = False
            self.path.unlink(missing_ok=True)

    # --- replica side -------------------------------------------------------------------------------------------------

    def write_knobs(self, knobs: Knobs, bounds: Bounds = NO_EXPLORATION) -> None:
        """Tell the engine; it reads them before its next step. Values are checked and bounded there.

        ``bounds`` say how far it may explore other speculative depths than the one in ``knobs``.
        """
        self._knobs_seq, self._knobs, self._bounds = self._knobs_seq + 1, knobs, bounds
        share_ppm = round(bounds.share * _PPM)
        fields = (
            knobs.running_seqs_max, knobs.step_tokens_max, knobs.speculative_depth, share_ppm, bounds.steps,
            bounds.depth_max,
        )  # fmt: skip
        payload = _KNOBS.pack(self._knobs_seq, *(_NONE if v is None else v for v in fields))
        self._put(_KNOBS_AT + (self._knobs_seq % 2) * _KNOBS_SLOT_BYTES, payload)

    def read_gauges(self) -> EngineGauges:
        """Newest gauges of the engine, with the knobs of its next step where it has no work (:func:`next_step`)."""
        for _ in range(_READ_TRIES_MAX):
            if found := self._newest_gauges():
                self._gauges = found[1]
                break
        return next_step(self._gauges, self._knobs)

    def read_steps(self, after_seq: int) -> tuple[list[StepRecord], int, int]:
        """Steps after ``after_seq`` in order, the last sequence number seen, and how many were overwritten unread.

        Pass the returned number next time. At most ``ring_steps`` records are returned.
        """
        steps: list[StepRecord] = []
        seq, lost = after_seq + 1, 0
        while len(steps) < self.ring_steps:
            found = self._step_at(seq)
            if found is not None and found.seq == seq:
                steps.append(found)
                seq += 1
                continue
            ahead = found.seq if found is not None else self._seq_at(seq + 1)
            if ahead <= seq:
                break  # an older lap or nothing yet: the writer is not further than this
            oldest = max(seq + 1, ahead - self.ring_steps + 1)
            lost += oldest - seq
            seq = oldest
        return steps, seq - 1, lost

    # --- engine side --------------------------------------------------------------------------------------------------

    def read_knobs(self) -> Knobs:
        """Newest knobs of the replica; the previous ones in the rare case that none could be read whole."""
        raw = self._map[_KNOBS_AT:_GAUGES_AT]
        if raw != self._knobs_raw and (found := self._newest_knobs()):
            self._knobs_raw, (_, self._knobs, self._bounds) = raw, found
        return self._knobs

    @property
    def bounds(self) -> Bounds:
        """Of exploration, as :meth:`read_knobs` found them last."""
        return self._bounds

    def write_gauges(self, gauges: EngineGauges) -> None:
        """Publish the engine's state."""
        self._gauges_seq += 1
        fields = _gauge_values(gauges)
        payload = _GAUGES.pack(self._gauges_seq, *fields)
        self._put(_GAUGES_AT + (self._gauges_seq % 2) * _GAUGES_SLOT_BYTES, payload)

    def append_step(self, step: StepRecord) -> None:
        """Write one step; ``step.seq`` must grow by one each time. The oldest record is overwritten when full."""
        payload = _STEP.pack(
            step.seq, step.start_ns, step.duration_us, step.running, step.prefill_tokens, step.decode_seqs,
            step.kv_tokens, step.preempted, _NONE if step.output_tokens is None else step.output_tokens,
            step.depth, step.draft_tokens, step.accepted_tokens,
        )  # fmt: skip
        self._put(self._step_offset(step.seq), payload)

    # --- slots --------------------------------------------------------------------------------------------------------

    def _put(self, offset: int, payload: bytes) -> None:
        self._map[offset : offset + len(payload) + 4] = payload + _CRC.pack(zlib.crc32(payload))

    def _get(self, offset: int, layout: struct.Struct) -> tuple[int, ...] | None:
        raw = self._map[offset : offset + layout.size + 4]
        payload = raw[:-4]
        if _CRC.unpack(raw[-4:])[0] != zlib.crc32(payload):
            return None
        return layout.unpack(payload)

    def _newest(self, offset: int, slot_bytes: int, layout: struct.Struct) -> tuple[int, ...] | None:
        slots = [v for i in (0, 1) if (v := self._get(offset + i * slot_bytes, layout)) is not None]
        return max(slots, key=lambda v: v[0], default=None)

    def _newest_knobs(self) -> tuple[int, Knobs, Bounds] | None:
        found = self._newest(_KNOBS_AT, _KNOBS_SLOT_BYTES, _KNOBS)
        if found is None:
            return None
        seq, *knobs, share_ppm, steps, depth_max = found
        bounds = Bounds(share_ppm / _PPM, steps, None if depth_max == _NONE else depth_max)
        return seq, Knobs(*(None if v == _NONE else v for v in knobs)), bounds

    def _newest_gauges(self) -> tuple[int, EngineGauges] | None:
        found = self._newest(_GAUGES_AT, _GAUGES_SLOT_BYTES, _GAUGES)
        return None if found is None else (found[0], _gauges_from(found[1:]))

    def _step_offset(self, seq: int) -> int:
        return _RING_AT + (seq % self.ring_steps) * _STEP_SLOT_BYTES

    def _step_at(self, seq: int) -> StepRecord | None:
        found = self._get(self._step_offset(seq), _STEP)
        if found is None:
            return None
        record = StepRecord(*found)
        return record if record.output_tokens != _NONE else replace(record, output_tokens=None)

    def _seq_at(self, seq: int) -> int:
        found = self._step_at(seq)
        return 0 if found is None else found.seq


def _gauge_values(gauges: EngineGauges) -> tuple[int, ...]:
    """Fields in layout order; ``None`` as the smallest number."""
    return tuple(_NONE if (v := getattr(gauges, name)) is None else v for name in _GAUGE_NAMES)


def _gauges_from(values: tuple[int, ...]) -> EngineGauges:
    """Inverse of :func:`_gauge_values`."""
    gauges = EngineGauges(*values)
    return gauges if gauges.speculative_depth_now != _NONE else replace(gauges, speculative_depth_now=None)


_GAUGE_NAMES = tuple(EngineGauges.__dataclass_fields__)
assert len(_GAUGE_NAMES) == 20, "layout and fields disagree"
