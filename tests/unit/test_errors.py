"""Errors: one shape for all, true messages, and nothing of an engine's insides in them."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from deployments.endpoints import Dialect
from deployments.errors import (
    MESSAGE_CHARS_MAX,
    GatewayError,
    bad_request,
    engine_error,
    error_answer,
    error_event,
)

JSON = "application/json"
PYDANTIC = (
    "2 validation errors:\n"
    "  {'type': 'missing', 'loc': ('body', 'messages'), 'msg': 'Field required', 'input': {'key': 'SECRET'}}\n"
    "  {'type': 'int_parsing', 'loc': ('body', 'function-wrap[__log__()]', 'max_tokens'), "
    "'msg': \"Input should be a 'valid' integer\", 'input': 'many', 'url': 'https://errors.pydantic.dev/2/v'}"
)


def body_of(error: GatewayError, dialect: Dialect = Dialect.OPENAI) -> Any:
    return json.loads(error_answer(error, dialect).body)


def from_engine(status: int, body: Any, content_type: str = JSON) -> GatewayError:
    return engine_error(status, content_type, body if isinstance(body, bytes) else json.dumps(body).encode())


def test_shape_is_always_openais_four_fields() -> None:
    assert body_of(bad_request("no", "stream")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "stream", "code": None}
    }


def test_anthropics_clients_get_their_shape_too() -> None:
    body = body_of(bad_request("no"), Dialect.ANTHROPIC)
    assert body["type"] == "error"
    assert {"type", "message"} <= body["error"].keys()


@pytest.mark.parametrize(("seconds", "header"), [(0.2, b"1"), (1, b"1"), (1.01, b"2"), (30, b"30")])
def test_retry_after_is_whole_seconds_rounded_up(seconds: float, header: bytes) -> None:
    answer = error_answer(GatewayError(429, "rate_limit_error", "overloaded", "busy", None, seconds))
    assert dict(answer.headers)[b"retry-after"] == header


def test_no_retry_after_unless_asked() -> None:
    assert error_answer(bad_request("no")).headers == ()


def test_stream_events_name_themselves_where_their_clients_want_it() -> None:
    error = GatewayError(502, "server_error", "stream_broken", "broken")
    plain = error_event(error)
    assert plain.startswith(b'data: {"error":{')
    assert plain.endswith(b"}\n\n")
    assert b"[DONE]" not in plain
    for dialect in (Dialect.ANTHROPIC, Dialect.RESPONSES):
        event = error_event(error, dialect)
        assert event.startswith(b"event: error\ndata: ")
        assert json.loads(event.split(b"data: ", 1)[1])["type"] == "error"


def test_errors_pickle_whole() -> None:
    error = GatewayError(429, "rate_limit_error", "overloaded", "busy", "p", 2.0)
    copy = pickle.loads(pickle.dumps(error))
    assert vars(copy) == vars(error)
    assert "429" in str(copy)


# --- an engine's own errors -------------------------------------------------------------------------------------------


def test_an_engines_error_object_is_kept_and_its_names_become_openais() -> None:
    message = "temperature must be non-negative, got -1.0."
    theirs = {"message": message, "type": "BadRequestError", "param": "temperature", "code": 400}
    error = from_engine(400, {"error": theirs})
    assert (error.status, error.type, error.param, error.code) == (400, "invalid_request_error", "temperature", None)
    assert error.message == message


def test_unknown_model_has_its_code() -> None:
    error = from_engine(
        404, {"error": {"message": "The model `x` does not exist.", "type": "NotFoundError", "code": 404}}
    )
    assert (error.status, error.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 2048 tokens. However, you requested 9000.",
        "longer than the maximum model length of 8",
    ],
)
def test_too_long_a_context_has_its_code(message: str) -> None:
    assert from_engine(400, {"error": {"message": message, "code": 400}}).code == "context_length_exceeded"


def test_validation_errors_printed_as_python_become_words() -> None:
    error = from_engine(
        400, {"error": {"message": PYDANTIC, "type": "Bad Request", "param": "body.messages", "code": 400}}
    )
    assert error.message == "messages: Field required; max_tokens: Input should be a 'valid' integer"
    assert error.param == "messages"
    assert "SECRET" not in error.message


def test_validation_errors_that_cannot_be_read_are_not_shown() -> None:
    assert from_engine(400, {"error": {"message": "1 validation error:\n  {'odd': 1}"}}).message == (
        "The request body is not valid."
    )


def test_a_unions_class_names_and_repeats_go() -> None:
    entries = "".join(
        f"  {{'type': 'missing', 'loc': ('body', 'messages', 0, '{name}', 'content'), 'msg': 'Field required'}}\n"
        for name in ("ChatCompletionDeveloperMessageParam", "ChatCompletionSystemMessageParam")
    )
    error = from_engine(400, {"error": {"message": "2 validation errors:\n" + entries}})
    assert error.message == "messages.0.content: Field required"


@pytest.mark.parametrize(
    ("status", "body", "content_type", "message"),
    [
        (404, {"detail": "No such thing"}, JSON, "No such thing"),
        (404, {"detail": "Not Found"}, JSON, "The engine has no such endpoint for this model."),
        (405, {"detail": "Method Not Allowed"}, JSON, "Method Not Allowed"),
        (400, {"error": "plain string"}, JSON, "plain string"),
        (400, {"message": "old shape", "object": "error"}, JSON, "old shape"),
        (400, b"just text\n", "text/plain", "just text"),
        (400, b"<html><body>nginx</body></html>", "text/html", "The engine refused the request (status 400)."),
        (503, b"", "", "The engine failed while it handled the request (status 503)."),
        (500, b"Internal Server Error", "text/plain", "Internal Server Error"),
        (400, [1, 2], JSON, "The engine refused the request (status 400)."),
        (400, {"error": {"message": 5}}, JSON, "The engine refused the request (status 400)."),
        (400, {"error": None}, JSON, "The engine refused the request (status 400)."),
        (400, b"[" * 100_000, JSON, "[" * MESSAGE_CHARS_MAX + "..."),
    ],
)  # fmt: skip
def test_other_bodies_become_a_message(status: int, body: Any, content_type: str, message: str) -> None:
    assert from_engine(status, body, content_type).message == message


def test_a_bare_422_is_a_400_with_its_path() -> None:
    detail = [{"loc": ["body", "messages", 0, "role"], "msg": "Value error, no such role", "input": "SECRET"}]
    error = from_engine(422, {"detail": detail})
    assert (error.status, error.message, error.param) == (400, "messages.0.role: no such role", "messages.0.role")


@pytest.mark.parametrize(
    "leak",
    [
        'Traceback (most recent call last):\n  File "/srv/x.py", line 1, in f\nValueError: no',
        "bad value <vllm.config.Config object at 0x7f12>",
        "expected <class 'int'>",
    ],
)
def test_tracebacks_and_reprs_never_pass(leak: str) -> None:
    for body in ({"error": {"message": leak}}, {"detail": leak}, leak.encode()):
        error = from_engine(500, body)
        assert error.message == "The engine failed while it handled the request (status 500)."


def test_an_engines_500_is_the_gateways_502() -> None:
    error = from_engine(500, {"error": {"message": "EngineCore failed", "type": "InternalServerError", "code": 500}})
    assert (error.status, error.type, error.code) == (502, "server_error", "engine_error")


def test_messages_are_capped() -> None:
    assert len(from_engine(400, {"error": {"message": "x" * 100_000}}).message) == MESSAGE_CHARS_MAX + 3


@pytest.mark.timeout(20)
@pytest.mark.parametrize("opening", ["'loc': (", "'loc': (), 'msg': '", "'loc': (), 'msg': \"", 'File "', "<a"])
def test_what_a_client_had_repeated_does_not_keep_the_reader_busy(opening: str) -> None:
    """Engines repeat the client's own input; 200,000 characters of it took a minute."""
    message = "1 validation error:\n" + opening * (200_000 // len(opening))
    assert from_engine(400, {"error": {"message": message}}).status == 400
