"""Tenants against two live gateways: budgets that are one, caches that are apart, and what the controller shows."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.app import build
from tests import loopback
from tests.serve.gateway.conftest import ARGS, MODEL, System, direct, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

BUDGET_USD = 0.002
TENANTS = {
    "poor": {"budget_usd_max": BUDGET_USD},
    "slow": {"requests_per_minute_max": 2},
    "open": {"isolate_cache": False},
    "open-too": {"isolate_cache": False},
}
PRICES = {"prompt_usd_per_mtok": 1.0, "cached_usd_per_mtok": 1.0, "output_usd_per_mtok": 4.0}


@pytest.fixture(scope="module")
def gateways(system: System) -> Iterator[tuple[str, DeploymentHandle[Any]]]:
    """URL and handle of an application with two gateways over one engine."""
    name, url = "tenants", f"{system.url}/tenants"
    args = ARGS | {
        "gateway": ARGS["gateway"] | {"replicas": 2},
        "scaling": {"replicas_min": 1, "replicas_max": 1},
        "tenants": TENANTS,
        "prices": PRICES,
    }
    handle = serve.run(build(args), name=name, route_prefix="/tenants")
    try:
        until(lambda: direct(url), "an engine behind two gateways")
        yield url, handle
    finally:
        serve.delete(name)


Ask = Callable[..., Any]


@pytest.fixture
def ask(gateways: tuple[str, DeploymentHandle[Any]]) -> Ask:
    def asked(tenant: str, content: str = "Name a river.", max_tokens: int = 5) -> Any:
        """The answer, or the code of the refusal."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
        try:
            return gateways[1].chat.remote(body, tenant=tenant).result(timeout_s=60)
        except Exception as error:  # noqa: BLE001  (Ray wraps what the gateway raised)
            return getattr(getattr(error, "cause", error), "code", repr(error))

    return asked


@pytest.fixture
def shown(gateways: tuple[str, DeploymentHandle[Any]]) -> Callable[[str], Any]:
    def of(tenant: str) -> Any:
        return loopback.get(f"{gateways[0]}/control/tenants", timeout=30).json()["tenants"].get(tenant)

    return of


def cached_tokens(answer: Any) -> int:
    assert isinstance(answer, dict), answer
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def test_two_gateways_never_sell_a_budget_twice_and_sell_most_of_it(ask: Ask, shown: Callable[[str], Any]) -> None:
    until(lambda: isinstance(ask("poor"), dict), "both gateways have a lease", 60)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        ended = False
        while not ended:
            answers = list(pool.map(lambda _: ask("poor", max_tokens=8), range(32)))
            assert {a for a in answers if isinstance(a, str)} <= {"budget_unknown", "tenant_budget"}
            ended = answers.count("tenant_budget") == len(answers)
    until(lambda: shown("poor")["usage"]["inflight_requests"] == 0, "the controller knows that all ended", 60)
    seen = shown("poor")
    assert 0.6 * BUDGET_USD <= seen["usage"]["spent_usd"] <= BUDGET_USD
    assert seen["budget"]["used_usd"] == pytest.approx(seen["usage"]["spent_usd"])
    assert seen["budget"]["committed_usd"] <= BUDGET_USD


def test_a_tenant_finds_its_own_prefix_warm_and_nobody_elses(ask: Ask) -> None:
    content = f"{uuid4()} " + "Tell me of rivers. " * 100
    until(lambda: cached_tokens(ask("first", content)) > 0, "gateways agree on the secret of the cache", 60)
    assert cached_tokens(ask("second", content)) == 0
    assert cached_tokens(ask("open", content)) == 0
    assert cached_tokens(ask("open-too", content)) > 0


def test_usage_of_both_gateways_is_shown_together(ask: Ask, shown: Callable[[str], Any]) -> None:
    tenant = f"t-{uuid4()}"
    answers = [ask(tenant) for _ in range(12)]
    prompt = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    output = sum(answer["usage"]["completion_tokens"] for answer in answers)
    until(lambda: (shown(tenant) or {"usage": {"output_tokens": 0}})["usage"]["output_tokens"] == output, "told", 60)
    usage = shown(tenant)["usage"]
    assert (usage["requests"], usage["prompt_tokens"], usage["inflight_requests"]) == (12, prompt, 0)
    assert usage["spent_usd"] == pytest.approx(prompt * 1e-6 + output * 4e-6)


def test_a_rate_is_split_between_gateways_and_its_refusal_says_so(ask: Ask) -> None:
    answers = [ask("slow") for _ in range(12)]
    served = [answer for answer in answers if isinstance(answer, dict)]
    assert 1 <= len(served) <= 2
    assert {answer for answer in answers if isinstance(answer, str)} == {"tenant_request_rate"}
