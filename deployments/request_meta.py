"""What a request says about itself beside its body: class, deadline, task. Read from headers, checked, never guessed.

    x-tidegate-class: interactive | standard | batch
    x-tidegate-deadline-ms: 2500              the whole answer must be there this long after the request's arrival
    x-tidegate-task: order-4711               the user goal the request is a call of; or body ``metadata.task_id``
    x-tidegate-task-deadline-s: 120           limits of the task, from the arrival of its first call
    x-tidegate-task-calls-max: 40
    x-tidegate-task-tokens-max: 200000
    x-tidegate-task-outcome: success | failure    on its last call

Ids of tasks go into logs, errors and paths: :data:`TASK_ID` says what they may hold. A value that does not fit is a 400
that names its header; nothing is cut short, because two ids cut short may be one. It must not look anything up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from deployments.errors import GatewayError, bad_request
from policies.config import TenantConfig
from policies.tasks import NO_LIMITS, TaskBook, TaskLimits, TaskOutcome
from policies.types import Priority

TASK_CHARS_MAX = 128
TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:@=+-]{0,127}")
"""A whole id: it fits into a path segment, a log line and a header as it is."""
DEADLINE_MS_MAX = 86_400_000
TASK_DEADLINE_S_MAX = 30 * 86_400
TASK_CALLS_MAX = 1_000_000
TASK_TOKENS_MAX = 1_000_000_000_000
SHOWN_CHARS_MAX = 64
"""Of a wrong value in an error."""

_CLASS, _DEADLINE = b"x-tidegate-class", b"x-tidegate-deadline-ms"
_TASK, _OUTCOME = b"x-tidegate-task", b"x-tidegate-task-outcome"
_TASK_DEADLINE, _TASK_CALLS = b"x-tidegate-task-deadline-s", b"x-tidegate-task-calls-max"
_TASK_TOKENS = b"x-tidegate-task-tokens-max"
_OF_TASKS = (_TASK_DEADLINE, _TASK_CALLS, _TASK_TOKENS, _OUTCOME)

_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,32})?([eE][+-]?[0-9]{1,3})?")
_WHOLE = re.compile(r"[0-9]{1,15}")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]+")


@dataclass(frozen=True, slots=True)
class RequestMeta:
    """One request's own words. ``None`` and empty: it did not say."""

    priority: Priority | None = None
    deadline_ms: float | None = None
    """From the request's arrival."""
    task: str = ""
    limits: TaskLimits = NO_LIMITS
    outcome: TaskOutcome | None = None
    """Of its task, once this call has ended."""


NO_META = RequestMeta()


def parse_meta(headers: Mapping[bytes, bytes], metadata: object = None) -> RequestMeta:
    """Read ``headers`` (lower-case names) and the body's ``metadata``. The header's task goes before the body's.

    Raises:
        GatewayError: 400, a value is not what its header takes, or a limit or outcome names no task.
    """
    task = _task(headers, metadata)
    limits, outcome = NO_LIMITS, None
    if any(name in headers for name in _OF_TASKS):
        if not task:
            name = next(name for name in _OF_TASKS if name in headers).decode()
            raise bad_request(f"{name}: needs a task, named in x-tidegate-task or metadata.task_id.", name)
        limits = TaskLimits(
            calls_max=_whole(headers, _TASK_CALLS, TASK_CALLS_MAX),
            tokens_max=_whole(headers, _TASK_TOKENS, TASK_TOKENS_MAX),
            deadline_s=_number(headers, _TASK_DEADLINE, TASK_DEADLINE_S_MAX),
        )
        outcome = _outcome(headers)
    priority, deadline_ms = _priority(headers), _number(headers, _DEADLINE, DEADLINE_MS_MAX)
    if not task and priority is None and deadline_ms is None:
        return NO_META
    return RequestMeta(priority, deadline_ms, task, limits, outcome)


def priority_of(meta: RequestMeta, tenant: TenantConfig) -> Priority:
    """The class of a request of ``tenant``.

    Raises:
        GatewayError: 400, it asks for a more important class than the tenant may.
    """
    if meta.priority is None:
        return tenant.class_default
    if meta.priority.rank < tenant.class_max.rank:
        message = f"{_CLASS.decode()}: {meta.priority} is not allowed, the most important class is {tenant.class_max}."
        raise bad_request(message, _CLASS.decode(), "class_not_allowed")
    return meta.priority


def deadline_of(meta: RequestMeta, tenant: str, tasks: TaskBook, arrival_ns: int) -> int | None:
    """When the request's whole answer must be there: its own deadline or its task's, whichever is earlier."""
    own = None if meta.deadline_ms is None else arrival_ns + round(meta.deadline_ms * 1e6)
    if not meta.task:
        return own
    of_task = tasks.deadline_ns(tenant, meta.task, meta.limits, arrival_ns)
    return own if of_task is None else of_task if own is None else min(own, of_task)


def check_task_id(value: str, param: str) -> str:
    """``value`` when it is a task's id. Raises ``GatewayError`` 400 that names ``param``."""
    if TASK_ID.fullmatch(value):
        return value
    rule = f"1 to {TASK_CHARS_MAX} letters, digits or ._~:@=+- that begin with a letter or digit"
    raise bad_request(f"{param}: must be {rule}.", param, "invalid_task")


def _task(headers: Mapping[bytes, bytes], metadata: object) -> str:
    value = headers.get(_TASK)
    if value is not None:
        return check_task_id(_text(value), _TASK.decode())
    if not isinstance(metadata, dict) or metadata.get("task_id") is None:
        return ""
    task = metadata["task_id"]
    if not isinstance(task, str):
        raise bad_request("metadata.task_id: must be a string.", "metadata.task_id", "invalid_type")
    return check_task_id(task, "metadata.task_id")


def _priority(headers: Mapping[bytes, bytes]) -> Priority | None:
    value = headers.get(_CLASS)
    if value is None:
        return None
    try:
        return Priority(_text(value).lower())
    except ValueError:
        raise _wrong(_CLASS, value, "one of " + ", ".join(Priority)) from None


def _outcome(headers: Mapping[bytes, bytes]) -> TaskOutcome | None:
    value = headers.get(_OUTCOME)
    if value is None:
        return None
    try:
        return TaskOutcome(_text(value).lower())
    except ValueError:
        raise _wrong(_OUTCOME, value, "success or failure") from None


def _whole(headers: Mapping[bytes, bytes], name: bytes, highest: int) -> int | None:
    value = headers.get(name)
    if value is None:
        return None
    text = _text(value)
    if not _WHOLE.fullmatch(text) or not 1 <= int(text) <= highest:
        raise _wrong(name, value, f"a whole number in 1..{highest}")
    return int(text)


def _number(headers: Mapping[bytes, bytes], name: bytes, highest: int) -> float | None:
    value = headers.get(name)
    if value is None:
        return None
    text = _text(value)
    if not _NUMBER.fullmatch(text) or not 0 < float(text) <= highest:
        raise _wrong(name, value, f"a number above 0, at most {highest}")
    return float(text)


def _text(value: bytes) -> str:
    return value.strip(b" \t").decode("latin-1")


def _wrong(name: bytes, value: bytes, rule: str) -> GatewayError:
    shown = _UNPRINTABLE.sub("?", _text(value[: SHOWN_CHARS_MAX * 2]))[:SHOWN_CHARS_MAX]
    return bad_request(f"{name.decode()}: must be {rule}, is '{shown}'.", name.decode(), "invalid_header")
