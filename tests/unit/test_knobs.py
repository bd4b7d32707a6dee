"""deployments/knobs.py: nothing torn, nothing lost silently, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.knobs import EngineGauges, EngineShared, SharedFileError, StepRecord, sizes_within
from policies.speculation import NO_EXPLORATION, Bounds
from policies.types import Knobs

GAUGE_FIELDS = len(EngineGauges.__dataclass_fields__)


def step(seq: int) -> StepRecord:
    return StepRecord(seq, seq, seq, seq, seq, seq, seq, seq, seq)


def hammer(path: str, steps: int) -> None:
    """Engine side in a process of its own: every field of every value is the same number."""
    shared = EngineShared.open(path)
    last = 0
    for n in range(1, steps + 1):
        shared.append_step(step(n))
        shared.write_gauges(EngineGauges(*[n] * GAUGE_FIELDS))
        knobs = shared.read_knobs()
        seen = knobs.running_seqs_max or 0
        if not (knobs.running_seqs_max == knobs.step_tokens_max == knobs.speculative_depth) or seen < last:
            os._exit(3)
        last = seen
    os._exit(0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.mark.slow
def test_two_processes_never_see_a_torn_value_and_every_record_is_read_or_counted(path: Path) -> None:
    shared = EngineShared.create(path, ring_steps=64)
    total = 30_000
    child = multiprocessing.get_context("spawn").Process(target=hammer, args=(str(path), total))
    child.start()
    after = read = lost = n = last_gauge = 0
    while after < total:
        n += 1
        alive = child.is_alive()  # asked before reading: what it wrote before it ended is read yet
        shared.write_knobs(Knobs(n, n, n))
        gauges = shared.read_gauges()
        fields = {getattr(gauges, f) or 0 for f in EngineGauges.__dataclass_fields__}
        assert len(fields) == 1
        assert min(fields) >= last_gauge
        last_gauge = fields.pop()
        steps, after, missed = shared.read_steps(after)
        for s in steps:
            assert s == step(s.seq)
        read += len(steps)
        lost += missed
        if not alive and not steps:
            break
    child.join()
    shared.close()
    assert child.exitcode == 0
    assert after == total
    assert read + lost == total
    assert read > 0


def test_steps_come_in_order_once(path: Path) -> None:
    shared = EngineShared.create(path, ring_steps=8)
    engine = EngineShared.open(path)
    assert shared.read_steps(0) == ([], 0, 0)
    for n in (1, 2, 3):
        engine.append_step(step(n))
    assert shared.read_steps(0) == ([step(1), step(2), step(3)], 3, 0)
    assert shared.read_steps(3) == ([], 3, 0)
    engine.append_step(step(4))
    assert shared.read_steps(3) == ([step(4)], 4, 0)
    engine.close()
    shared.close()


@pytest.mark.parametrize("written", [8, 9, 15, 16, 17, 50])
def test_a_full_ring_keeps_the_newest_and_counts_the_rest(path: Path, written: int) -> None:
    shared = EngineShared.create(path, ring_steps=8)
    for n in range(1, written + 1):
        shared.append_step(step(n))
    steps, last, lost = shared.read_steps(0)
    assert [s.seq for s in steps] == list(range(written - 7, written + 1))
    assert (last, lost) == (written, written - 8)
    shared.close()


def test_a_damaged_record_ends_the_reading_until_it_is_passed(path: Path) -> None:
    shared = EngineShared.create(path, ring_steps=8)
    for n in (1, 2):
        shared.append_step(step(n))
    damage(shared, shared._step_offset(2))
    assert shared.read_steps(0) == ([step(1)], 1, 0)
    shared.append_step(step(3))
    assert shared.read_steps(1) == ([step(3)], 3, 1)
    shared.close()


def damage(shared: EngineShared, offset: int) -> None:
    shared._map[offset + 9] ^= 0xFF


def test_a_write_cut_in_the_middle_leaves_the_previous_value(path: Path) -> None:
    shared = EngineShared.create(path)
    shared.write_knobs(Knobs(1, 1, 1))
    shared.write_knobs(Knobs(2, 2, 2))
    newest = 64 + (shared._knobs_seq % 2) * 64
    damage(shared, newest)
    assert EngineShared.open(path).read_knobs() == Knobs(1, 1, 1)
    shared.close()


def test_values_survive_the_trip(path: Path) -> None:
    shared = EngineShared.create(path)
    engine = EngineShared.open(path)
    assert engine.read_knobs() == Knobs()
    assert shared.read_gauges() == EngineGauges()
    for knobs in (Knobs(0, 0, 0), Knobs(16, None, 2), Knobs(None, 2048, None), Knobs()):
        shared.write_knobs(knobs)
        assert engine.read_knobs() == knobs
    gauges = EngineGauges(*range(1, GAUGE_FIELDS + 1))
    for value in (gauges, EngineGauges(speculative_depth_now=None, progress_ns=2**62), EngineGauges()):
        engine.write_gauges(value)
        assert shared.read_gauges() == value
    full = StepRecord(1, 2**62, 10**9, 0, 0, 0, 0, 0, output_tokens=0)
    engine.append_step(full)
    assert shared.read_steps(0)[0] == [full]
    engine.close()
    shared.close()


def test_an_end_opened_later_continues_the_sequence(path: Path) -> None:
    shared = EngineShared.create(path)
    for n in range(5):
        shared.write_knobs(Knobs(n))
    again = EngineShared.open(path)
    again.write_knobs(Knobs(99))
    assert shared.read_knobs() == Knobs(99)
    shared.close()


def test_the_file_is_private_and_goes_with_its_creator(path: Path) -> None:
    old = os.umask(0)
    try:
        shared = EngineShared.create(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = EngineShared.open(path)
    other.close()
    assert path.exists()
    shared.close()
    shared.close()
    assert not path.exists()


def test_an_existing_file_or_a_link_is_never_taken_over(path: Path, tmp_path: Path) -> None:
    path.write_text("someone else's")
    with pytest.raises(FileExistsError):
        EngineShared.create(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(FileExistsError):
        EngineShared.create(link)
    with pytest.raises(OSError, match="symbolic links"):
        EngineShared.open(link)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"x" * 10_000])
def test_a_foreign_file_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(SharedFileError):
        EngineShared.open(path)


def test_another_version_is_refused(path: Path) -> None:
    shared = EngineShared.create(path)
    shared._map[8] = 99
    with pytest.raises(SharedFileError):
        EngineShared.open(path)
    shared.close()


@pytest.mark.parametrize("ring_steps", [0, 1, (1 << 20) + 1])
def test_ring_length_is_bounded(path: Path, ring_steps: int) -> None:
    with pytest.raises(ValueError, match="ring_steps"):
        EngineShared.create(path, ring_steps)


def test_bounds_of_exploration_travel_with_the_knobs(path: Path) -> None:
    shared = EngineShared.create(path)
    engine = EngineShared.open(path)
    assert engine.bounds == NO_EXPLORATION
    for bounds in (Bounds(0.02, 20, 3), Bounds(0.2, 5, None), NO_EXPLORATION):
        shared.write_knobs(Knobs(speculative_depth=2), bounds)
        assert engine.read_knobs() == Knobs(speculative_depth=2)
        assert engine.bounds == bounds
    shared.close()


def test_a_step_tells_its_drafts(path: Path) -> None:
    shared = EngineShared.create(path)
    full = StepRecord(1, 2, 3, 4, 0, 4, 5, 0, 9, depth=4, draft_tokens=16, accepted_tokens=5)
    EngineShared.open(path).append_step(full)
    assert shared.read_steps(0)[0] == [full]
    shared.close()


def test_sizes_stay_within_the_limits_of_the_engine() -> None:
    assert sizes_within(Knobs(8, 256), 16, 2_048, 16, 0) == (8, 256)
    assert sizes_within(Knobs(), 16, 2_048, 16, 0) == (16, 2_048)
    assert sizes_within(Knobs(99, 9_999), 16, 2_048, 16, 0) == (16, 2_048)
    assert sizes_within(Knobs(0, 1), 16, 2_048, 16, 0) == (1, 16)
    assert sizes_within(Knobs(2, 256), 16, 2_048, 16, 5)[0] == 5, "what runs stays"
    assert sizes_within(Knobs(2, 256), 16, 2_048, 2_048, 0)[1] == 2_048, "an engine that needs its whole budget"


def test_an_idle_engine_is_told_with_the_knobs_of_its_next_step_and_a_busy_one_with_its_last(tmp_path: Path) -> None:
    now = EngineGauges(
        running_seqs_hard=16, step_tokens_hard=2_048, running_seqs_now=16, step_tokens_now=2_048,
        speculative_depth_now=4, speculative_depth_hard=4, step_tokens_floor=16,
    )  # fmt: skip
    with_work = replace(now, running=3, work_since_ns=5)
    replica = EngineShared.create(tmp_path / "knobs")
    engine = EngineShared.open(tmp_path / "knobs")
    try:
        replica.write_knobs(Knobs(2, 8, 9))
        engine.write_gauges(with_work)
        assert replica.read_gauges() == with_work
        engine.write_gauges(now)
        told = replica.read_gauges()
        assert (told.running_seqs_now, told.step_tokens_now, told.speculative_depth_now) == (2, 16, 4)
        replica.write_knobs(Knobs())
        assert replica.read_gauges() == now, "the start-up values"
        replica.write_knobs(Knobs(2, 8, 0))
        fixed = replace(now, speculative_depth_now=None, speculative_depth_hard=0)
        engine.write_gauges(fixed)
        assert replica.read_gauges().speculative_depth_now is None
        off = replace(fixed, running_seqs_now=0, step_tokens_now=0)
        engine.write_gauges(off)
        assert replica.read_gauges() == off, "one that follows nothing is told as it is"
    finally:
        engine.close()
        replica.close()
