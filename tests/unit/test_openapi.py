"""The OpenAPI description: valid, of what the gateway answers and of nothing else."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from jsonschema_rs import Draft202012Validator, meta

from deployments import api_reference
from deployments.endpoints import (
    MODEL_PREFIX,
    OVERRIDE_PREFIX,
    OWN,
    RELAYED,
    REQUEST_PREFIX,
    TASK_OUTCOME_SUFFIX,
    TASK_PREFIX,
    Dialect,
    allowed_methods,
)
from deployments.errors import bad_request, error_answer
from deployments.openapi import OUTCOME, REQUEST_HEADERS, TASK, VERSION, describe
from deployments.request_meta import TASK_ID
from policies.tasks import TaskOutcome
from policies.types import Priority

MODEL = "some-model"
USER: Any = [{"role": "user", "content": "Name a river."}]
GOOD: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"messages": USER}, {"messages": USER, "max_tokens": 5, "stream": True, "tools": []}],
    "/v1/completions": [{"prompt": "a"}, {"prompt": [1, 2]}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}],
    "/v1/responses": [{"input": "a"}, {"input": USER}],
    "/v1/messages": [{"messages": USER, "max_tokens": 5}],
    "/v1/messages/count_tokens": [{"messages": USER}],
    "/v1/embeddings": [{"input": "a"}, {"input": ["a", "b"]}],
    "/tokenize": [{"prompt": "a"}, {"messages": USER}],
    "/detokenize": [{"tokens": [1, 2]}],
}


@pytest.fixture(scope="module")
def document() -> Any:
    return json.loads(describe(MODEL, keys_needed=True))


def body_validator(document: Any, path: str) -> Draft202012Validator:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    meta.validate(schema)
    return Draft202012Validator(schema)


@pytest.mark.slow
def test_the_description_is_valid_openapi(document: Any) -> None:
    schemathesis.openapi.from_dict(document).validate()


def test_it_describes_each_path_and_method_that_is_answered_and_no_other(document: Any) -> None:
    answered = {path: allowed_methods(path) for path in (*RELAYED, *OWN)}
    answered[MODEL_PREFIX + "{model}"] = allowed_methods(MODEL_PREFIX + MODEL)
    answered["/v1/tasks/{task}"] = allowed_methods("/v1/tasks/t")
    answered["/v1/tasks/{task}/outcome"] = allowed_methods("/v1/tasks/t/outcome")
    answered[OVERRIDE_PREFIX + "{override}"] = allowed_methods(OVERRIDE_PREFIX + "x")
    answered[REQUEST_PREFIX + "{request}"] = allowed_methods(REQUEST_PREFIX + "x")
    answered[TASK_PREFIX + "{task}"] = allowed_methods(TASK_PREFIX + "goal")
    answered[TASK_PREFIX + "{task}" + TASK_OUTCOME_SUFFIX] = allowed_methods(TASK_PREFIX + "goal" + TASK_OUTCOME_SUFFIX)
    described = {
        path: {method.upper() for method in operations if method != "parameters"}
        for path, operations in document["paths"].items()
    }
    assert described == {path: set(methods) for path, methods in answered.items()}


@pytest.mark.parametrize("path", sorted(RELAYED))
def test_bodies_that_are_good_fit_and_those_without_model_or_prompt_do_not(document: Any, path: str) -> None:
    check = body_validator(document, path)
    for body in GOOD[path]:
        assert check.is_valid({"model": MODEL, **body})
    assert not check.is_valid({"model": MODEL})
    assert not check.is_valid({"model": "other", **GOOD[path][0]})
    assert check.is_valid(GOOD[path][0]) is RELAYED[path].model_optional


def test_errors_as_they_are_written_fit_the_schema_of_each_path(document: Any) -> None:
    error = bad_request("n: must be above 0.", "n")
    for path, endpoint in RELAYED.items():
        content = document["paths"][path]["post"]["responses"]["default"]["content"]
        name = content["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        check = Draft202012Validator(document["components"]["schemas"][name])
        written = json.loads(error_answer(error, endpoint.dialect).body)
        assert check.is_valid(written)
        assert check.is_valid({"error": {"message": "x"}}) is False
        assert (name == "AnthropicError") is (endpoint.dialect is Dialect.ANTHROPIC)


def test_keys_are_told_where_they_are_needed_only(document: Any) -> None:
    assert document["security"] == [{"bearer": []}, {"key": []}]
    assert document["components"]["securitySchemes"]["key"]["name"] == "x-api-key"
    free = json.loads(describe(MODEL, keys_needed=False))
    assert "security" not in free
    assert "securitySchemes" not in free["components"]


def test_operations_have_ids_of_their_own(document: Any) -> None:
    ids = [
        operation["operationId"]
        for operations in document["paths"].values()
        for method, operation in operations.items()
        if method != "parameters"
    ]
    assert len(ids) == len(set(ids))


def test_values_of_headers_and_outcomes_are_those_that_are_read() -> None:
    headers = {name: schema for name, schema, _ in REQUEST_HEADERS}
    assert headers["x-tidegate-class"]["enum"] == list(Priority)
    assert f"^{TASK_ID.pattern}$" == TASK
    assert OUTCOME["properties"]["outcome"]["enum"] == list(TaskOutcome)


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == VERSION


def test_the_page_of_the_api_is_what_the_description_says() -> None:
    assert api_reference.FILE.read_text(encoding="utf-8") == api_reference.text(), (
        "run: .venv/bin/python -m deployments.api_reference"
    )
    assert "Scope `control:write`" in api_reference.text().partition("## POST /control/overrides")[2][:200]
