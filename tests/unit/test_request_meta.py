"""Headers of class, deadline and task: read, checked, and refused with the header's name."""

from __future__ import annotations

import pytest

from deployments.errors import GatewayError
from deployments.request_meta import NO_META, TASK_CHARS_MAX, RequestMeta, deadline_of, parse_meta, priority_of
from policies.config import TasksConfig, TenantConfig
from policies.tasks import TaskBook, TaskLimits, TaskOutcome
from policies.types import Priority


def test_a_request_that_says_nothing_costs_nothing() -> None:
    assert parse_meta({b"content-type": b"application/json"}) is NO_META
    assert parse_meta({}, {"user": "x"}) is NO_META


def test_every_header_is_read() -> None:
    meta = parse_meta(
        {
            b"x-tidegate-class": b" Batch ",
            b"x-tidegate-deadline-ms": b"2500.5",
            b"x-tidegate-task": b"order-4711",
            b"x-tidegate-task-deadline-s": b"120",
            b"x-tidegate-task-calls-max": b"40",
            b"x-tidegate-task-tokens-max": b"200000",
            b"x-tidegate-task-outcome": b"success",
        }
    )
    limits = TaskLimits(calls_max=40, tokens_max=200_000, deadline_s=120.0)
    assert meta == RequestMeta(Priority.BATCH, 2500.5, "order-4711", limits, TaskOutcome.SUCCESS)


def test_a_task_in_the_body_counts_and_the_header_goes_before_it() -> None:
    assert parse_meta({}, {"task_id": "from-body"}).task == "from-body"
    assert parse_meta({b"x-tidegate-task": b"from-header"}, {"task_id": "from-body"}).task == "from-header"


@pytest.mark.parametrize("metadata", [None, [], "task_id", 3, {"task_id": None}])
def test_a_body_whose_metadata_names_no_task_is_left_alone(metadata: object) -> None:
    assert parse_meta({}, metadata) is NO_META


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-tidegate-class", b"urgent"),
        ("x-tidegate-class", b""),
        ("x-tidegate-deadline-ms", b"0"),
        ("x-tidegate-deadline-ms", b"-1"),
        ("x-tidegate-deadline-ms", b"nan"),
        ("x-tidegate-deadline-ms", b"1e999"),
        ("x-tidegate-deadline-ms", b"1_000"),
        ("x-tidegate-deadline-ms", b"86400001"),
        ("x-tidegate-deadline-ms", "²".encode("latin-1")),
        ("x-tidegate-task", b""),
        ("x-tidegate-task", b"a b"),
        ("x-tidegate-task", b"a/b"),
        ("x-tidegate-task", b".."),
        ("x-tidegate-task", b"a\nb"),
        ("x-tidegate-task", b"\xff"),
        ("x-tidegate-task", b"x" * (TASK_CHARS_MAX + 1)),
        ("x-tidegate-task-calls-max", b"0"),
        ("x-tidegate-task-calls-max", b"1.5"),
        ("x-tidegate-task-calls-max", b"9" * 400),
        ("x-tidegate-task-tokens-max", b"many"),
        ("x-tidegate-task-deadline-s", b"inf"),
        ("x-tidegate-task-outcome", b"maybe"),
    ],
)
def test_a_wrong_value_is_a_400_that_names_its_header(name: str, value: bytes) -> None:
    headers = {b"x-tidegate-task": b"t", name.encode(): value}
    with pytest.raises(GatewayError) as refused:
        parse_meta(headers)
    assert (refused.value.status, refused.value.param) == (400, name)
    assert len(refused.value.message) < 300
    assert refused.value.message.isascii()
    assert refused.value.message.isprintable()


def test_the_longest_id_is_taken_whole() -> None:
    longest = b"x" * TASK_CHARS_MAX
    assert parse_meta({b"x-tidegate-task": longest}).task == longest.decode()


@pytest.mark.parametrize("task", [7, ["a"], {"a": 1}, True, "a b", "é", ""])
def test_a_wrong_task_in_the_body_is_a_400_that_names_its_field(task: object) -> None:
    with pytest.raises(GatewayError) as refused:
        parse_meta({}, {"task_id": task})
    assert (refused.value.status, refused.value.param) == (400, "metadata.task_id")


@pytest.mark.parametrize(
    "name",
    [
        "x-tidegate-task-deadline-s",
        "x-tidegate-task-calls-max",
        "x-tidegate-task-tokens-max",
        "x-tidegate-task-outcome",
    ],
)
def test_a_limit_or_outcome_without_a_task_is_refused(name: str) -> None:
    with pytest.raises(GatewayError) as refused:
        parse_meta({name.encode(): b"5"})
    assert (refused.value.status, refused.value.param) == (400, name)


def test_a_request_without_a_class_has_its_tenants() -> None:
    assert priority_of(NO_META, TenantConfig(class_default=Priority.BATCH)) is Priority.BATCH


def test_a_class_above_the_tenants_is_refused() -> None:
    tenant = TenantConfig(class_max=Priority.STANDARD)
    assert priority_of(RequestMeta(Priority.BATCH), tenant) is Priority.BATCH
    with pytest.raises(GatewayError) as refused:
        priority_of(RequestMeta(Priority.INTERACTIVE), tenant)
    assert (refused.value.status, refused.value.code) == (400, "class_not_allowed")


def test_the_earlier_deadline_of_request_and_task_counts() -> None:
    tasks = TaskBook(TasksConfig())
    arrival_ns = 1_000_000_000
    limits = TaskLimits(deadline_s=2.0)
    assert deadline_of(NO_META, "a", tasks, arrival_ns) is None
    assert deadline_of(RequestMeta(deadline_ms=500.0), "a", tasks, arrival_ns) == 1_500_000_000
    assert deadline_of(RequestMeta(task="t", limits=limits), "a", tasks, arrival_ns) == 3_000_000_000
    assert deadline_of(RequestMeta(None, 2_500.0, "t", limits), "a", tasks, arrival_ns) == 3_000_000_000
    assert deadline_of(RequestMeta(None, 500.0, "t", limits), "a", tasks, arrival_ns) == 1_500_000_000
