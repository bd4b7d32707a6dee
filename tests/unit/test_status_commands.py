"""``status`` and ``request`` in a terminal, against a gateway on a socket whose answers the real code made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from deployments import status_commands
from deployments.cli import cli
from deployments.controller import Controller
from deployments.recent_requests import RecentRequests
from deployments.request_log import RequestRecord
from policies.types import Priority, Reason
from tests.page_stand import Stand
from tests.unit.json_http import JsonHandler, listening

MS = 1_000_000
NOT_HERE = {"error": {"message": "Gateway b does not have this request.", "code": "request_not_found"}}


class Gateway(JsonHandler):
    """Gives the next of ``answers``, the last one again and again."""

    answers: ClassVar[list[tuple[int, Any]]] = []
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:  # noqa: N802  (the base class's name)
        self.asked.append(self.path)
        status, value = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send(status, value)


@pytest.fixture
def url() -> Iterator[str]:
    Gateway.answers.clear()
    Gateway.asked.clear()
    yield from listening(Gateway)


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args), env={"TIDEGATE_API_KEY": ""})


def an_overview(replicas: int, reports: int = 3) -> Any:
    def fail() -> None:
        raise AssertionError("the controller gave up")

    controller = Controller({"auth": "none"}, fail)
    stand = Stand("", controller, replicas)
    for _ in range(reports):
        stand.report()
    if reports:
        stand.decide()
    return json.loads(controller.overview())


def test_status_shows_replicas_gateways_decisions_and_cost(url: str) -> None:
    overview = an_overview(8)
    Gateway.answers.append((200, overview))
    result = run("status", "--url", url)
    assert result.exit_code == 0, result.output
    lines = {words[0]: line for line in result.stdout.splitlines() if (words := line.split())}
    assert "left alone" in lines["replica-00002"]
    assert "stuck" in lines["replica-00006"]
    assert "256" in lines["replica-00001"]
    assert "98%" in lines["replica-00001"]
    assert "replica-00002 (errors)" in lines["gateway-001"]
    assert "8 of 8 wanted" in lines["replicas"]
    assert "no price set" in lines["cost"]
    assert "step_tokens_max 2,048 -> 832" in result.stdout
    assert Gateway.asked == ["/control/overview"]


def replicas_listed(*args: str) -> list[str]:
    lines = [line.strip() for line in run("status", *args).stdout.splitlines()]
    return [line.split()[0] for line in lines if line.startswith("replica-")]


@pytest.mark.slow
def test_the_unwell_come_first_and_the_rest_is_counted(url: str) -> None:
    Gateway.answers.append((200, an_overview(100)))
    listed = replicas_listed("--url", url)
    assert len(listed) == status_commands.ROWS
    assert listed[:5] == [f"replica-0000{number}" for number in (2, 6, 4, 5, 0)]
    assert "and 70 more, none of them worse (--all)" in run("status", "--url", url).stdout
    assert len(replicas_listed("--url", url, "--all")) == 100


def test_status_before_anything_reports_and_in_shadow_mode(url: str) -> None:
    overview = an_overview(1, reports=0)
    for row in overview["knobs"]:
        row["mode"] = "shadow"
    Gateway.answers.append((200, overview))
    result = run("status", "--url", url)
    assert result.exit_code == 0, result.output
    assert "SHADOW" in result.stdout
    assert "no decision yet" in result.stdout


def test_names_are_not_read_as_markup() -> None:
    overview = an_overview(1)
    overview["replicas"][0][0] = "[red]x[/nothing]"
    console = Console(markup=False, width=240, force_terminal=False)
    with console.capture() as captured:
        console.print(status_commands.shown(overview))
    assert "[red]x[/nothing]" in captured.get()


def test_status_as_json_is_what_the_gateway_answers(url: str) -> None:
    overview = an_overview(2)
    Gateway.answers.append((200, overview))
    assert json.loads(run("status", "--url", url, "--json").stdout) == overview


def test_watching_goes_on_until_it_is_interrupted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Gateway.answers.append((200, an_overview(2)))
    looks = iter((None, None))

    def sleep(_: float) -> None:
        if next(looks, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr("deployments.status_commands.time.sleep", sleep)
    assert run("status", "--url", url, "--watch").exit_code == 130
    assert len(Gateway.asked) == 3
    looks = iter((None,))
    assert len(run("status", "--url", url, "--watch", "--json").stdout.splitlines()) == 2


def a_request() -> dict[str, Any]:
    record = RequestRecord("tg-1", "/v1/completions", 1_000 * MS, tenant="acme", priority=Priority.BATCH, stream=True)
    first = record.sent("a1", 1_002 * MS)
    first.close(1_010 * MS, "reset")
    record.first_byte(record.sent("b2", 1_011 * MS), 1_040 * MS)
    record.split_code = "prefill_failed"
    record.status, record.prompt_tokens, record.output_tokens, record.usd = 200, 18, 64, 0.00002
    record.finish("succeeded", "ok", 1_900 * MS)
    recent = RecentRequests("g1")
    recent.put(record, Reason("prefix_hit", "predicted 30 ms, 16 of 18 prompt tokens cached"))
    return recent.show("tg-1")


def test_request_tells_where_it_went_and_why(url: str) -> None:
    Gateway.answers.append((200, a_request()))
    result = run("request", "tg-1", "--url", url)
    assert result.exit_code == 0, result.output
    for line in (
        "Request      tg-1 at /v1/completions, streamed",
        "Ended        succeeded: ok, status 200",
        "Went to      a1 (reset), then b2 (ok)",
        "Because      predicted 30 ms, 16 of 18 prompt tokens cached  [prefix_hit]",
        "Split        whole after all: the prefill replica failed",
        "Extra        2 attempts",
        "First token  40 ms = queue 0 ms + route 11 ms + engine 29 ms",
        "Tokens       18 prompt, of which unknown cached; 64 output",
        "Gateway      g1",
    ):
        assert line in result.stdout.splitlines()
    assert json.loads(run("request", "tg-1", "--url", url, "--json").stdout) == a_request()


def test_with_several_gateways_it_is_asked_for_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_commands, "LOOK_AGAIN_S", 0.0)
    Gateway.answers.extend([(404, NOT_HERE), (404, NOT_HERE), (200, a_request())])
    assert "Went to" in run("request", "tg-1", "--url", url).stdout
    assert len(Gateway.asked) == 3
    Gateway.answers[:] = [(404, NOT_HERE)]
    result = run("request", "tg-2", "--url", url)
    assert (result.exit_code, len(Gateway.asked)) == (1, 3 + status_commands.LOOKS)
    assert "does not have this request" in result.output
    Gateway.answers[:] = [(403, {"error": {"message": "This API key has not the scope."}})]
    assert "has not the scope" in run("request", "tg-2", "--url", url).output
    assert len(Gateway.asked) == 4 + status_commands.LOOKS


def test_what_is_no_id_is_not_asked_for(url: str) -> None:
    assert run("request", "a/b", "--url", url).exit_code == 1
    assert Gateway.asked == []
