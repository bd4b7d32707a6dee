"""What the gateway answers itself: health, models, metrics, and what people ask of the controller."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import msgspec

from deployments.clock import now_ns
from deployments.controller_link import ControllerLink
from deployments.core import GatewayCore
from deployments.endpoints import MODEL_PREFIX
from deployments.errors import GatewayError, bad_request, model_not_found
from deployments.telemetry import CONTENT_TYPE

DECISIONS_MAX = 1_000
"""Ledger entries of one answer."""
DECISIONS_DEFAULT = 100


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"


class OwnAnswers:
    """One method per own endpoint; :meth:`answer` picks it."""

    def __init__(self, core: GatewayCore, controller: ControllerLink, started_s: int | None = None) -> None:
        self._core = core
        self._controller = controller
        self._created_s = int(time.time()) if started_s is None else started_s

    async def answer(self, path: str, query: bytes) -> Answer:
        """The answer to GET ``path``. Raises ``GatewayError``."""
        if path == "/health":
            return self.health()
        if path == "/metrics":
            return self.metrics()
        if path == "/control/state":
            return _json(await self._controller.ask("state"))
        if path == "/control/decisions":
            return _json(await self._controller.ask("decisions", *_page(query)))
        if path.startswith(MODEL_PREFIX):
            return _json(self.model(path[len(MODEL_PREFIX) :]))
        return _json(self.models())

    def health(self) -> Answer:
        """200 with an empty body when a replica is ready, as engines answer; else 503."""
        if self._core.replicas_ready:
            return Answer(b"")
        raise GatewayError(503, "server_error", "no_replica", "No replica is ready.", None, 1.0)

    def models(self) -> dict[str, Any]:
        """The list of models in the engine's own shape; known without a replica."""
        return {"object": "list", "data": [self._card()]}

    def model(self, name: str) -> dict[str, Any]:
        """One model. Raises ``GatewayError`` when it is not served."""
        if name != self._core.settings.model.name:
            raise model_not_found(name)
        return self._card()

    def metrics(self) -> Answer:
        """Prometheus text of this gateway; gauges are read now."""
        core = self._core
        core.meter.fold()
        age_ms = core.policies.plan_follower.age_ms(now_ns())
        telemetry = core.meter.telemetry
        telemetry["tidegate_inflight_requests"].set(len(core.drivers))
        telemetry["tidegate_queued_requests"].set(core.queued)
        telemetry["tidegate_plan_age_seconds"].set(None if age_ms is None else age_ms / 1_000)
        telemetry["tidegate_prefix_index_blocks"].set(len(core.policies.index))
        if core.recorder is not None:
            for result, lines in zip(("ok", "dropped"), core.recorder.take_counts(), strict=True):
                telemetry["tidegate_recording_lines_total"].inc(lines, result=result)
        return Answer(telemetry.render(), content_type=CONTENT_TYPE)

    def _card(self) -> dict[str, Any]:
        model = self._core.settings.model
        permission = {
            "id": f"modelperm-{model.name}",
            "object": "model_permission",
            "created": self._created_s,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": model.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "vllm",
            "root": model.source,
            "parent": None,
            "max_model_len": context_tokens(model.context_tokens_max, model.engine_args),
            "permission": [permission],
        }


def context_tokens(configured: int | None, engine_args: dict[str, Any]) -> int | None:
    """Longest context as far as the settings say; ``None`` when only the engine knows."""
    if configured is not None:
        return configured
    value = engine_args.get("max_model_len")
    return value if isinstance(value, int) else None


def _page(query: bytes) -> tuple[int, int | None]:
    """``limit`` and ``since_seq`` of the ledger's query string."""
    fields = parse_qs(query.decode("latin-1"))
    limit, since = (_whole_number(fields, name) for name in ("limit", "since_seq"))
    if limit is not None and not 1 <= limit <= DECISIONS_MAX:
        raise bad_request(f"limit: must be in 1..{DECISIONS_MAX}.", "limit")
    return DECISIONS_DEFAULT if limit is None else limit, since


def _whole_number(fields: dict[str, list[str]], name: str) -> int | None:
    values = fields.get(name)
    if not values:
        return None
    if not (values[-1].isascii() and values[-1].isdigit() and len(values[-1]) <= 18):
        raise bad_request(f"{name}: must be a whole number.", name)
    return int(values[-1])


def _json(value: Any) -> Answer:
    return Answer(msgspec.json.encode(value))
