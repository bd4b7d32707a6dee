"""Tasks over HTTP: a tenant sees its own, outcomes are told once, and nothing a client sends is a 500."""

from __future__ import annotations

import msgspec
import pytest

from deployments.endpoints import allowed_methods, label_of, scope_needed
from deployments.errors import GatewayError
from deployments.keys import CONTROL_READ, INFERENCE
from deployments.task_api import show, summary, tell
from policies.config import TasksConfig
from policies.tasks import NO_LIMITS, TaskBook, TaskLimits

SUCCESS = b'{"outcome": "success"}'
TASK = "/v1/tasks/t1"
OUTCOME = "/v1/tasks/t1/outcome"


def with_one_call(limits: TaskLimits = NO_LIMITS) -> TaskBook:
    tasks = TaskBook(TasksConfig())
    assert tasks.call("a", "t1", limits, 50, 0) is None
    tasks.ended(
        "a",
        "t1",
        tokens_expected=50,
        tokens=40,
        usd=0.25,
        replica_id="r1",
        succeeded=True,
        e2e_ms=3.0,
        now_ns=4_000_000,
    )
    return tasks


def test_a_task_shows_what_it_used_and_what_it_may() -> None:
    shown = show(with_one_call(TaskLimits(calls_max=9, deadline_s=60.0)), "a", TASK, 10_000_000)
    assert shown == {
        "id": "t1",
        "object": "task",
        "status": "open",
        "stopped": False,
        "calls": {"total": 1, "open": 0, "succeeded": 1, "failed": 0},
        "tokens": 40,
        "usd": 0.25,
        "age_ms": 10.0,
        "e2e_ms": 4.0,
        "busy_ms": 3.0,
        "limits": {"calls_max": 9, "tokens_max": None, "deadline_s": 60.0},
    }
    assert "r1" not in msgspec.json.encode(shown).decode()


def test_an_outcome_is_told_once_and_may_be_repeated() -> None:
    tasks = with_one_call()
    assert tell(tasks, "a", OUTCOME, SUCCESS, 0)["status"] == "success"
    assert tell(tasks, "a", OUTCOME, SUCCESS, 0)["status"] == "success"
    with pytest.raises(GatewayError) as refused:
        tell(tasks, "a", OUTCOME, b'{"outcome": "failure"}', 0)
    assert (refused.value.status, refused.value.code) == (409, "task_ended")


def test_another_tenants_task_does_not_exist() -> None:
    tasks = with_one_call()
    with pytest.raises(GatewayError) as unseen:
        show(tasks, "b", TASK, 0)
    with pytest.raises(GatewayError) as untold:
        tell(tasks, "b", OUTCOME, SUCCESS, 0)
    for refused in (unseen.value, untold.value):
        assert (refused.status, refused.code) == (404, "task_not_found")
    assert show(tasks, "a", TASK, 0)["status"] == "open"


def test_operators_see_what_became_of_all_tasks() -> None:
    tasks = with_one_call()
    assert summary(tasks, 0)["successes_per_usd"] is None
    tell(tasks, "a", OUTCOME, SUCCESS, 0)
    seen = summary(tasks, 0)
    assert (seen["open_tasks"], seen["open_calls"], seen["successes_per_usd"]) == (0, 0, 4.0)
    assert seen["ended"]["success"] == {"tasks": 1, "calls": 1, "tokens": 40, "usd": 0.25, "e2e_ms_mean": 4.0}
    assert seen["ended"]["stopped"]["e2e_ms_mean"] is None
    assert scope_needed("/control/tasks", "GET") == CONTROL_READ


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 4_000,
        b"{}",
        b'{"outcome": null}',
        b'{"outcome": 1}',
        b'{"outcome": ["success"]}',
        b'{"outcome": "Success"}',
        b'{"outcome": "unknown"}',
    ],
)
def test_a_body_that_tells_no_outcome_is_a_400(body: bytes) -> None:
    tasks = with_one_call()
    with pytest.raises(GatewayError) as refused:
        tell(tasks, "a", OUTCOME, body, 0)
    assert refused.value.status == 400
    assert show(tasks, "a", TASK, 0)["status"] == "open"


@pytest.mark.parametrize("task", ["..", "%2e", "a b", "x" * 129, "é", "-a"])
def test_a_path_that_holds_no_id_is_a_400(task: str) -> None:
    with pytest.raises(GatewayError) as refused:
        show(TaskBook(TasksConfig()), "a", f"/v1/tasks/{task}", 0)
    assert (refused.value.status, refused.value.code) == (400, "invalid_task")


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        (TASK, ("GET", "HEAD", "OPTIONS")),
        (OUTCOME, ("POST", "OPTIONS")),
        ("/v1/tasks/outcome", ("GET", "HEAD", "OPTIONS")),
        ("/v1/tasks", ()),
        ("/v1/tasks/", ()),
        ("/v1/tasks//outcome", ()),
        ("/v1/tasks/t1/other", ()),
        ("/v1/tasks/t1/outcome/x", ()),
    ],
)
def test_only_these_paths_exist(path: str, methods: tuple[str, ...]) -> None:
    assert allowed_methods(path) == methods


def test_metrics_and_logs_name_tasks_without_their_ids() -> None:
    assert {label_of(TASK), label_of(OUTCOME)} == {"/v1/tasks/{id}"}
    assert label_of("/v1/tasks/t1/other") == "unknown"
    assert label_of("/v1/models") == "/v1/models"


def test_tasks_need_the_scope_of_the_api() -> None:
    assert scope_needed(TASK, "GET") == INFERENCE
    assert scope_needed(OUTCOME, "POST") == INFERENCE
