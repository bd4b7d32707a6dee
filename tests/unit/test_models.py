"""Several models in one application, without Ray: settings, bounds, tenants, whose a request is, metrics, control."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboards.catalogue import ALL, OF_APPLICATION, Source
from deployments.auth import Authenticator
from deployments.clients import ClientRule
from deployments.control_desk import DecisionFilter
from deployments.controller import Controller
from deployments.controller_actor import ControllerActor
from deployments.core import GatewayCore
from deployments.errors import GatewayError
from deployments.handle_api import HandleApi
from deployments.http_front import HttpFront
from deployments.openapi import OF_ONE_MODEL, describe
from deployments.own_answers import OwnAnswers
from deployments.served import Served
from deployments.settings import Settings, SettingsError
from deployments.settings_models import MODELS_MAX, deployments_of, drain_s_max, each_of
from deployments.telemetry import Telemetry, render
from policies.admission.limits import Admission
from policies.build import build_policies
from policies.config import AdmissionConfig
from policies.types import ReplicaReport
from tests.bench import control_tick
from tests.unit.gateway_bench import a_core
from tests.unit.test_admission import a_request

TINY: dict[str, Any] = {"engine": "emulated"}
ARGS: dict[str, Any] = {
    "auth": "none",
    "model": {"name": "a", **TINY},
    "models": {
        "org/b": {
            "model": {**TINY, "drain_s_max": 900.0},
            "scaling": {"replicas_min": 0, "replicas_max": 3},
            "replica_usd_per_hour": 2.5,
        },
        "c": {"model": {**TINY, "context_tokens_max": 99}},
    },
    "objectives": {"ttft_ms": 500, "models": {"org/b": {"ttft_ms": 99}}},
    "recording": {"folder": "/tmp/r"},
    "scaling": {"replicas_max": 7},
    "prices": {"replica_usd_per_hour": 1.0},
}


# --- settings ---------------------------------------------------------------------------------------------------------


def test_each_model_sees_its_own_sections_and_what_is_the_applications() -> None:
    first, b, c = each_of(Settings.load(ARGS))
    assert (first.model.name, b.model.name, c.model.name) == ("a", "org/b", "c")
    assert (first.scaling.replicas_max, b.scaling.replicas_max, c.scaling.replicas_max) == (7, 3, 7)
    usd = [each.policy_config().prices.replica_usd_per_hour for each in (first, b, c)]
    assert usd == [1.0, 2.5, 1.0]
    assert [each.policy_config().objectives.ttft_ms for each in (first, b, c)] == [500, 99, 500]
    assert [each.recording.folder for each in (first, b, c)] == ["/tmp/r", "/tmp/r/org-b", "/tmp/r/c"]
    assert set(b.models) == {"a", "c"}
    assert b.models["a"].scaling == first.scaling


def test_what_a_model_sees_survives_the_way_to_another_process_and_takes_user_config() -> None:
    for each in each_of(Settings.load(ARGS)):
        again = Settings.load(each.to_args())
        assert again == each
        new = again.with_objectives({"objectives": {"models": {"org/b": {"ttft_ms": 42}}}})
        assert new.policy_config().objectives.ttft_ms == (42 if each.model.name == "org/b" else 500)


def test_roles_are_split_where_a_model_says_so_and_nowhere_else() -> None:
    split = {"enabled": True}
    models = {"b": {"model": {}, "disaggregation": split}, "c": {"model": TINY}}
    first, b, c = each_of(Settings.load({"auth": "none", "model": {"name": "a", **TINY}, "models": models}))
    assert [each.disaggregation.enabled for each in (first, b, c)] == [False, True, False]
    with pytest.raises(SettingsError, match=r"models\.c\.disaggregation\.enabled: True: needs"):
        Settings.load({"auth": "none", "model": {"name": "a"}, "disaggregation": split, "models": models})


def test_deployments_have_names_that_serve_takes() -> None:
    settings = Settings.load(ARGS)
    assert deployments_of(settings) == {"a": "Engine", "org/b": "Engine-org-b", "c": "Engine-c"}
    assert drain_s_max(settings) == 900.0


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ({"a": {"model": TINY}}, "models.a: is the name of the first model already"),
        ({"x/y": {"model": TINY}, "x:y": {"model": TINY}}, "models.x:y: would share files and deployment with 'x/y'"),
        ({"b b": {"model": TINY}}, "'b b': may hold letters"),
        ({"b": {"model": {**TINY, "name": "z"}}}, "the model's name is its key here"),
        ({"b": {}}, "models.b.model: is missing"),
        ({"b": {"model": TINY, "scalling": {}}}, "models.b.scalling"),
        ({"b": {"model": {**TINY, "num_gpus": 1}}}, "models.b.model.num_gpus: 1: must be 0"),
        ({"b": {"model": TINY, "scaling": {"replicas_min": 9}}}, "models.b.scaling.replicas_max"),
        ({"b": {"model": {"engine_args": {"served_model_name": "x"}}}}, "models.b.model.engine_args.served_model_name"),
        ({f"m{i}": {"model": TINY} for i in range(MODELS_MAX + 1)}, f"at most {MODELS_MAX}"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(models: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Settings.load({"auth": "none", "model": {"name": "a", **TINY}, "models": models})
    assert says in str(raised.value)


def test_objectives_for_a_model_that_is_not_served_are_still_refused() -> None:
    with pytest.raises(SettingsError, match=r"objectives\.models\.zz: has no effect"):
        Settings.load({**ARGS, "objectives": {"models": {"zz": {"ttft_ms": 1}}}})


# --- bounds and tenants of the gateway as a whole ---------------------------------------------------------------------


def test_a_model_that_piles_up_takes_nothing_from_the_others_and_all_stay_bounded() -> None:
    config = AdmissionConfig(inflight_requests_max=8, inflight_tokens_max=80)
    full = Admission(config)
    other = Admission(config, full.peers)
    held = sum(full.try_admit(a_request(f"full{i}", 10)) is None for i in range(20))
    assert held == 8, "alone it may take everything"
    admitted = sum(other.try_admit(a_request(f"other{i}", 10)) is None for i in range(20))
    assert admitted == 4, "its even part, whatever the other holds"
    assert full.requests + other.requests < 2 * 8
    for i in range(8):
        full.release(f"full{i}")
    assert other.try_admit(a_request("more", 10)) is None, "beyond its part while there is room"


def test_tokens_are_bounded_in_the_same_way() -> None:
    config = AdmissionConfig(inflight_tokens_max=100)
    full = Admission(config)
    other = Admission(config, full.peers)
    assert full.try_admit(a_request("giant", 1_000)) is None
    assert other.try_admit(a_request("one", 30)) is None
    assert other.try_admit(a_request("two", 20)) is None
    refusal = other.try_admit(a_request("three", 1))
    assert refusal is not None
    assert refusal.code == "inflight_tokens"


def test_tenants_and_tasks_are_one_for_all_models_and_the_rest_is_each_models_own() -> None:
    settings = Settings.load(ARGS)
    first = build_policies(settings.policy_config(), 1)
    other = build_policies(settings.of("c").policy_config(), 1, first=first)
    assert other.flow_context.admission.tenants is first.flow_context.admission.tenants
    assert other.flow_context.tasks is first.flow_context.tasks
    for name in ("budget", "quarantine", "health", "book", "router"):
        assert getattr(other.flow_context, name) is not getattr(first.flow_context, name)


# --- whose a request is -----------------------------------------------------------------------------------------------


@pytest.fixture
async def served() -> Served:
    return Served([a_core(model={"name": name, **TINY}) for name in ("a", "org/b")])


def named(core: GatewayCore) -> str:
    return core.settings.model.name


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model": "org/b", "prompt": "x"}', "org/b"),
        (b'{"messages": [{"model": "a"}], "model": "org/b"}', "org/b"),
        (b'{"model": "org/b", "model": "a"}', "a"),
        (b'{"model": "org/b", "model": 1}', "a"),
        (b'{"model": "zz"}', "a"),
        (b"{}", "a"),
        (b"[]", "a"),
        (b"{", "a"),
        (b"\xff", "a"),
        (b"[" * 100_000, "a"),
    ],
)
async def test_the_last_model_of_a_body_that_is_served_takes_it_else_the_first(
    served: Served, body: bytes, model: str
) -> None:
    assert named(served.core_of(body)) == model


async def test_what_is_refused_before_it_has_a_driver_counts_for_the_model_it_names(served: Served) -> None:
    body = {"model": "org/b", "prompt": "x", "stream": 5}

    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> dict[str, Any]:
        return messages.pop()

    async def send(message: object) -> None:
        pass

    front = HttpFront(served, ClientRule("any", ""), Authenticator(served.first.settings.auth), OwnAnswers(served, 0))
    await front({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send)
    with pytest.raises(GatewayError):
        await HandleApi(served).call("/v1/completions", body)
    pages = {name: core.meter.telemetry.render().decode() for name, core in served.cores.items()}
    assert 'tidegate_requests_total{endpoint="/v1/completions",outcome="refused"' not in pages["a"]
    (line,) = [row for row in pages["org/b"].splitlines() if row.startswith("tidegate_requests_total{")]
    assert line.endswith(" 2.0")


async def test_a_query_names_a_model_that_is_served(served: Served) -> None:
    assert served.asked(b"") == "a"
    assert served.asked(b"limit=3&model=org%2Fb") == "org/b"
    with pytest.raises(GatewayError) as raised:
        served.asked(b"model=zz")
    assert raised.value.status == 404


async def test_all_models_are_listed_and_one_that_serves_makes_the_gateway_healthy(served: Served) -> None:
    own = OwnAnswers(served, 0)
    assert [card["id"] for card in own.models()["data"]] == ["a", "org/b"]
    assert own.model("org/b")["id"] == "org/b"
    with pytest.raises(GatewayError):
        own.model("zz")
    with pytest.raises(GatewayError) as raised:
        own.health()
    assert raised.value.code == "no_replica"
    served.cores["org/b"].membership.targets = {"r": object()}  # type: ignore[dict-item]
    assert own.health().status == 200


def test_the_description_names_all_models_and_where_one_is_chosen() -> None:
    document = json.loads(describe("a", False, ["org/b"]))
    chat = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat["properties"]["model"]["enum"] == ["a", "org/b"]
    for path in OF_ONE_MODEL:
        assert {"a", "org/b"} == set(document["paths"][path]["parameters"][-1]["schema"]["enum"])
    assert "parameters" not in json.loads(describe("a", False))["paths"]["/control/overview"]


# --- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", list(Source))
def test_every_series_says_its_model_but_those_of_the_application(source: Source) -> None:
    pages = {"a": Telemetry(source), "org/b": Telemetry(source)}
    for telemetry in pages.values():
        for series in telemetry:
            labels = dict.fromkeys(series.metric.labels, "x")
            of_kind: dict[str, Any] = {"counter": series.inc, "gauge": series.set, "histogram": series.observe}
            of_kind[series.metric.kind](1.0, **labels)
    families = list(text_string_to_metric_families(render(pages).decode()))
    assert len(families) == sum(metric.source is source for metric in ALL), "each once"
    for family in families:
        whole = {family.name, f"{family.name}_total"} & OF_APPLICATION
        models = {sample.labels.get("model") for sample in family.samples}
        assert models == ({None} if whole else {"a", "org/b"}), family.name
    alone = text_string_to_metric_families(render({"a": pages["a"]}).decode())
    assert all("model" not in sample.labels for family in alone for sample in family.samples)


# --- the controller ---------------------------------------------------------------------------------------------------


def replica_report(model: str) -> ReplicaReport:
    return replace(control_tick.replica_report(Random(0), 0, 1, None), model=model)


async def test_each_model_has_a_control_loop_of_its_own() -> None:
    settings = Settings.load({**ARGS, "recording": {}, "ledger": {"enabled": False}})
    actor = ControllerActor.__new__(ControllerActor)
    loops = {each.model.name: Controller(each.to_args(), lambda: None) for each in each_of(settings)}
    actor._take(loops)
    assert await actor.report_replica(replica_report("org/b")) is None
    assert await actor.report_replica(replica_report("gone")) is None
    view = {"replicas_running": 1, "replicas_target": 1, "replicas_min": 0, "replicas_max": 3}
    assert await actor.fleet(view, "org/b") is None
    assert await actor.fleet(view, "gone") is None
    for loop in loops.values():
        loop.tick()
    plan = await actor.report_replica(replica_report("org/b"))
    assert plan is not None
    assert plan.epoch == loops["org/b"].epoch
    assert (await actor.state("org/b"))["fleet"]["replicas_max"] == 3
    assert (await actor.state())["fleet"] is None
    assert len((await actor.state("org/b"))["replicas"]) == 1
    assert (await actor.state("c"))["replicas"] == (await actor.state())["replicas"] == []
    assert await actor.decisions(5, None, DecisionFilter(), model="c") == []
    assert 'tidegate_control_plan_seq{model="org/b"} 1.0' in await actor.metrics(model="a")
    with pytest.raises(KeyError):
        await actor.state("gone")
    overview = json.loads(await actor.overview("c"))
    assert (overview["model"], overview["models"]) == ("c", ["a", "c", "org/b"])


# --- caps of the fleet ------------------------------------------------------------------------------------------------

CAPPED: dict[str, Any] = {
    "auth": "none",
    "ledger": {"enabled": False},
    "model": {"name": "a", **TINY},
    "models": {"b": {"model": TINY}},
    "scaling": {"replicas_min": 1, "replicas_max": 8},
    "prices": {"replica_usd_per_hour": 1.0},
    "fleet": {"usd_per_hour_max": 6.0, "priorities": {"b": 5}},
}


async def test_models_share_the_caps_by_priority_and_the_decision_says_so() -> None:
    settings = Settings.load(CAPPED)
    actor = ControllerActor.__new__(ControllerActor)
    loops = {each.model.name: Controller(each.to_args(), lambda: None) for each in each_of(settings)}
    actor._take(loops, settings.fleet.caps)

    async def look(running: int, model: str) -> int:
        view = {"replicas_running": running, "replicas_target": running, "replicas_min": 1, "replicas_max": 8}
        await actor.fleet(view, model)
        return int((await actor.state(model))["fleet"]["replicas_max"])

    await look(4, "a")
    assert await look(1, "b") == 2, "what the other holds is not given twice"
    assert await look(4, "a") == 4, "a cap that does not bind limits nobody"
    loops["a"].tick()
    await look(3, "b")
    assert await look(4, "a") == 3, "the more important one keeps what it asks for"
    loops["a"].tick()
    assert loops["a"].plan is not None
    assert loops["a"].plan.replicas_target == 3
    reasons = [row["reason"]["code"] for row in await actor.decisions(9, None, DecisionFilter(), model="a")]
    assert reasons == ["BoundedByFleet"]
    await look(1, "a")
    assert await look(3, "b") == 3


@pytest.mark.parametrize(
    ("fleet", "says"),
    [
        ({"usd_per_hour_max": 1.5}, "fleet: the first replicas of all models"),
        ({"priorities": {"zz": 1}}, "fleet.priorities.zz: no such model is served"),
        ({"gpus": 1}, "fleet.gpus"),
    ],
)
def test_caps_that_cannot_be_kept_are_refused(fleet: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Settings.load({**CAPPED, "fleet": fleet})
    assert says in str(raised.value)
