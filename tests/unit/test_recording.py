"""What a recorder leaves on disk, and that a controller's decisions come out of it again."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.recorded import (
    DroppedLine,
    EndLine,
    FleetLine,
    Header,
    Line,
    RecordingError,
    RequestLine,
    TickLine,
    from_text,
)
from autoscaling.simulator.replay import Lost, Replayed, Writer, differences, replay_decisions
from deployments import recording
from deployments.control_desk import Refused
from deployments.controller import Controller
from deployments.recording import Recorder, check_folder, code_digest, new_header, request_line
from deployments.settings import Settings, SettingsError
from deployments.simulation.recordings import find_writers, read_file, read_writer
from policies.config import ScalingConfig
from policies.control.scaler import ScaleAdvice
from policies.control.signals import Signals
from policies.events import Finish, Outcome, Usage
from policies.steering import Knob, Override
from policies.types import (
    FleetView,
    GatewayReport,
    Histogram,
    Knobs,
    Reason,
    ReplicaReport,
    ReplicaState,
    Request,
    StepCoefficients,
)

MS = 1_000_000


def never(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


def recorder(folder: Path, queue_max: int = 1_000, **bounds: int) -> Recorder:
    settings = Settings.load({"recording": {"folder": str(folder), **bounds}})
    return Recorder(settings.recording, new_header(settings, "controller", "e" * 32), queue_max)


def lines_of(folder: Path, warn: Callable[[str], None] = never) -> list[Line]:
    (writer,) = find_writers([folder], warn)
    return [item.line for item in read_writer(writer, warn)]


def fleet(n: int) -> FleetLine:
    return FleetLine(n, FleetView(n, n, 1, 9))


# --- the writer -------------------------------------------------------------------------------------------------------


def test_lines_come_back_in_order_between_a_header_and_an_end(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    for n in range(100):
        made.put(fleet(n))
    made.close()
    header, *rest = lines_of(tmp_path)
    assert isinstance(header, Header)
    assert (header.source, header.file, header.code) == ("controller", 0, code_digest())
    assert rest == [*(fleet(n) for n in range(100)), EndLine()]
    assert made.take_counts() == (101, 0)
    assert made.take_counts() == (0, 0)


def test_files_rotate_by_size_and_the_oldest_go(tmp_path: Path) -> None:
    made = recorder(tmp_path, queue_max=10_000, file_bytes_max=10_000, files_max=3)
    for n in range(1_000):
        made.put(fleet(n))
    made.close()
    (writer,) = find_writers([tmp_path], never)
    assert len(writer.files) == 3
    assert writer.numbers[0] > 0
    assert writer.missing.startswith(f"files 0 to {writer.numbers[0] - 1} are gone")
    assert all(os.stat(file).st_size < 11_000 for file in writer.files)  # noqa: PTH116
    kept = [item.line.at_ns for item in read_writer(writer, never) if isinstance(item.line, FleetLine)]
    assert kept == list(range(kept[0], 1_000))
    with pytest.raises(RecordingError, match=r":1: file 0 of this controller is missing"):
        list(replay_decisions(read_writer(writer, never)))


def test_a_file_that_somebody_writes_is_not_removed_by_another_writer(tmp_path: Path) -> None:
    first = recorder(tmp_path, files_max=2)
    first.put(fleet(1))
    until(lambda: any(tmp_path.iterdir()))
    for _ in range(4):
        recorder(tmp_path, files_max=2).close()
    first.put(fleet(2))
    first.close()
    kept = [w for w in find_writers([tmp_path], never) if w.header.started_ns == first.header.started_ns]
    assert [item.line for item in read_writer(kept[0], never)][1:] == [fleet(1), fleet(2), EndLine()]


def test_what_finds_no_room_is_counted_and_marked_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "FLUSH_S", 3_600)
    made = recorder(tmp_path, queue_max=3)
    for n in range(10):
        made.put(fleet(n))
    made.close()
    assert lines_of(tmp_path)[1:] == [fleet(0), fleet(1), fleet(2), DroppedLine(7), EndLine()]
    assert made.take_counts() == (5, 7)


@pytest.mark.parametrize("headers_fit", [True, False])
def test_a_full_disk_costs_lines_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers_fit: bool
) -> None:
    monkeypatch.setattr(recording, "FLUSH_S", 0.01)
    monkeypatch.setattr(recording, "RETRY_S", 0.01)
    full = True
    write = FileIO.write

    def short(file: FileIO, data: bytes) -> int:
        if not full or (headers_fit and data.startswith(b'{"kind":"header"')):
            return write(file, data)
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "full")
        return write(file, data[: len(data) - 30])

    monkeypatch.setattr(recording, "FileIO", type("Disk", (FileIO,), {"write": short}))
    made = recorder(tmp_path)
    for n in range(3):
        made.put(fleet(n))
    until(lambda: made._disk_failed_ns is not None and made._dropped > 0)
    full = False
    made.put(fleet(9))
    made.close()
    found = lines_of(tmp_path, lambda _: None)
    assert found[-2:] == [fleet(9), EndLine()]
    missing = sum(line.lines for line in found if isinstance(line, DroppedLine))
    assert missing >= 1
    assert sum(isinstance(line, FleetLine) for line in found) + missing == 4


def test_what_has_no_encoding_is_dropped_alone(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.put(FleetLine(1, FleetView(object(), 1, 1, 1)))  # type: ignore[arg-type]
    made.put(fleet(2))
    made.close()
    assert lines_of(tmp_path)[1:] == [DroppedLine(1), fleet(2), EndLine()]
    assert made.take_counts() == (2, 1)


def test_a_killed_writer_leaves_a_cut_line_that_is_told_and_left_out(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.put(fleet(1))
    made.put(fleet(2))
    made.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    path.write_text(whole[: whole.rindex('{"kind":"end"') - 10])
    told: list[str] = []
    assert lines_of(tmp_path, told.append)[1:] == [fleet(1)]
    assert told == [f"{path}:3: the last line was cut and is left out"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no recording"),
        ("hello\n", ":1: not JSON: Expecting value at column 1"),
        ('{"kind":"end"}\n', ":1: the first line is not a header"),
        ('{"kind":"header","format":"tidegate-recording","version":7}\n', "version 7 cannot be read"),
        ("HEADER{}\n", ":2: kind: None is not one of header, request"),
        ('HEADER{"kind":"fleet","at_ns":"x","view":{}}\n', ':2: at_ns: must be a whole number, is "x"'),
        ('HEADER{"kind":"dropped","lines":1}\n{"kind":"dropped"', None),
        ('HEADER{"kind":"dropped","lines":1}\nnot json\n{"kind":"end"}\n', ":3: not JSON"),
        ('HEADER{"kind":"request"}\n', ":2: arrival_ns: is missing"),
        ("HEADER" + "[" * 100_000 + "\n", ":2: "),
    ],
)
def test_damage_is_told_with_file_and_line(tmp_path: Path, text: str, words: str | None) -> None:
    made = recorder(tmp_path)
    made.close()
    (path,) = tmp_path.iterdir()
    header = path.read_text().splitlines()[0] + "\n"
    path.write_text(text.replace("HEADER", header))
    if words is None:
        assert len(lines_of(tmp_path, lambda _: None)) == 2
        return
    with pytest.raises(RecordingError, match=words.replace("(", r"\(")) as caught:
        lines_of(tmp_path, lambda _: None)
    assert "\n" not in str(caught.value)


def test_an_unwritable_folder_is_refused_with_its_path(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below", Path("/proc/tidegate")):
        with pytest.raises(SettingsError, match=f"recording.folder: '{folder}': cannot be written: "):
            check_folder(Settings.load({"recording": {"folder": str(folder)}}))
    check_folder(Settings.load({"recording": {"folder": str(tmp_path / "new" / "one")}}))
    check_folder(Settings.load({}))


@pytest.mark.parametrize("folder", ["relative", "./x", "~/x"])
def test_a_relative_folder_is_refused(folder: str) -> None:
    with pytest.raises(SettingsError, match=r"recording.folder: .*absolute path"):
        Settings.load({"recording": {"folder": folder}})


def test_bounds_without_a_folder_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"recording: has no effect because recording.folder is not set"):
        Settings.load({"recording": {"files_max": 3}})


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_request_is_recorded_by_its_sizes_and_hashes() -> None:
    request = Request("tg-1", "m", "/v1/completions", "", 90, 7, (1, 2**64 - 1), 64, True, 5_000 * MS)
    finish, usage = Finish(Outcome.SUCCEEDED, Reason("ok", "")), Usage(100, 7, 64)
    line = request_line(1_000 * MS, request, 400, finish, usage, 7, 5_250 * MS, 900 * MS, "r1", 2)
    assert (line.arrival_ns, line.ttft_ms, line.e2e_ms) == (4_000 * MS, 250.0, 900.0)
    assert (line.prompt_tokens, line.cached_tokens, line.blocks) == (100, 64, (1, 2**64 - 1))
    none = request_line(0, request, 400, finish, Usage(), 0, 0, 900 * MS, None, 0)
    assert (none.ttft_ms, none.replica, none.prompt_tokens) == (None, "", None)
    assert isinstance(line, RequestLine)


# --- a controller's life ----------------------------------------------------------------------------------------------


def replica_report(rng: random.Random, replica: str, seq: int, load: float) -> ReplicaReport:
    running = round(16 * load)
    return ReplicaReport(
        replica_id=replica,
        model="m",
        seq=seq,
        window_ms=rng.choice([1_000.0, 1_000, 987.125]),
        state=rng.choice([ReplicaState.READY] * 9 + [ReplicaState.DRAINING]),
        running=running,
        waiting=rng.randrange(12) if load > 0.8 else 0,
        http_inflight=running,
        kv_tokens_used=running * 100,
        kv_tokens_max=4_000,
        prefill_tokens=rng.randrange(2_000),
        decode_tokens=running * 20,
        prefix_query_tokens=rng.randrange(4_000),
        prefix_hit_tokens=rng.randrange(2_000),
        preemptions=rng.randrange(2),
        steps=20,
        busy_share=min(1.0, load + rng.random() / 10),
        gpu_utilisation_share=None,
        itl=Histogram((0,) * 8 + (running * 20,) + (0,) * 24, running * 20 * 45.5),
        step_model=StepCoefficients(30.0, 1.0 + rng.random(), 0.5, 1.8, samples=100 + seq, error_share=0.02),
        knobs=Knobs(16, 512),
        running_seqs_hard=16,
        step_tokens_hard=2_048,
        finished=3,
        aborted=0,
        cold_start_ms=1_234.5,
    )


def gateway_report(rng: random.Random, seq: int, load: float) -> GatewayReport:
    return GatewayReport(
        gateway_id="g1",
        model="m",
        seq=seq,
        window_ms=1_000.0,
        ttft=Histogram((0,) * 20 + (round(10 * load),) + (0,) * 12, load * 3_000),
        itl=Histogram(),
        e2e=Histogram(),
        arrivals=round(40 * load),
        succeeded=round(30 * load),
        failed={"timeout": 1},
        prompt_tokens=rng.randrange(9_000),
        output_tokens=rng.randrange(2_000),
        inflight=round(40 * load),
        queued=0,
        routed={"r2": 3, "r1": 5},
        predicted_prompt_tokens={"r2": 300, "r1": 500},
        predicted_hit_tokens={"r2": 30, "r1": 200},
        ttft_error_ms=Histogram(),
        plan_seq=None,
    )


def by_hand(controller: Controller, tick: int) -> None:
    """People set something, take it back, and promise something else."""
    desk = controller.desk
    if tick == 30:
        held = desk.set_override(Override("", Knob.STEP_TOKENS_MAX, value=300, remaining_ms=20_000))
        assert not isinstance(held, Refused)
        assert not isinstance(desk.set_shadow(True, Override("", Knob.AFFINITY_STRENGTH, remaining_ms=5_000)), Refused)
    if tick == 40:
        assert not isinstance(desk.drop_overrides(None, "k"), Refused)
    if tick == 50:
        for _ in range(2):  # both gateways tell it
            assert desk.set_objectives({"objectives": {"itl_ms": 60, "ttft_ms": 500}}, "g1") is None


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    """One controller of the live code, 90 ticks of load that rises and falls, without a clock to wait for."""
    folder, rng, at = tmp_path_factory.mktemp("life"), random.Random(7), 10**12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deployments.controller.now_ns", lambda: at)
        patch.setattr("deployments.control_desk.now_ns", lambda: at)
        args = {
            "recording": {"folder": str(folder)},
            "scaling": {"replicas_max": 5, "down_window_s": 10},
            "affinity": {"query_tokens_min": 500},
        }
        controller = Controller(args, lambda: None)
        for n in range(1, 91):
            load = 1.2 if 20 < n < 60 else 0.3
            for replica in ("r1", "r2", "r3")[: 1 + n // 30]:
                at += rng.randrange(100) * MS
                controller.report_replica(replica_report(rng, replica, n, load))
            controller.report_gateway(gateway_report(rng, n - (n == 50), load))  # one comes twice
            running = 1 + n // 30
            by_hand(controller, n)
            controller.fleet(
                {"replicas_running": running, "replicas_target": running, "replicas_min": 1, "replicas_max": 5}
            )
            at += 600 * MS
            controller.tick()
        assert controller._recorder is not None
        controller._recorder.close()
        made = controller._control.ledger.last_seq
    (writer,) = find_writers([folder], never)
    assert made > 10
    return writer


def test_the_recorded_decisions_come_out_again_byte_for_byte(life: Writer) -> None:
    ticks = [item for item in replay_decisions(read_writer(life, never)) if isinstance(item, Replayed)]
    assert len(ticks) == 90
    assert [item for item in ticks if not item.equal] == []
    decided = [decision for item in ticks for decision in item.recorded.decisions]
    assert {d.lever for d in decided} >= {"replicas", "batch"}
    assert max(d.after["replicas_target"] or 0 for d in decided if d.lever == "replicas") > 1


def test_other_settings_give_other_decisions_and_the_difference_is_told(life: Writer) -> None:
    config = replace(life.header.config, scaling=ScalingConfig(replicas_max=2))
    items = [i for i in replay_decisions(read_writer(life, never), config) if isinstance(i, Replayed)]
    unequal = [i for i in items if not i.equal]
    assert unequal
    assert max(i.replayed.replicas_target or 0 for i in items) == 2
    first = differences(unequal[0].recorded, unequal[0].replayed)
    assert str(first[0]).startswith(f"tick {unequal[0].recorded.tick}: ")
    assert any(d.field.startswith(("replicas_target", "decisions[0]")) for d in first)


def test_one_changed_byte_is_found(life: Writer, tmp_path: Path) -> None:
    text = Path(life.files[0]).read_text()
    at = text.index('"kind":"tick"', len(text) // 2)
    at = text.index('"affinity_strength":', at) + len('"affinity_strength":')
    changed = tmp_path / "changed.jsonl"
    changed.write_text(f"{text[:at]}9{text[at:]}")
    ticks = [i for i in replay_decisions(read_file(changed, never)) if isinstance(i, Replayed)]
    (found,) = [i for i in ticks if not i.equal]
    (difference,) = differences(found.recorded, found.replayed)
    was, now = found.recorded.affinity_strength, found.replayed.affinity_strength
    assert str(difference) == f"tick {found.recorded.tick}: affinity_strength: recorded {was}, replayed {now}"


def test_what_people_set_is_recorded_and_decides_again(life: Writer) -> None:
    """The replay above is equal only because of these lines; without them it is not."""
    lines = Path(life.files[0]).read_text().splitlines(keepends=True)
    by_hand = [line for line in lines if json.loads(line)["kind"] in {"override", "override_end", "objectives"}]
    assert [json.loads(line)["kind"] for line in by_hand] == [*["override"] * 2, "override_end", "objectives"]
    left_out = Path(life.files[0]).with_name("left_out.txt")
    left_out.write_text("".join(line for line in lines if line not in by_hand))
    assert not all(i.equal for i in replay_decisions(read_file(left_out, never)) if isinstance(i, Replayed))


def test_a_hole_ends_the_replay_where_it_is(life: Writer, tmp_path: Path) -> None:
    lines = Path(life.files[0]).read_text().splitlines(keepends=True)
    half = len(lines) // 2
    holed = tmp_path / "holed.jsonl"
    holed.write_text("".join([*lines[:half], '{"kind":"dropped","lines":3}\n', *lines[half:]]))
    *ticks, last = replay_decisions(read_file(holed, never))
    assert last == Lost(str(holed), half + 1, 3)
    assert ticks
    assert all(isinstance(i, Replayed) and i.equal for i in ticks)


class Stumbling(ReplicaScaler):
    """Raises at its second tick."""

    ticks = 0

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:
        self.ticks += 1
        if self.ticks == 2:
            raise ValueError(f"stumbled over {len(signals.replicas)} replicas")
        return super().recommend(signals, now_ns)


def test_a_tick_that_failed_fails_again_in_the_same_words(tmp_path: Path) -> None:
    at, rng = 10**12, random.Random(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deployments.controller.now_ns", lambda: at)
        patch.setattr("deployments.controller.ReplicaScaler", Stumbling)
        controller = Controller({"recording": {"folder": str(tmp_path)}}, lambda: None)
        for seq in (1, 2, 3):
            at += 10**9
            controller.report_replica(replica_report(rng, "r1", seq, 0.5))
            controller.tick()
        assert controller._recorder is not None
        controller._recorder.close()
    ticks = [line.failed for line in lines_of(tmp_path) if isinstance(line, TickLine)]
    assert ticks == ["", "ValueError: stumbled over 1 replicas", ""]
    (writer,) = find_writers([tmp_path], never)
    again = list(replay_decisions(read_writer(writer, never), make_scaler=Stumbling))
    assert all(isinstance(i, Replayed) and i.equal for i in again)
    assert len(again) == 3


def until(check: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)
    assert from_text('{"kind":"end"}') == EndLine()
