"""Tasks over HTTP: a client sees its own tasks and tells how they ended.

    GET  /v1/tasks/<id>            calls, tokens, cost, times and limits so far
    POST /v1/tasks/<id>/outcome    {"outcome": "success" | "failure"}, once; the same again changes nothing
    GET  /control/tasks            what became of all tasks, for operators

A gateway knows the tasks whose calls it served. It must not show one tenant's tasks to another: it answers 404.
"""

from __future__ import annotations

from typing import Any

import msgspec

from deployments.endpoints import TASK_OUTCOME_SUFFIX, TASK_PREFIX
from deployments.errors import GatewayError, bad_request
from deployments.request_meta import check_task_id
from policies.tasks import TaskBook, TaskOutcome, TaskView


def show(tasks: TaskBook, tenant: str, path: str, now_ns: int) -> dict[str, Any]:
    """The task that ``path`` names. Raises ``GatewayError`` 400 for what is no id, 404 for a task not known."""
    task = check_task_id(path.removeprefix(TASK_PREFIX), "task")
    view = tasks.get(tenant, task, now_ns)
    if view is None:
        raise _not_found(task)
    return _object(view)


def tell(tasks: TaskBook, tenant: str, path: str, body: bytes, now_ns: int) -> dict[str, Any]:
    """Note the outcome in ``body``; the task as it is then.

    Raises:
        GatewayError: 400 for another body, 404 for a task not known, 409 for one that ended otherwise.
    """
    task = check_task_id(path.removeprefix(TASK_PREFIX).removesuffix(TASK_OUTCOME_SUFFIX), "task")
    refusal = tasks.outcome(tenant, task, _outcome(body), now_ns)
    if refusal is not None and refusal.status != 404:
        raise GatewayError(refusal.status, refusal.type, refusal.code, refusal.text.capitalize() + ".", "outcome")
    view = tasks.get(tenant, task, now_ns)
    if view is None:
        raise _not_found(task)
    return _object(view)


def summary(tasks: TaskBook, now_ns: int) -> dict[str, Any]:
    """What became of all tasks this gateway counted since it started, by ending."""
    tasks.expire(now_ns)
    successes_per_usd = tasks.successes_per_usd()
    return {
        "open_tasks": tasks.open_tasks,
        "open_calls": tasks.open_calls,
        "successes_per_usd": None if successes_per_usd is None else round(successes_per_usd, 6),
        "ended": {
            ending.value: {
                "tasks": total.tasks,
                "calls": total.calls,
                "tokens": total.tokens,
                "usd": round(total.usd, 9),
                "e2e_ms_mean": round(total.e2e_ms / total.tasks, 3) if total.tasks else None,
            }
            for ending, total in tasks.totals.items()
        },
    }


def _outcome(body: bytes) -> TaskOutcome:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise bad_request("The request body is not valid JSON.", code="invalid_json") from None
    value = fields.get("outcome") if isinstance(fields, dict) else None
    if not isinstance(value, str) or value not in set(TaskOutcome):
        raise bad_request("outcome: must be success or failure.", "outcome")
    return TaskOutcome(value)


def _object(view: TaskView) -> dict[str, Any]:
    counts, limits = view.counts, view.limits
    return {
        "id": view.task,
        "object": "task",
        "status": "open" if view.outcome is None else view.outcome.value,
        "stopped": view.stopped,
        "calls": {
            "total": counts.calls,
            "open": counts.calls_open,
            "succeeded": counts.succeeded,
            "failed": counts.failed,
        },
        "tokens": counts.tokens,
        "usd": round(counts.usd, 9),
        "age_ms": round(view.age_ms, 3),
        "e2e_ms": round(view.e2e_ms, 3),
        "busy_ms": round(counts.busy_ms, 3),
        "limits": {
            "calls_max": limits.calls_max,
            "tokens_max": limits.tokens_max,
            "deadline_s": limits.deadline_s,
        },
    }


def _not_found(task: str) -> GatewayError:
    message = f"The task `{task}` has had no call here, or none for too long."
    return GatewayError(404, "invalid_request_error", "task_not_found", message, "task")
