"""Boards from a terminal, against a Grafana and a Prometheus on a socket that remember what they were asked."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner, Result

from dashboards.catalogue import CATALOGUE
from dashboards.expressions import base_name
from deployments.cli import cli
from deployments.dashboard_commands import FOLDER
from deployments.dashboard_publish import gateways_of, newest_config, targets

TOKEN = "glsa_secret"
UIDS = {path.stem for path in (FOLDER / "grafana").glob("*.json")}


class Server(BaseHTTPRequestHandler):
    """Both at once: Grafana below ``/api/folders`` and ``/api/dashboards``, Prometheus below ``/api/v1``."""

    asked: ClassVar[list[tuple[str, str, Any, str | None]]] = []
    folders: ClassVar[set[str]] = set()
    refuse: ClassVar[int] = 0
    without: ClassVar[set[str]] = set()
    """Metrics of which Prometheus has no sample."""

    def _answer(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.asked.append((self.command, self.path, body, self.headers.get("authorization")))
        status, value = (self.refuse, {"message": "not today"}) if self.refuse else self._grafana(body)
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _grafana(self, body: Any) -> tuple[int, Any]:
        parts = self.path.removeprefix("/grafana").split("/")
        if parts[2] == "v1":
            return 200, {"status": "success", "data": self._prometheus()}
        if parts[2] == "dashboards":
            return 200, {"status": "success", "url": f"/d/{body['dashboard']['uid']}/x"}
        if self.command == "POST":
            self.folders.add(body["uid"])
            return 200, body
        return (200, {"uid": parts[3]}) if parts[3] in self.folders else (404, {"message": "folder not found"})

    def _prometheus(self) -> Any:
        query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        expr = query.get("query") or query["match[]"]
        assert "$" not in expr
        missing = any(name in expr for name in self.without)
        if "match[]" in query:
            return [] if missing else ["one"]
        value = "NaN" if missing else "1"
        return {"resultType": "vector", "result": [{"metric": {}, "value": [0, value]}]}

    do_GET = do_POST = _answer  # noqa: N815  (the base class's names)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (likewise)
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("GRAFANA_URL", "GRAFANA_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    Server.asked.clear()
    Server.folders.clear()
    Server.without.clear()
    Server.refuse = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["dashboards", *arguments])


# --- publish ----------------------------------------------------------------------------------------------------------


def test_every_board_goes_into_the_folder_which_is_made_first(url: str, token_file: str) -> None:
    done = run("publish", "--url", f"{url}/grafana", "--token-file", token_file)
    assert done.exit_code == 0, done.output
    assert [(method, path) for method, path, _, _ in Server.asked[:2]] == [
        ("GET", "/grafana/api/folders/tidegate"),
        ("POST", "/grafana/api/folders"),
    ]
    assert Server.asked[1][2] == {"title": "Tidegate", "uid": "tidegate"}
    posted = Server.asked[2:]
    assert {path for _, path, _, _ in posted} == {"/grafana/api/dashboards/db"}
    assert {body["dashboard"]["uid"] for _, _, body, _ in posted} == UIDS
    assert all(body["folderUid"] == "tidegate" and body["overwrite"] is True for _, _, body, _ in posted)
    assert {token for _, _, _, token in Server.asked} == {f"Bearer {TOKEN}"}
    assert f"{url}/grafana/d/tidegate-fleet/x" in done.output
    assert TOKEN not in done.output


def test_a_folder_that_is_there_is_used_and_address_and_token_may_be_in_the_environment(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Server.folders.add("ops")
    monkeypatch.setenv("GRAFANA_URL", url)
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    assert run("publish", "--folder-uid", "ops").exit_code == 0
    assert [path for method, path, _, _ in Server.asked if method == "POST"] == ["/api/dashboards/db"] * len(UIDS)


@pytest.mark.parametrize(("status", "words"), [(401, "401"), (403, "not today"), (500, "not today")])
def test_a_refusal_is_one_line(url: str, token_file: str, status: int, words: str) -> None:
    Server.refuse = status
    done = run("publish", "--url", url, "--token-file", token_file)
    assert done.exit_code == 1
    assert words in done.output
    assert "Traceback" not in done.output


def test_what_is_missing_is_said(tmp_path: Path, token_file: str, url: str) -> None:
    assert "GRAFANA_URL" in run("publish", "--token-file", token_file).output
    assert "GRAFANA_TOKEN" in run("publish", "--url", url).output
    assert "http://" in run("publish", "--url", "grafana:3000", "--token-file", token_file).output
    assert "there are no boards" in run(
        "publish", "--url", url, "--token-file", token_file, "--folder", str(tmp_path)
    ).output.replace("\n", " ")
    assert run("publish", "--url", "http://127.0.0.1:1", "--token-file", token_file).exit_code == 1


# --- export and check -------------------------------------------------------------------------------------------------


def test_export_writes_what_is_committed_and_removes_boards_that_are_no_more(tmp_path: Path) -> None:
    old = tmp_path / "grafana/tidegate-old.json"
    old.parent.mkdir()
    old.write_text("{}")
    assert run("export", "--folder", str(tmp_path)).exit_code == 0
    made = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    committed = [*(FOLDER / "grafana").iterdir(), FOLDER / "prometheus/rules.yaml"]
    assert made == {path.name: path.read_text() for path in committed}


def test_check_finds_a_stale_file(tmp_path: Path) -> None:
    assert run("check").exit_code == 0
    shutil.copytree(FOLDER / "grafana", tmp_path / "grafana")
    shutil.copytree(FOLDER / "prometheus", tmp_path / "prometheus")
    assert run("check", "--folder", str(tmp_path)).exit_code == 0
    path = tmp_path / "grafana/tidegate-fleet.json"
    path.write_text(path.read_text().replace("Goodput", "Badput"))
    done = run("check", "--folder", str(tmp_path))
    assert done.exit_code == 1
    assert "tidegate-fleet.json" in done.output.replace("\n", "")


@pytest.mark.slow
def test_check_asks_prometheus_for_every_expression_and_variable(url: str) -> None:
    done = run("check", "--prometheus", url)
    assert done.exit_code == 0, done.output
    asked = [parse_qs(urlsplit(path).query) for _, path, _, _ in Server.asked]
    names = {base_name(name) for query in asked for name in re.findall(r"\w+", query.get("query", [""])[0])}
    assert CATALOGUE.keys() <= names
    assert sum("match[]" in query for query in asked) == 5


@pytest.mark.slow
def test_no_data_is_a_fault_unless_it_is_written_why(url: str) -> None:
    Server.without.add("tidegate_tasks_total")
    done = run("check", "--prometheus", url, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)["expressions"]
    assert {row["absence"] for row in rows if not row["series"]} == {"no task is over"}
    Server.without.add("tidegate_inflight_requests")
    done = run("check", "--prometheus", url, "--json")
    assert done.exit_code == 1
    found = json.loads(done.output)
    assert all("tidegate_inflight_requests" in row["expr"] for row in found["expressions"] if not row["fine"])
    assert found["variables"]["model"] == []


def test_a_prometheus_that_cannot_be_asked_is_one_line() -> None:
    for address in ("http://127.0.0.1:1", "prometheus:9090"):
        done = run("check", "--prometheus", address)
        assert done.exit_code == 1
        assert "Traceback" not in done.output


# --- targets ----------------------------------------------------------------------------------------------------------

HAPROXY = """
backend http-tidegate
    server SERVE_REPLICA_tidegate-Gateway-a1 10.0.0.7:30001 check observe layer4 error-limit 5 on-error mark-down
    server SERVE_REPLICA_tidegate-Gateway-b2 10.0.0.8:30000 check
    server fallback-Gateway-x 10.0.0.8:8500 check backup
backend http-tidegate-via-ingress-request-router
    server SERVE_REPLICA_tidegate-Gateway-a1 10.0.0.7:30001 track http-tidegate/a1
    server SERVE_REPLICA_other-Front-c3 10.0.0.9:30000 check
"""


def test_the_configuration_that_serve_wrote_last_is_taken(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is Serve up"):
        newest_config(tmp_path)
    for age, node in enumerate(("new", "old")):
        path = tmp_path / node / "haproxy.cfg"
        path.parent.mkdir()
        path.touch()
        os.utime(path, (1_000 - age, 1_000 - age))
    assert newest_config(tmp_path) == tmp_path / "new/haproxy.cfg"


def test_targets_are_the_gateways_that_haproxy_knows(tmp_path: Path) -> None:
    assert gateways_of(HAPROXY) == ["10.0.0.7:30001", "10.0.0.8:30000"]
    config = tmp_path / "haproxy.cfg"
    config.write_text(HAPROXY)
    arguments = ("--haproxy-config", str(config), "--model", "m", "--folder", str(tmp_path / "t"))
    assert run("targets", *arguments).exit_code == 0
    assert (tmp_path / "t/gateways.json").read_text() == targets(["10.0.0.7:30001", "10.0.0.8:30000"], "m")
    assert json.loads((tmp_path / "t/controller.json").read_text()) == [
        {"targets": ["127.0.0.1:8000"], "labels": {"model": "m"}}
    ]
    config.write_text("backend x\n")
    assert run("targets", *arguments).exit_code == 1
