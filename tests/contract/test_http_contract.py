"""The emulated engine and real vLLM answer the same HTTP cases alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import loopback
from tests.contract.cases import CASES, Case
from tests.contract.conftest import MODEL_NAME
from tests.contract.record import TIMEOUT_S, ask_shape

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "vllm_0_29_0.json").read_text())
NAMES = [case.name for case in CASES]


@pytest.fixture(scope="session")
def emulated(emulated_url: str) -> Iterator[httpx.Client]:
    with loopback.Client(base_url=emulated_url, timeout=TIMEOUT_S) as client:
        yield client


@pytest.fixture(scope="module")
def vllm(vllm_url: str) -> Iterator[httpx.Client]:
    with loopback.Client(base_url=vllm_url, timeout=TIMEOUT_S) as client:
        yield client


def test_every_case_has_a_name_of_its_own_and_a_record() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert set(NAMES) == set(RECORDED)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_emulated_engine_answers_as_vllm_was_recorded(emulated: httpx.Client, case: Case) -> None:
    assert ask_shape(emulated, case, MODEL_NAME) == RECORDED[case.name]


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_vllm_still_answers_as_recorded(vllm: httpx.Client, case: Case) -> None:
    assert ask_shape(vllm, case, MODEL_NAME) == RECORDED[case.name]


def test_comparison_sees_a_missing_key_a_changed_kind_and_a_changed_status(emulated: httpx.Client) -> None:
    case = next(c for c in CASES if c.name == "chat-plain")
    shape = ask_shape(emulated, case, MODEL_NAME)
    without_usage = {**shape, "json": {k: v for k, v in shape["json"].items() if k != "usage"}}
    other_kind = {**shape, "json": {**shape["json"], "created": "str"}}
    for wrong in (without_usage, other_kind, {**shape, "status": 201}):
        assert wrong != RECORDED["chat-plain"]
