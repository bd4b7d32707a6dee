"""``replay`` as people call it, on the recording of a simulated fleet: what it prints, one line for each mistake."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner, Result

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.codec import Blocks
from autoscaling.simulator.recorded import FleetLine, ReplicaLine, RequestLine, to_text
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import Pool, Scenario, SimRequest, StepLaw
from autoscaling.simulator.world import run
from deployments.cli import cli
from deployments.controller import Controller
from deployments.recording import Recorder, file_name, new_header
from deployments.settings import Settings
from policies.config import PolicyConfig, ScalingConfig
from policies.control.loop import TickResult
from policies.events import Effect, Event
from tests.sim.worlds import PROFILE, SECOND, Listed, poisson

UNIX_NS = 1_700_000_000 * SECOND
CONFIG = PolicyConfig(scaling=ScalingConfig(replicas_max=3, down_window_s=20))


class Reports:
    """Keeps what replicas and Serve told the controller of a simulated pool."""

    def __init__(self) -> None:
        self.lines: dict[tuple[int, str], ReplicaLine | FleetLine] = {}

    def flow(self, now_ns: int, gateway: int, request_id: str, event: Event, effects: Sequence[Effect]) -> None: ...
    def engine(self, now_ns: int, replica_id: str, phase: str, kind: str, request_id: str) -> None: ...
    def replica(self, now_ns: int, replica_id: str, phase: str) -> None: ...
    def end(self, now_ns: int, gateway: int, counts: dict[str, int]) -> None: ...

    def tick(self, now_ns: int, pool: int, result: TickResult) -> None:
        for replica in result.signals.replicas:
            for sample in replica.window:
                self.lines[sample.received_ns, replica.replica_id] = ReplicaLine(sample.received_ns, sample.value)
        if result.signals.fleet is not None:
            self.lines[now_ns, ""] = FleetLine(now_ns, result.signals.fleet)


def scenario() -> Scenario:
    slow = replace(PROFILE, law=StepLaw(30.0, 1.0, 0.2, 0.1), running_seqs_max=8, cold_start_ms=5_000.0)
    load = poisson(6.0, 40.0, pool=Pool(slow, 1, scaler=ReplicaScaler), config=CONFIG, gateways=1)
    return replace(load, source=lambda rng: Listed(requests(rng)))


def requests(rng: Random) -> list[SimRequest]:
    """After a quiet time, so that the controller knows the fleet as one that is recorded does."""
    made = poisson(6.0, 40.0).source(rng).arrivals()
    return [replace(r, arrival_ns=r.arrival_ns + 10 * SECOND) for r in made]


def write(folder: Path, source: str, lines: Sequence[RequestLine | ReplicaLine | FleetLine]) -> None:
    header = new_header(Settings.load({"scaling": {"replicas_max": 3, "down_window_s": 20}}), source, source * 8)
    header = replace(header, started_ns=0, started_unix_ns=UNIX_NS)
    text = "".join(to_text(line) + "\n" for line in (header, *lines))
    (folder / file_name(header, 0)).write_text(text)


@pytest.fixture(scope="module")
def simulated() -> tuple[RunResult, Reports]:
    reports = Reports()
    return run(scenario(), observer=reports), reports


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, simulated: tuple[RunResult, Reports]) -> Path:
    """The recording a live fleet would have left that behaved like the simulated one."""
    path = tmp_path_factory.mktemp("recording")
    result, reports = simulated
    made = {r.index: r for r in requests(Random("1/source"))}
    write(path, "gateway", [
        RequestLine(
            row.arrival_ns, "/v1/chat/completions", True, "", "", row.prompt_tokens, row.prompt_tokens,
            row.prompt_tokens * 4, row.output_tokens, None, row.cached_tokens, Blocks(made[row.index].blocks), 64,
            row.ttft_ms, row.e2e_ms, row.outcome, row.reason, row.replica, row.attempts,
        )
        for row in result.records
    ])  # fmt: skip
    write(path, "controller", [reports.lines[key] for key in sorted(reports.lines)])
    return path


def replay(*args: object) -> Result:
    return CliRunner().invoke(cli, ["replay", *map(str, args)])


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output + result.stderr
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    return lines[0]


# --- traffic ----------------------------------------------------------------------------------------------------------


def test_a_recording_of_a_simulated_fleet_replays_to_what_it_was(
    folder: Path, simulated: tuple[RunResult, Reports], tmp_path: Path
) -> None:
    out = tmp_path / "figures.json"
    result = replay(folder, "--json", out)
    assert result.exit_code == 0, result.stderr
    recorded, again = json.loads(out.read_text())["runs"]
    assert recorded["requests"] == again["requests"] == len(simulated[0].records) > 150
    for figure, tolerance in (("e2e_p50_ms", 0.1), ("tpot_p50_ms", 0.1), ("hit_share", 0.1), ("replicas_mean", 0.15)):
        assert again[figure] == pytest.approx(recorded[figure], rel=tolerance), figure
    assert again["replicas_max"] == recorded["replicas_max"] > 1


@pytest.mark.slow
def test_changes_stand_beside_what_was_recorded(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    result = replay(folder, "--set", "scaling.replicas_max=1", "--router", "round_robin", "--json", out)
    assert result.exit_code == 0, result.stderr
    for words in ("recorded", "simulated as recorded", "simulated with round_robin + scaling.replicas_max=1"):
        assert words in result.stdout
    recorded, again, changed = json.loads(out.read_text())["runs"]
    assert changed["replicas_max"] == 1 < again["replicas_max"]
    assert changed["e2e_p95_ms"] > again["e2e_p95_ms"]
    assert "simulated with round_robin + scaling.replicas_max=1: none" in result.stdout
    assert recorded["name"] == "recorded"


@pytest.mark.slow
def test_a_gateway_s_recording_alone_needs_a_profile(folder: Path, tmp_path: Path) -> None:
    (gateway,) = folder.glob("gateway-*.jsonl")
    assert "name an engine profile (--profile)" in refused(replay(gateway))
    result = replay(gateway, "--profile", "h100-llama-3.1-8b-bf16")
    assert result.exit_code == 0, result.stderr
    assert "no controller in the recording: no decisions to replay" in result.stdout


# --- decisions --------------------------------------------------------------------------------------------------------


@pytest.fixture
def life(tmp_path: Path, simulated: tuple[RunResult, Reports]) -> Path:
    """A live controller's recording of what the simulated replicas told."""
    at = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deployments.controller.now_ns", lambda: at)
        controller = Controller({"recording": {"folder": str(tmp_path)}, "scaling": {"replicas_max": 4}}, lambda: None)
        for (at, name), line in sorted(simulated[1].lines.items()):  # noqa: B007 (the controller's clock reads it)
            if isinstance(line, ReplicaLine):
                controller.report_replica(line.report)
            else:
                view = line.view
                controller.fleet({key: getattr(view, key) for key in view.__slots__})
                controller.tick()
        assert isinstance(controller._recorder, Recorder)
        controller._recorder.close()
    return tmp_path


def test_decisions_are_the_same_or_the_difference_is_told(life: Path) -> None:
    same = replay(life, "--decisions")
    assert same.exit_code == 0, same.stderr
    assert "decisions: byte for byte as recorded" in same.stdout
    other = replay(life, "--decisions", "--set", "batching.enabled=false")
    assert other.exit_code == 0, other.stderr
    assert "ticks come out otherwise" in other.stdout
    assert ": recorded " in other.stdout


def test_decisions_that_differ_with_the_same_code_fail(life: Path) -> None:
    (path,) = life.glob("controller-*.jsonl")
    text = path.read_text()
    head, tick = text.split('{"kind":"tick"', 1)
    path.write_text(head + '{"kind":"tick"' + tick.replace('"affinity_strength":1.0', '"affinity_strength":0.75', 1))
    result = replay(life, "--decisions")
    assert result.exit_code == 1
    assert "tick 1: affinity_strength: recorded 0.75, replayed 1.0" in result.stdout
    path.write_text(path.read_text().replace('"code":"', '"code":"x', 1))
    result = replay(life, "--decisions")
    assert result.exit_code == 0
    assert "recorded with other code" in result.stdout


def test_a_life_whose_beginning_is_gone_is_told(life: Path) -> None:
    (path,) = life.glob("controller-*.jsonl")
    text = path.read_text()
    path.write_text(text.replace('"file":0', '"file":3', 1))
    result = replay(life, "--decisions")
    assert result.exit_code == 0
    assert "not replayed: files 0 to 2 are gone, files 3 to 3 are there; raise recording.files_max" in result.stdout


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--router", "round_robbin"], "router 'round_robbin' is unknown; did you mean round_robin?"),
        (["--scaler", "hpaa"], "scaler 'hpaa' is unknown; did you mean hpa?"),
        (["--set", "scaling.replica_max=3"], "did you mean 'replicas_max'?"),
        (["--set", "scaling.replicas_max=0"], "replicas_max"),
        (["--profile", "h1000"], "h1000"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_wrong_choices_are_one_line(folder: Path, args: list[str], words: str) -> None:
    assert words in refused(replay(folder, *args))


def test_wrong_recordings_are_one_line(folder: Path, tmp_path: Path) -> None:
    assert "there is no such file or folder" in refused(replay(tmp_path / "nothing"))
    assert "holds no recording" in refused(replay(tmp_path))
    (tmp_path / "x.jsonl").write_text('{"timestamp": 1}\n')
    assert "x.jsonl:1: kind: None is not one of" in refused(replay(tmp_path))
    (controller,) = folder.glob("controller-*.jsonl")
    assert "holds no gateway's traffic" in refused(replay(controller)).replace("\n", " ")
