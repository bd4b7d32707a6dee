"""What the controller remembers of those that are gone: nothing, but for the ring of its ledger."""

from __future__ import annotations

import re

import pytest

from autoscaling.recommend import ReplicaScaler
from policies.build import build_control
from policies.config import PolicyConfig, ScalingConfig
from policies.config_guard import GuardConfig
from policies.control.overrides import ENDED_MAX, OVERRIDES_MAX
from tests.churn import SECOND_NS, Churn, objects

NAMES = re.compile(r"(?:replica|gateway|tenant)-\d+|\bo\d+\b")
TICK_S = 30
TICKS, REPLICAS = 200, 50
"""Ten thousand replicas, each of which lives for one tick."""

REST_TICKS = 100
"""Longer than anything is held: freezes, foreign values, overrides, windows."""


@pytest.mark.slow
def test_ten_thousand_replicas_leave_no_trace() -> None:
    guard = GuardConfig(freeze_s=600.0, foreign_hold_s=600.0)
    config = PolicyConfig(scaling=ScalingConfig(replicas_min=1, replicas_max=100), guard=guard)
    state = build_control(config, ReplicaScaler(config), "epoch")
    churn = Churn(state, seed=3, replicas=REPLICAS, lives_ticks=1.0)
    for number in range(TICKS):
        churn.tick((number + 1) * TICK_S * SECOND_NS, TICK_S)
    assert churn.made > TICKS * REPLICAS
    stay = churn.settle(2)
    for number in range(TICKS, TICKS + REST_TICKS):
        churn.tick((number + 1) * TICK_S * SECOND_NS, TICK_S)
    found = objects(state, besides=(state.ledger,))
    names = {name for one in found if isinstance(one, str) for name in NAMES.findall(one)}
    assert stay <= names
    assert {name for name in names if name.startswith(("replica", "gateway"))} == stay
    assert sum(name.startswith("tenant") for name in names) <= 100
    assert sum(name.startswith("o") for name in names) <= ENDED_MAX + OVERRIDES_MAX
    assert len(found) < 60_000
