from __future__ import annotations

import math
from typing import Any

import pytest

from deployments.emulation.faults import FaultBoard
from deployments.emulation.signals import Signals
from policies.types import Histogram, Knobs, Plan, ReplicaReport, ReplicaState, StepCoefficients


def report(seq: int) -> ReplicaReport:
    return ReplicaReport(
        replica_id="r", model="m", seq=seq, window_ms=1_000, state=ReplicaState.READY, running=1, waiting=0,
        http_inflight=1, kv_tokens_used=16, kv_tokens_max=32, prefill_tokens=0, decode_tokens=1, prefix_query_tokens=0,
        prefix_hit_tokens=0, preemptions=0, steps=1, busy_share=0.5, gpu_utilisation_share=None, itl=Histogram(),
        step_model=StepCoefficients(1, 2, 3, 4, 5), knobs=Knobs(), running_seqs_hard=1, step_tokens_hard=16, finished=0,
        aborted=0, cold_start_ms=None,
    )  # fmt: skip


def test_samples_are_true_gone_frozen_or_not_numbers() -> None:
    board = FaultBoard()
    signals = Signals(board)
    assert signals.sample("a", {"seq": 1, "x": 0.5}) == {"seq": 1, "x": 0.5}
    board.change({"signals": "freeze"})
    assert signals.sample("a", {"seq": 2, "x": 0.7}) == {"seq": 1, "x": 0.5}
    assert signals.sample("b", {"y": 1}) == {"y": 1}
    board.change({"signals": "nan"})
    said: dict[str, Any] = signals.sample("a", {"seq": 3, "x": 0.7})
    assert said["seq"] == 3
    assert math.isnan(said["x"])
    board.change({"signals": "stop"})
    assert signals.sample("a", {"seq": 4}) == {}


async def test_reports_are_true_gone_frozen_or_not_numbers() -> None:
    board, heard = FaultBoard(), []

    async def deliver(said: ReplicaReport) -> Plan | None:
        heard.append(said)
        return None

    say = Signals(board).through(deliver)
    await say(report(1))
    board.change({"signals": "freeze"})
    await say(report(2))
    board.change({"signals": "nan"})
    await say(report(3))
    board.change({"signals": "stop"})
    with pytest.raises(ConnectionError):
        await say(report(4))
    assert [r.seq for r in heard] == [1, 1, 3]
    assert heard[2].step_model is not None
    assert math.isnan(heard[2].step_model.a_ms)
    assert math.isnan(heard[2].busy_share or 0.0)
