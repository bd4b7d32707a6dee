"""Idle replicas that look slow are tried again now and then, all others keep their order."""

from __future__ import annotations

from policies.config import ObjectivesConfig
from policies.routing.board import Board
from policies.routing.explore import IDLE_S, Explorer
from policies.routing.predict import Standing
from policies.types import Reason, Request, RouteChoice, StepCoefficients

SECOND = 1_000_000_000
REQUEST = Request("r", "m", "/v1/completions", "t", 100, 10, (), 64, True, 0)
CHOICE = RouteChoice((("quick",), ("slow",)), Reason("least_ttft", "because"), {"quick": 20.0, "slow": 90.0}, {})


def board(slow_factor: float = 4.0, slow_requests: int = 0) -> Board:
    made = Board()
    for name, factor, requests in (("quick", 1.0, 2), ("slow", slow_factor, slow_requests)):
        step = StepCoefficients(10.0 * factor, 0.1 * factor, 0.0, 0.1 * factor, 100)
        made.put(name, Standing(requests, 0, 0, 16, 100_000, 2_048, step))
    return made


def firsts(seconds: int, board_: Board, explorer: Explorer, request: Request = REQUEST) -> list[int]:
    """Seconds at which the slow one comes first."""
    return [s for s in range(seconds) if explorer.with_trial(CHOICE, request, board_, s * SECOND).order[0] == "slow"]


def test_idle_replica_that_looks_slow_is_tried_once_in_a_while() -> None:
    assert firsts(100, board(), Explorer(ObjectivesConfig())) == [IDLE_S, 2 * IDLE_S, 3 * IDLE_S]


def test_trial_says_why_and_keeps_the_others_behind() -> None:
    explorer = Explorer(ObjectivesConfig())
    firsts(30, board(), explorer)
    choice = explorer.with_trial(CHOICE, REQUEST, board(), 30 * SECOND)
    assert choice.order == ["slow", "quick"]
    assert choice.reason.code == "trial"
    assert choice.predicted_ttft_ms["slow"] == board().standings["slow"].ttft_ms(100)


def test_replica_as_quick_as_others_is_left_idle() -> None:
    assert firsts(100, board(slow_factor=1.2), Explorer(ObjectivesConfig())) == []


def test_busy_replica_needs_no_trial() -> None:
    assert firsts(100, board(slow_requests=1), Explorer(ObjectivesConfig())) == []


def test_request_it_would_serve_late_is_not_risked() -> None:
    assert firsts(100, board(), Explorer(ObjectivesConfig(ttft_ms=100))) == []


def test_replicas_that_left_are_forgotten() -> None:
    explorer, both = Explorer(ObjectivesConfig()), board()
    firsts(5, both, explorer)
    both.put("slow", None)
    firsts(5, both, explorer)
    explorer.with_trial(CHOICE, REQUEST, both, 60 * SECOND)
    assert set(explorer._busy_ns) == {"quick"}
