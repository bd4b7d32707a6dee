"""``fit`` as people call it: from steps, a request log and a running service, and one clear line for what is wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from autoscaling.simulator.fit_log import LoggedRequest, replay_log
from autoscaling.simulator.profile import profile_from_json
from autoscaling.simulator.spec import StepLaw
from deployments.cli import cli
from deployments.control_view import plain
from deployments.simulation.profile_files import load_profile
from policies.types import Histogram, Knobs, ReplicaReport, ReplicaState, StepCoefficients
from tests.unit.simulator.test_fit import steps_of

LIKE = "rtxpro6000-llama-3.1-8b-bf16"


def fit(*args: object) -> Result:
    return CliRunner().invoke(cli, ["fit", *map(str, args)])


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output + result.stderr
    assert "Traceback" not in result.output + result.stderr
    assert result.stdout == ""
    return result.stderr.strip().splitlines()[-1]


def records(folder: Path, law: StepLaw, count: int = 200) -> Path:
    path = folder / "steps.jsonl"
    lines = [
        {"seq": i, "start_ns": i, "duration_us": round(s.step_ms * 1e3), "running": s.running,
         "prefill_tokens": s.prefill_tokens, "decode_seqs": s.running, "kv_tokens": s.kv_tokens, "preempted": 0}
        for i, s in enumerate(steps_of(law, count, 8))
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_steps_make_a_profile(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    result = fit(records(tmp_path, StepLaw(20.0, 0.5, 0.2, 0.1)), "--like", LIKE, "--out", out, "--no-table")
    assert result.exit_code == 0, result.stderr
    assert "all steps (200): mean error 0.0%" in result.stderr
    profile, like = load_profile(str(out)), load_profile(LIKE)
    assert profile.name == "mine"
    assert profile.law.a_ms == pytest.approx(20, rel=1e-3)
    assert (profile.law.b_ms, profile.law.c_ms, profile.law.d_ms) == (0.5, 0.2, 0.1)
    assert profile.kv_tokens == like.kv_tokens
    assert "law.a_ms: fitted to 200 steps of steps.jsonl, mean error 0.0%" in profile.source
    assert "law.e_ms" not in profile.source
    assert next(line for line in like.source.split("\n") if line.startswith("kv_tokens")) in profile.source


def test_a_profile_goes_to_standard_output_alone(tmp_path: Path) -> None:
    result = fit(records(tmp_path, StepLaw(20.0, 0.5, 0.2, 0.1)), "--like", LIKE, "--name", "piped")
    assert profile_from_json(result.stdout, "stdout").name == "piped"


def test_steps_without_prompts_keep_the_time_of_a_prompt_token(tmp_path: Path) -> None:
    path = records(tmp_path, StepLaw(20.0, 0.5, 0.2, 0.1))
    lines = [line for line in path.read_text().splitlines() if json.loads(line)["prefill_tokens"] == 0]
    path.write_text("\n".join(lines))
    result = fit(path, "--like", LIKE)
    assert "nothing was learned of prompt tokens" in result.stderr
    assert profile_from_json(result.stdout, "stdout").law.d_ms == load_profile(LIKE).law.d_ms


def test_a_request_log_makes_a_profile_and_says_how_far_off_it_is(tmp_path: Path) -> None:
    log = replay_log(load_profile(LIKE), [LoggedRequest(300 + i, 20, i * 90.0, 0, 0) for i in range(12)]).requests
    path = tmp_path / "log.csv"
    path.write_text("input_tokens,output_tokens,arrival_s,first_token_s,last_token_s\n" + "".join(
        f"{r.prompt_tokens},{r.output_tokens},{r.arrival_ms / 1e3},{r.first_ms / 1e3},{r.last_ms / 1e3}\n" for r in log
    ))  # fmt: skip
    result = fit(path, "--like", LIKE, "--first", 8)
    assert result.exit_code == 0, result.stderr
    assert "all requests (12), simulated against logged: tpot mean " in result.stderr
    assert "those held out (4)" in result.stderr
    assert "fitted to 8 of 12 requests of log.csv" in profile_from_json(result.stdout, "stdout").source
    assert "--first 12: the log has 12 requests" in refused(fit(path, "--like", LIKE, "--first", 12))


# --- a running service ------------------------------------------------------------------------------------------------


def report(replica: str, model: StepCoefficients | None, cold_start_ms: float | None) -> dict[str, Any]:
    """One replica as ``/control/state`` tells it."""
    value = ReplicaReport(
        replica_id=replica, model="smollm2", seq=9, window_ms=1e3, state=ReplicaState.READY, running=1, waiting=0,
        http_inflight=1, kv_tokens_used=64, kv_tokens_max=23_296, prefill_tokens=0, decode_tokens=5,
        prefix_query_tokens=0, prefix_hit_tokens=0, preemptions=0, steps=5, busy_share=0.5, gpu_utilisation_share=None,
        itl=Histogram(), step_model=model, knobs=Knobs(), running_seqs_hard=64, step_tokens_hard=1_024, finished=0,
        aborted=0, cold_start_ms=cold_start_ms,
    )  # fmt: skip
    found: dict[str, Any] = plain(value)
    return found


@contextmanager
def service(body: str, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = status if self.path == "/control/state" else 404
            self.send_response(found)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_running_service_gives_law_memory_limits_and_cold_start() -> None:
    replicas = [
        report("a", StepCoefficients(30.0, 2.0, 1.0, 4.0, 300, 0.08), 31_000.0),
        report("b", StepCoefficients(50.0, 4.0, 3.0, 8.0, 100, 0.02), 40_000.0),
        report("c", None, None),
    ]
    with service(json.dumps({"model": "smollm2", "replicas": replicas})) as url:
        result = fit(url, "--like", "cpu-smollm2-135m", "--name", "live")
    assert result.exit_code == 0, result.stderr
    profile = profile_from_json(result.stdout, "stdout")
    assert profile.law == StepLaw(35.0, 2.5, 1.5, 5.0)
    assert (profile.kv_tokens, profile.running_seqs_max, profile.step_tokens_max) == (23_296, 64, 1_024)
    assert profile.cold_start_ms == 40_000
    assert profile.model == "smollm2"
    assert "from 400 steps; smoothed error 8.0% at most" in result.stderr
    assert f"kv_tokens: reported by {url}" in profile.source


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ('{"replicas": []}', 200, "no replica has told a step model yet"),
        ("<html>", 200, "the answer is no JSON"),
        ("[]", 200, "the answer is not the controller's state"),
        ("{}", 503, "no answer: "),
        ('{"replicas": [{"step_model": {"a_ms": 1}}]}', 200, "a step model that cannot be read"),
    ],
)
def test_a_service_that_says_nothing_of_use_is_told(body: str, status: int, words: str) -> None:
    with service(body, status) as url:
        assert words in refused(fit(url, "--like", "cpu-smollm2-135m"))


def test_wrong_input_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text("")
    (tmp_path / "t.jsonl").write_text('{"running": 1,')
    assert "no such profile; did you mean h100-llama" in refused(fit(tmp_path / "e.jsonl", "--like", "h100-llama-8b"))
    assert "e.jsonl: no step in it" in refused(fit(tmp_path / "e.jsonl", "--like", LIKE))
    assert "t.jsonl:1: not JSON" in refused(fit(tmp_path / "t.jsonl", "--like", LIKE))
    assert "cannot be read: No such file" in refused(fit(tmp_path / "none.csv", "--like", LIKE))
    assert "0 usable steps" not in refused(fit("http://127.0.0.1:1", "--like", LIKE))
