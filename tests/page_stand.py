"""A gateway without Ray, to look at its page: ``python -m tests.page_stand --replicas 500 --port 8010``.

Everything a browser meets is the real thing: HTTP front, keys, control API, controller, request drivers. Only what Ray
would carry is called directly, replicas that report are made up (a few of them unwell), and one emulated engine answers
prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import uvicorn

from deployments.auth import Authenticator
from deployments.clients import ClientRule
from deployments.clock import now_ns
from deployments.controller import Controller
from deployments.controller_actor import ControllerActor
from deployments.emulation.standalone import running_engine
from deployments.http_front import HttpFront
from deployments.keys import values_of
from deployments.own_answers import OwnAnswers
from deployments.served import Served
from deployments.settings import EmulatedSettings, StepSettings
from policies.control.ledger import Draft
from policies.types import Reason, ReplicaReport, ReplicaState
from tests.bench.control_tick import gateway_report, replica_report
from tests.unit.gateway_bench import a_core, sample, tell

GATEWAYS = 2


class Link:
    """Stands where the gateway's line to the controller stands: the same methods, without Ray between."""

    def __init__(self, controller: Controller) -> None:
        self._actor = ControllerActor.__new__(ControllerActor)
        self._actor._take({"m": controller})

    async def ask(self, method: str, *args: Any) -> Any:
        return await getattr(self._actor, method)(*args)


@dataclass
class Stand:
    """What runs. ``url``: of the gateway."""

    url: str
    controller: Controller
    replicas: int
    seq: int = 0

    def report(self) -> None:
        """One second's reports of everybody, and a tick."""
        self.seq += 1
        rng = Random(self.seq)
        for number in range(self.replicas):
            report = replica_report(rng, number, self.seq, self.controller.plan)
            if (unwell := _unwell(report, number, self.seq)) is not None:
                self.controller.report_replica(unwell)
        for number in range(GATEWAYS):
            report_of = gateway_report(rng, number, GATEWAYS, self.replicas, self.seq)
            ejected = {"replica-00002": "errors"} if self.replicas > 2 else {}
            answered = max(0, report_of.arrivals - 2)
            met = round(answered * rng.uniform(0.9, 1.0))
            self.controller.report_gateway(replace(report_of, succeeded=answered, met=met, ejected=ejected))
        self.controller.fleet({
            "replicas_running": self.replicas, "replicas_target": self.replicas, "replicas_min": 1,
            "replicas_max": 2 * self.replicas,
        })  # fmt: skip
        self.controller.tick()

    def decide(self) -> None:
        """An entry of the ledger, made up."""
        reason = Reason("WithinItl", "832 tokens a step keep gaps within 190 ms with 16 running")
        draft = Draft(
            "batch", "replica-00000", {"step_tokens_max": 2_048}, {"step_tokens_max": 832}, reason, {"itl": 0.2}
        )
        self.controller._control.ledger.write(draft, self.seq, now_ns(), ())


def _unwell(report: ReplicaReport, number: int, seq: int) -> ReplicaReport | None:
    """Of every hundred replicas one is stuck, one drains, one starts, one has fallen silent, ten have a queue."""
    kind = number % 100
    if kind == 3 and seq > 1:
        return None
    state = {4: ReplicaState.STARTING, 5: ReplicaState.DRAINING, 6: ReplicaState.STUCK}.get(kind, report.state)
    full = kind >= 90 or kind == 1
    running = 256 if full else report.running + kind
    kv = 390_000 if full else running * 1_000
    return replace(report, state=state, running=running, waiting=40 if full else 0, kv_tokens_used=kv)


@contextlib.asynccontextmanager
async def standing(replicas: int, *records: Any, port: int = 0, **emulated: Any) -> AsyncIterator[Stand]:
    """The gateway on a loopback port, with ``records`` as its API keys (none: ``auth: none``)."""
    auth: Any = {"keys": [values_of(record) for record in records]} if records else "none"
    core = a_core(auth=auth)
    engine = EmulatedSettings(step=StepSettings(a_ms=5), **emulated)
    controller = Controller({"auth": "none"}, _gave_up)
    link: Any = Link(controller)
    served = Served([core], [link])
    front = HttpFront(
        served, ClientRule("loopback", "127.0.0.1"), Authenticator(core.settings.auth), OwnAnswers(served)
    )
    async with (
        running_engine(engine, core.settings.model.name) as (_, app),
        serving(app) as engine_port,
        serving(front, port) as front_port,
    ):
        tell(core, {"replica-00000": f"127.0.0.1:{engine_port}"}, **{"replica-00000": sample()})
        stand = Stand(f"http://127.0.0.1:{front_port}", controller, replicas)
        stand.report()
        yield stand
    core.pool.close()
    await controller.close()


@contextlib.asynccontextmanager
async def serving(app: Any, port: int = 0) -> AsyncIterator[int]:
    """``app`` on a loopback port, until the block ends."""
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve([listener]))
    try:
        while not server.started:
            assert not task.done()
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()


def _gave_up() -> None:
    raise AssertionError("the controller gave up")


async def _serve(replicas: int, port: int) -> None:
    async with standing(replicas, port=port) as stand:
        print(f"{stand.url}/dashboard", flush=True)  # noqa: T201 (a command)
        while True:
            await asyncio.sleep(1)
            stand.report()
            if stand.seq % 20 == 5:
                stand.decide()


def main(argv: Sequence[str] | None = None) -> None:
    """Stay until Ctrl-C."""
    parser = argparse.ArgumentParser(description="A gateway without Ray, to look at its page.")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--port", type=int, default=8010)
    given = parser.parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(given.replicas, given.port))


if __name__ == "__main__":
    main()
