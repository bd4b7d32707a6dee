"""Requests drawn from the OpenAPI description, good ones and broken ones: every answer is one the description names."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from deployments.openapi import describe
from tests.serve.fuzz.conftest import Target
from tests.serve.gateway.conftest import MODEL

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    unsupported_method,
]
EXAMPLES = 40
"""Drawn for each operation, after those that walk along the bounds of its schema."""

described = schemathesis.openapi.from_dict(json.loads(describe(MODEL, keys_needed=False)))


def test_the_description_served_is_the_one_that_is_tested(target: Target, client: httpx.Client) -> None:
    answer = client.get("/openapi.json")
    assert answer.content == describe(MODEL, keys_needed=False)
    assert answer.headers["content-type"] == "application/json"


@described.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_as_described(target: Target, case: Any) -> None:
    case.call_and_validate(base_url=target.system.url, checks=CHECKS, timeout=30)
