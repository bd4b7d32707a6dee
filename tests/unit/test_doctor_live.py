"""``doctor --url``: a gateway that does not tell, and a fleet with troubles, as the real controller shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments import doctor
from deployments.cli import cli
from deployments.control_client import ControlClient
from tests.unit.json_http import JsonHandler, listening
from tests.unit.test_status_commands import an_overview


class Gateway(JsonHandler):
    """Gives ``answer`` to whatever is asked."""

    answer: tuple[int, Any] = (200, {})
    of_other: Any = None
    """Overview of the model ``org/b``."""

    def do_GET(self) -> None:  # noqa: N802  (the base class's name)
        self.send(*((200, self.of_other) if self.path.endswith("?model=org%2Fb") else self.answer))


@pytest.fixture
def url() -> Iterator[str]:
    yield from listening(Gateway)


def causes_at(url: str) -> dict[str, str]:
    return {finding.cause: finding.text for finding in doctor.ask(ControlClient(url, None))}


def error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "param": None, "code": code}}


@pytest.mark.parametrize(
    ("status", "cause", "words"),
    [
        (401, "key", "Set TIDEGATE_API_KEY"),
        (403, "key", "keys create --scope control:read"),
        (404, "not_tidegate", "--url http://HOST:PORT/PREFIX"),
        (503, "controller_absent", "Serve replaces it within seconds"),
        (500, "gateway", "look at the gateway's log"),
    ],
)
def test_a_gateway_that_does_not_tell_is_named_by_its_status(url: str, status: int, cause: str, words: str) -> None:
    Gateway.answer = status, error("c", "It is as it is.")
    found = causes_at(url)
    assert list(found) == [cause]
    assert words in found[cause]


def test_a_gateway_that_is_not_there_is_one_line_and_exit_code_1() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "is Tidegate up?" in result.stderr


def test_a_fleet_with_troubles_is_named_by_each_of_them() -> None:
    overview = an_overview(8)
    rows, columns = overview["replicas"], overview["columns"]
    rows[3][columns.index("fresh")], rows[3][columns.index("age_s")] = False, 42.0
    overview["gateways"][0]["fresh"] = False
    overview["fleet"] = {"replicas_running": 8, "replicas_target": 11, "unschedulable": 3}
    overview["overrides"] = [{"id": "a1", "knob": "replicas_target", "expires_in_s": 600}]
    found = {finding.cause: finding.text for finding in doctor.judge_overview(overview)}
    assert "1 of 8 replicas do not report, for up to 42 s" in found["replica_silent"]
    assert "replica-00002" in found["replica_left_alone"]
    assert "1 of 2 gateways do not report" in found["gateway_silent"]
    assert "3 of 11 replicas find no room" in found["no_room"]
    assert "condition" in found
    assert "override clear a1" in found["override"]


def test_a_blind_controller_and_no_replica_are_named() -> None:
    overview = an_overview(0, 0)
    overview["fleet"] = {"replicas_running": 0, "replicas_target": 1, "unschedulable": 0}
    found = {finding.cause: finding.text for finding in doctor.judge_overview(overview)}
    assert "no replica runs, 1 are wanted" in found["no_replica"]
    assert "hears too little to decide" in found["signals_lost"]


def test_each_model_is_looked_at(url: str) -> None:
    first, other = an_overview(1), an_overview(0, 0)
    first["conditions"]["active"] = []
    first["models"] = other["models"] = [first["model"], "org/b"]
    other["fleet"] = {"replicas_running": 0, "replicas_target": 1, "unschedulable": 0}
    Gateway.answer, Gateway.of_other = (200, first), other | {"model": "org/b"}
    assert "model org/b: no replica runs, 1 are wanted" in causes_at(url)["no_replica"]


def test_a_well_fleet_has_no_finding(url: str) -> None:
    overview = an_overview(1)
    overview["conditions"]["active"] = []
    Gateway.answer = 200, overview
    result = CliRunner().invoke(cli, ["doctor", "--url", url])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"nothing is wrong at {url}\n"
