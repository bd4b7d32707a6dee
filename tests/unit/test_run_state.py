from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployments import run_state
from deployments.cluster import Ports, cluster_environment
from deployments.run_state import Identity, RunState
from deployments.settings import Settings

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
MILD = "import time; print('up', flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {MILD!r}])"

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(program: str, run_id: str | None = None, *, own_session: bool = False) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if k != run_state.RUN_VARIABLE}
        if run_id:
            environment[run_state.RUN_VARIABLE] = run_id
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, start_new_session=own_session
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def state() -> Iterator[RunState]:
    fresh = run_state.new_run(8265, None)
    yield fresh
    run_state.forget(Path(fresh.temp_dir), fresh)


def led_by(state: RunState, process: subprocess.Popen[bytes]) -> RunState:
    return RunState(state.run_id, None, Identity.of(process.pid), state.temp_dir, 8265, state.started_at_s)


def test_everything_that_carries_the_mark_ends_and_nothing_else(start: Start, state: RunState) -> None:
    ours, other, unmarked = start(MILD, state.run_id), start(MILD, "another run"), start(MILD)
    assert [process.pid for process in run_state.members(state)] == [ours.pid]
    assert run_state.end_all(state, 5) == []
    assert ours.wait(5) == -signal.SIGTERM
    assert other.poll() is None
    assert unmarked.poll() is None


@pytest.mark.slow
def test_a_process_without_a_readable_mark_is_found_by_its_session(start: Start, state: RunState) -> None:
    leader = start(PARENT, own_session=True)
    led = led_by(state, leader)
    assert len(run_state.members(led)) == 2
    assert run_state.end_all(led, 5) == []
    assert leader.wait(5) == -signal.SIGTERM


def test_a_session_whose_leader_was_replaced_is_not_ours(start: Start, state: RunState) -> None:
    stranger = start(MILD, own_session=True)
    reused = RunState(state.run_id, None, Identity(stranger.pid, 12.5), state.temp_dir, 8265, 0.0)
    assert run_state.members(reused) == []
    assert run_state.end_all(reused, 1) == []
    assert stranger.poll() is None


def test_who_ignores_the_request_is_forced(start: Start, state: RunState) -> None:
    stubborn = start(STUBBORN, state.run_id)
    assert run_state.end_all(state, 0.5) == []
    assert stubborn.wait(5) == -signal.SIGKILL


def test_shared_memory_goes_with_the_run_unless_others_use_it(start: Start, state: RunState) -> None:
    program = (
        "import mmap, os, time; kept = [mmap.mmap(os.open('/dev/shm/' + name, os.O_RDWR), 8) for name in {names!r}];"
        " print('up', flush=True); time.sleep(60)"
    )
    ours, common = (Path("/dev/shm", f"tidegate-test-{state.run_id}-{name}") for name in ("ours", "common"))
    for file in (ours, common):
        file.write_bytes(b"12345678")
    try:
        start(program.format(names=[ours.name, common.name]), state.run_id)
        start(program.format(names=[common.name]))
        assert run_state.end_all(state, 5) == []
        assert not ours.exists()
        assert common.exists()
    finally:
        for file in (ours, common):
            file.unlink(missing_ok=True)


def test_ending_twice_is_harmless(state: RunState) -> None:
    assert run_state.end_all(state, 1) == []
    assert run_state.end_all(state, 1) == []


def test_an_identity_is_a_pid_with_its_start() -> None:
    own = Identity.of(os.getpid())
    assert own is not None
    assert own.process() is not None
    assert Identity(own.pid, own.started_s - 100).process() is None
    assert Identity(2**22 + 1, time.time()).process() is None
    assert Identity.of(2**22 + 1) is None


def test_a_state_survives_its_file(tmp_path: Path, state: RunState) -> None:
    run_state.save(tmp_path, state)
    assert run_state.load(tmp_path) == state
    supervised = RunState("id", Identity(1, 2.5), Identity(3, 4.5), state.temp_dir, 1, 2.0)
    run_state.save(tmp_path, supervised)
    assert run_state.load(tmp_path) == supervised
    assert [path.name for path in tmp_path.iterdir()] == [run_state.STATE_FILE]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"run_id": 1}', "null"])
def test_a_broken_file_is_no_state(tmp_path: Path, text: str) -> None:
    (tmp_path / run_state.STATE_FILE).write_text(text)
    assert run_state.load(tmp_path) is None


def test_forgetting_removes_the_runs_folder_and_only_that(tmp_path: Path) -> None:
    fresh = run_state.new_run(8265, None)
    run_state.save(tmp_path, fresh)
    run_state.forget(tmp_path, fresh)
    assert not Path(fresh.temp_dir).exists()
    assert run_state.load(tmp_path) is None
    precious = tmp_path / "precious"
    precious.mkdir()
    run_state.forget(tmp_path, RunState("id", None, None, str(precious), 1, 1.0))
    assert precious.exists()


def test_the_folder_is_short_enough_for_rays_sockets(state: RunState) -> None:
    socket = f"{state.temp_dir}/session_2026-11-30_05-34-09_919158_4194304/sockets/plasma_store"
    assert len(socket) <= 107


def test_the_folder_is_short_enough_for_haproxys_sockets(state: RunState) -> None:
    environment = cluster_environment(Settings.load({}), Ports(), state.temp_dir, state.run_id)
    for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        folder, _, file = environment[name].rpartition("/")
        assert len(f"{folder}/{'f' * 56}/{file}") <= 97
