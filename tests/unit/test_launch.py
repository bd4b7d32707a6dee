from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deployments import cli, launch, replica_host, upstream
from deployments.auth import Authenticator
from deployments.cluster import NotReadyError, Ports, RefusedError, ServeApi, cluster_environment
from deployments.config_file import check_config
from deployments.errors import GatewayError
from deployments.settings import Settings, SettingsError

ROOT = Path(__file__).resolve().parents[2]


class Answers(BaseHTTPRequestHandler):
    """A server that answers with what the test put into ``reply`` and keeps what it was asked."""

    reply: tuple[int, bytes] = (200, b"{}")
    asked: dict[str, Any]

    def _any(self) -> None:
        length = int(self.headers.get("content-length", 0))
        type(self).asked = {"path": self.path, "method": self.command, "headers": dict(self.headers)}
        type(self).asked["body"] = self.rfile.read(length)
        self.send_response(self.reply[0])
        self.end_headers()
        self.wfile.write(self.reply[1])

    do_GET = do_POST = do_PUT = do_DELETE = _any  # noqa: N815 (names of the base class)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (name of the base class)
        """Say nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def plan_for(port: int) -> launch.Plan:
    return launch.Plan({}, "tidegate", "/", Settings.load({}), Ports(http=port))


# --- reading the file -------------------------------------------------------------------------------------------------


def test_the_shipped_file_is_a_plan() -> None:
    plan = launch.read_plan(ROOT / "serve_config.yaml", Ports())
    assert (plan.app, plan.prefix, plan.url) == ("tidegate", "/", "http://127.0.0.1:8000")


def test_the_http_port_and_the_prefix_come_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "http_options: {port: 8123}\n"
        "applications:\n- {name: x, route_prefix: /llm, import_path: 'deployments.app:build'}\n"
    )
    plan = launch.read_plan(file, Ports())
    assert plan.url == "http://127.0.0.1:8123/llm"
    assert plan.ports.listed()[0].number == 8123


def test_a_file_that_is_not_there_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        launch.read_plan(tmp_path / "none.yaml", Ports())


# --- environment ------------------------------------------------------------------------------------------------------


def environment(args: dict[str, Any]) -> dict[str, str]:
    return cluster_environment(Settings.load(args), Ports(), "/tmp/tidegate-x", "run")


def test_haproxy_waits_longer_for_an_answer_than_a_request_may_take() -> None:
    found = environment({"gateway": {"total_timeout_ms": 900_000}})
    for name in ("TIMEOUT_SERVER_S", "INGRESS_TIMEOUT_SERVER_S"):
        assert float(found[f"RAY_SERVE_HAPROXY_{name}"]) > 900


@pytest.mark.parametrize("name", ["client_idle_timeout_ms", "body_timeout_ms"])
def test_haproxy_waits_longer_for_a_client_than_the_gateway(name: str) -> None:
    assert float(environment({"gateway": {name: 900_000}})["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"]) > 900


def test_each_hop_keeps_idle_connections_longer_than_the_one_before_it() -> None:
    options = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))["http_options"]
    load_balancers_s = 60  # nginx and AWS
    assert options["keep_alive_timeout_s"] > load_balancers_s  # HAProxy to clients, and gateways to HAProxy
    assert upstream.KEEPALIVE_S < replica_host.KEEP_ALIVE_S


def test_haproxy_does_not_cut_streams_that_may_still_drain() -> None:
    assert float(environment({"model": {"drain_s_max": 1_200}})["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > 1_200


def test_haproxy_retries_only_what_was_never_sent() -> None:
    found = environment({})
    assert found["RAY_SERVE_HAPROXY_RETRY_ON"] == found["RAY_SERVE_HAPROXY_INGRESS_RETRY_ON"] == "conn-failure"
    assert found["RAY_SERVE_HAPROXY_RETRIES"] == found["RAY_SERVE_HAPROXY_INGRESS_RETRIES"] == "1"


def test_haproxys_files_are_in_the_runs_own_folder() -> None:
    paths = [value for name, value in environment({}).items() if name.endswith(("_LOC", "_PATH", "_BASE", "_FILE"))]
    assert len(paths) == 5
    assert all((path + "/").startswith("/tmp/tidegate-x/") for path in paths)


def test_haproxys_names_are_names_that_ray_reads() -> None:
    constants = pytest.importorskip("ray.serve._private.constants")
    source = Path(constants.__file__).read_text(encoding="utf-8")
    known = set(re.findall(r'"(RAY_SERVE_[A-Z0-9_]+)"', source))
    assert {name for name in environment({}) if name.startswith("RAY_SERVE_")} <= known


# --- Serve's REST interface -------------------------------------------------------------------------------------------


def test_a_call_carries_the_token_and_the_configuration(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    Answers.reply = (200, b"")
    ServeApi(port).deploy({"applications": []})
    assert Answers.asked["method"] == "PUT"
    assert Answers.asked["path"] == "/api/serve/applications/"
    assert Answers.asked["headers"]["Authorization"] == "Bearer secret"
    assert json.loads(Answers.asked["body"]) == {"applications": []}


@pytest.mark.parametrize(
    ("status", "kind"), [(400, RefusedError), (401, RefusedError), (500, NotReadyError), (503, NotReadyError)]
)
def test_errors_are_told_apart(port: int, status: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    Answers.reply = (status, b"why it failed")
    with pytest.raises(kind, match="why it failed"):
        ServeApi(port).details()


def test_nobody_there_means_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    with pytest.raises(NotReadyError):
        ServeApi(1).details()
    ServeApi(1).shut_down(1)


# --- words ------------------------------------------------------------------------------------------------------------


def test_a_first_answer_is_an_answer_with_choices(port: int) -> None:
    Answers.reply = (200, b'{"choices": [{"text": " Paris"}]}')
    assert launch.probe(plan_for(port)) is None
    assert json.loads(Answers.asked["body"])["model"] == "smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((503, b"no replica"), "HTTP 503: no replica"),
        ((200, b"{}"), "without choices"),
        ((200, b"not json"), "Expecting value"),
        ((200, b"[]"), "no attribute"),
    ],
)
def test_anything_else_is_said(port: int, reply: tuple[int, bytes], words: str) -> None:
    Answers.reply = reply
    assert words in str(launch.probe(plan_for(port)))


def test_nobody_there_is_said() -> None:
    assert "refused" in str(launch.probe(plan_for(1)))


@pytest.mark.parametrize("args", ["", "args: {}", "args: {auth: {}}", "args: {auth: {keys_file: /a/keys.jsonl}}"])
def test_the_first_question_has_a_key_whose_hash_alone_goes_to_serve(tmp_path: Path, port: int, args: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"applications:\n- name: x\n  import_path: 'deployments.app:build'\n  {args}\n")
    plan = launch.read_plan(file, Ports(http=port))
    keyed = launch.with_probe_key(plan, 60)
    assert keyed.probe_key not in json.dumps(keyed.config) + repr(keyed)
    assert "hash" not in json.dumps(plan.config), "the plan itself stays as it was"
    auth = Authenticator(check_config(keyed.config)["x"].auth)
    Answers.reply = (200, b'{"choices": [{"text": " Paris"}]}')
    assert launch.probe(keyed) is None
    given = {name.lower().encode(): value.encode() for name, value in Answers.asked["headers"].items()}
    assert auth.authenticate(given).scopes == {"inference"}
    late = Authenticator(check_config(keyed.config)["x"].auth, lambda: time.time() + 61)
    with pytest.raises(GatewayError, match="expired"):
        late.authenticate(given)


def test_where_no_key_is_needed_none_is_made(port: int) -> None:
    plan = launch.Plan({}, "tidegate", "/", Settings.load({"auth": "none"}), Ports(http=port))
    assert launch.with_probe_key(plan, 60) is plan
    Answers.reply = (200, b'{"choices": [{"text": " Paris"}]}')
    assert launch.probe(plan) is None
    assert "authorization" not in {name.lower() for name in Answers.asked["headers"]}


def test_progress_names_each_deployment() -> None:
    app = {
        "deployments": {
            "Gateway": {"status": "HEALTHY", "replicas": [{"state": "RUNNING"}], "target_num_replicas": 1},
            "Engine": {"status": "UPDATING", "replicas": [{"state": "STARTING"}, {"state": "RUNNING"}]},
        }
    }
    assert launch.describe(app) == "Gateway ready, Engine 1/2 replicas running"
    assert launch.describe({}) == "building the application"


def test_progress_shows_why_replicas_do_not_start() -> None:
    message = "A replica failed to start. Retrying.\nTraceback:\n  File x\nOSError: no such model"
    app = {"deployments": {"Engine": {"status": "UPDATING", "message": message, "replicas": []}}}
    assert launch.describe(app) == "Engine 0/1 replicas running (OSError: no such model)"


def test_the_telling_line_of_a_traceback_is_its_last_error() -> None:
    text = "Traceback (most recent call last):\n  File x\nValueError: too hot\n  nested: thing\n\nray stopped"
    assert launch.failure_line(text) == "ValueError: too hot"
    assert launch.failure_line("just words\n") == "just words"
    assert launch.failure_line("") == "no reason given"
    assert len(launch.failure_line("XError: " + "y" * 10_000)) <= 500


def test_a_failure_collects_what_serve_says_everywhere() -> None:
    app = {"message": "a", "deployments": {"E": {"message": "b"}, "G": {"message": ""}}}
    assert launch.failure_text(app) == "a\nb"


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setattr(launch, "RUN_FOLDER", tmp_path / ".run")
    return CliRunner()


@pytest.mark.parametrize("command", ["up", "doctor"])
def test_a_wrong_configuration_is_one_line_and_exit_code_1(runner: CliRunner, tmp_path: Path, command: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "applications:\n- {name: x, import_path: 'deployments.app:build', args: {scaling: {replica_max: 3}}}\n"
    )
    result = runner.invoke(cli.cli, [command, "--config", str(file)])
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "error: applications.0.args.scaling.replica_max: 3: unknown key; did you mean 'replicas_max'?"
    ]
    assert not (tmp_path / ".run" / "state.json").exists()


def test_ending_nothing_says_so(runner: CliRunner) -> None:
    result = runner.invoke(cli.cli, ["down"])
    assert result.exit_code == 0
    assert "nothing to end" in result.stdout


def test_an_unknown_model_names_the_known_ones(runner: CliRunner) -> None:
    result = runner.invoke(cli.cli, ["model", "gpt-9"])
    assert result.exit_code == 1
    assert "smollm2-135m-instruct" in result.stderr


def test_a_damaged_model_is_told_and_what_to_run(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path))
    result = runner.invoke(cli.cli, ["model", "--verify"])
    assert result.exit_code == 1
    assert "make model" in result.stderr


def test_what_nobody_expected_leaves_no_traceback_on_the_screen(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dir.yaml").mkdir()
    monkeypatch.setattr(launch, "read_plan", lambda *_: 1 / 0)
    result = runner.invoke(cli.cli, ["doctor"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: unexpected: ZeroDivisionError")
    assert "Traceback" not in result.output
    assert "ZeroDivisionError" in (tmp_path / ".run" / "error.log").read_text()


TWO = Settings.load({"auth": "none", "model": {"name": "a"}, "models": {"b": {"model": {}}}})


@pytest.mark.parametrize(
    ("gateway", "first", "other", "up"),
    [
        ("HEALTHY", "HEALTHY", "DEPLOY_FAILED", ["a"]),
        ("HEALTHY", "DEPLOY_FAILED", "HEALTHY", ["b"]),
        ("HEALTHY", "DEPLOY_FAILED", "DEPLOY_FAILED", []),
        ("HEALTHY", "UPDATING", "DEPLOY_FAILED", None),
        ("UPDATING", "HEALTHY", "DEPLOY_FAILED", None),
        ("DEPLOY_FAILED", "HEALTHY", "HEALTHY", []),
    ],
)
def test_of_several_models_those_that_start_are_served(
    gateway: str, first: str, other: str, up: list[str] | None
) -> None:
    states = {"Gateway": gateway, "Engine": first, "Engine-b": other}
    assert launch.models_up(TWO, states) == up


def test_an_application_of_one_model_that_failed_is_not_up() -> None:
    assert launch.models_up(Settings.load({"auth": "none"}), {"Gateway": "HEALTHY", "Engine": "DEPLOY_FAILED"}) == []
