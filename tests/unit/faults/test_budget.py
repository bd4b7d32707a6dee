"""The retry budget: starts full, is paid by requests, never holds more than its burst, counts exactly."""

from __future__ import annotations

import pytest

from policies.config import FaultsConfig
from policies.config_base import ConfigError
from policies.faults import RetryBudget


def spend_all(budget: RetryBudget) -> int:
    spent = 0
    while budget.try_spend():
        spent += 1
    return spent


def test_starts_full_and_empties() -> None:
    budget = RetryBudget(FaultsConfig(retry_burst=4))
    assert spend_all(budget) == 4
    assert budget.try_spend() is False
    assert budget.attempts_left == 0


@pytest.mark.parametrize(
    ("share", "requests", "attempts"), [(0.2, 5, 1), (0.1, 10, 1), (0.1, 9, 0), (0.3, 10, 3), (1, 3, 3)]
)
def test_requests_pay_their_share_exactly(share: float, requests: int, attempts: int) -> None:
    budget = RetryBudget(FaultsConfig(retry_share_max=share, retry_burst=5))
    spend_all(budget)
    for _ in range(requests):
        budget.on_success()
    assert spend_all(budget) == attempts


def test_never_holds_more_than_the_burst() -> None:
    budget = RetryBudget(FaultsConfig(retry_share_max=1, retry_burst=3))
    for _ in range(100):
        budget.on_success()
    assert spend_all(budget) == 3


@pytest.mark.parametrize("config", [FaultsConfig(retry_burst=0), FaultsConfig(retry_burst=0, retry_share_max=0)])
def test_no_burst_means_no_retries(config: FaultsConfig) -> None:
    budget = RetryBudget(config)
    for _ in range(100):
        budget.on_success()
    assert budget.try_spend() is False


def test_share_zero_never_refills() -> None:
    budget = RetryBudget(FaultsConfig(retry_share_max=0, retry_burst=2))
    spend_all(budget)
    for _ in range(100):
        budget.on_success()
    assert budget.try_spend() is False


def test_bound_on_draining_refusals_is_checked() -> None:
    with pytest.raises(ConfigError, match="draining_refusals_max"):
        FaultsConfig(draining_refusals_max=0)


@pytest.mark.parametrize(("gateways", "attempts"), [(1, 10), (3, 3), (10, 1), (1_000, 1)])
def test_gateways_share_the_burst_and_each_has_one(gateways: int, attempts: int) -> None:
    assert spend_all(RetryBudget(FaultsConfig(retry_burst=10), gateways)) == attempts


def test_no_burst_is_none_for_every_gateway() -> None:
    assert spend_all(RetryBudget(FaultsConfig(retry_burst=0), 4)) == 0


def test_no_gateways_is_an_error() -> None:
    with pytest.raises(ValueError, match="gateways"):
        RetryBudget(FaultsConfig(), 0)
