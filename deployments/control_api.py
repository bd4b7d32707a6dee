"""The control plane over HTTP: what the controller decided and why, and what people may set by hand.

    GET    /control/decisions        the ledger; limit, since_seq, since, lever, target
    GET    /control/state?tick=<n>   signals, conditions and plan as of one of the last ticks
    GET    /control/conditions       every named condition, active or not, with figures and the next step
    GET    /control/overrides        values and modes set by hand that are in force
    POST   /control/overrides        {"knob", "value" or "mode", "target", "expires_in_s", "why"}
    DELETE /control/overrides/<id>   take one back; without an id: all
    GET    /control/shadow           for every knob: acted on, or only written down, and what says so
    POST   /control/shadow           {"shadow", "knob", "expires_in_s", "why"}

Reading needs the scope ``control:read``, changing ``control:write``. Every change is a line in the gateway's log with
the key's id, before it is made and whatever comes of it. A field that is not known is refused: a slip in its name must
not set something else. It must not decide what an override does.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec

from deployments.auth import Principal
from deployments.control_desk import DECISIONS_PAGE_MAX, DecisionFilter, Refused
from deployments.endpoints import OVERRIDE_PREFIX
from deployments.errors import GatewayError, bad_request
from policies.steering import ANY, Knob, Lever, Override
from policies.types import Mode

if TYPE_CHECKING:  # the command line reads queries with this module and must not wait for Ray's import
    from deployments.controller_link import ControllerLink

logger = logging.getLogger("ray.serve")

BODY_BYTES_MAX = 16_384
"""Longest body that sets something."""
DECISIONS_DEFAULT = 100
"""Ledger entries of one answer where no ``limit`` is given."""
EXPIRES_IN_S = 3_600.0
"""Life of an override that names none."""
VALUE_MAX = 1_000_000_000
"""Largest value of an override: more than any knob can mean, and within what engines keep it in."""
WHY_CHARS_MAX = 500
TARGET_CHARS_MAX = 256
LEVERS = (*Lever, "guard")
"""Who writes into the ledger."""

_SPAN = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)(s|m|h|d)")
_SPAN_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class ControlApi:
    """Answers ``/control/...`` where the controller is asked. Raises ``GatewayError`` for what is refused."""

    def __init__(self, controller: ControllerLink) -> None:
        self._controller = controller

    async def read(self, path: str, query: bytes) -> Any:
        """The answer to GET."""
        if path == "/control/decisions":
            return await self._controller.ask("decisions", *page_of(query, time.time()))
        if path == "/control/state":
            return await self._state(tick_of(query))
        if path == "/control/conditions":
            return _listed(await self._controller.ask("conditions"))
        if path == "/control/overrides":
            return _listed(await self._controller.ask("overrides"))
        return _listed(await self._controller.ask("shadow"))

    async def _state(self, tick: int | None) -> Any:
        """What the controller knows now, or knew at ``tick``."""
        if tick is None:
            return await self._controller.ask("state")
        state = await self._controller.ask("state_at", tick)
        if state is None:
            message = f"tick: the controller keeps the last few only, and {tick} is none of them."
            raise GatewayError(404, "invalid_request_error", "tick_not_kept", message, "tick")
        return state

    async def change(self, method: str, path: str, body: bytes, principal: Principal) -> Any:
        """The answer to POST and DELETE."""
        if method == "DELETE":
            override_id = path.removeprefix(OVERRIDE_PREFIX) if path.startswith(OVERRIDE_PREFIX) else None
            _audit(principal, "takes back override " + (override_id or "*: all"))
            return _listed(_accepted(await self._controller.ask("drop_overrides", override_id, principal.key_id)))
        fields = _fields(body)
        if path == "/control/shadow":
            shadow, asked = shadow_of(fields, principal.key_id)
            _audit(principal, f"turns shadow mode {'on' if shadow else 'off'}: {_shown(fields)}")
            return _listed(_accepted(await self._controller.ask("set_shadow", shadow, asked)))
        asked = override_of(fields, principal.key_id)
        _audit(principal, f"sets an override: {_shown(fields)}")
        return _accepted(await self._controller.ask("set_override", asked))


def _audit(principal: Principal, what: str) -> None:
    logger.info("control: key %r of tenant %r %s", principal.key_id, principal.tenant, what)


def _shown(fields: Mapping[str, Any]) -> str:
    return msgspec.json.encode(fields).decode()


def _accepted(answer: Any) -> Any:
    if isinstance(answer, Refused):
        if not answer.found:
            raise GatewayError(404, "invalid_request_error", "override_not_found", answer.message + ".", answer.param)
        param = answer.param or "body"
        raise bad_request(f"{param}: {answer.message}.", answer.param, "invalid_override")
    return answer


def _listed(rows: Any) -> dict[str, Any]:
    return {"object": "list", "data": rows}


# --- bodies -----------------------------------------------------------------------------------------------------------


def override_of(fields: Mapping[str, Any], key_id: str) -> Override:
    """The override that a body asks for. Raises ``GatewayError`` 400."""
    _only(fields, ("knob", "target", "value", "mode", "expires_in_s", "why"))
    value, mode = fields.get("value"), fields.get("mode")
    if (value is None) == (mode is None):
        raise bad_request("value: give either value (a number) or mode (act or shadow).", "value")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise bad_request("value: must be a number.", "value")
    if value is not None and not 0 <= value <= VALUE_MAX:
        raise bad_request(f"value: must be from 0 to {VALUE_MAX:,}.", "value")
    if mode is not None and mode not in list(Mode):
        raise bad_request("mode: must be act or shadow.", "mode")
    knob = _knob(fields)
    if knob is None and value is not None:
        raise bad_request(f"knob: a value needs one; there are: {', '.join(Knob)}.", "knob")
    target = _text(fields, "target", TARGET_CHARS_MAX) or ANY
    return Override("", knob, target, value, mode, _lifetime_ms(fields), key_id, _text(fields, "why", WHY_CHARS_MAX))


def shadow_of(fields: Mapping[str, Any], key_id: str) -> tuple[bool, Override]:
    """On or off, and the knob and lifetime that a body asks for. Raises ``GatewayError`` 400."""
    _only(fields, ("shadow", "knob", "expires_in_s", "why"))
    shadow = fields.get("shadow")
    if not isinstance(shadow, bool):
        raise bad_request("shadow: must be true or false.", "shadow")
    why = _text(fields, "why", WHY_CHARS_MAX)
    return shadow, Override("", _knob(fields), ANY, None, None, _lifetime_ms(fields), key_id, why)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise bad_request("The request body is not valid JSON.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise bad_request("The request body must be a JSON object.")
    return fields


def _only(fields: Mapping[str, Any], known: Collection[str]) -> None:
    for name in fields:
        if name not in known:
            raise bad_request(f"{name[:100]}: unknown field; there are: {', '.join(known)}.", name[:100])


def _knob(fields: Mapping[str, Any]) -> Knob | None:
    given = fields.get("knob")
    if given is None or given == ANY:
        return None
    if not isinstance(given, str) or given not in set(Knob):
        raise bad_request(f"knob: there is none of that name; there are: {', '.join(Knob)}.", "knob")
    return Knob(given)


def _lifetime_ms(fields: Mapping[str, Any]) -> float:
    given = fields.get("expires_in_s", EXPIRES_IN_S)
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given) or given <= 0:
        raise bad_request("expires_in_s: must be a number of seconds above 0.", "expires_in_s")
    return float(min(given, 1e9)) * 1_000


def _text(fields: Mapping[str, Any], name: str, chars_max: int) -> str:
    given = fields.get(name)
    if given is None:
        return ""
    if not isinstance(given, str) or len(given) > chars_max or not given.isprintable():
        raise bad_request(f"{name}: must be a text of at most {chars_max} printable characters.", name)
    return given


# --- queries ----------------------------------------------------------------------------------------------------------


def page_of(query: bytes, now_unix_s: float) -> tuple[int, int | None, DecisionFilter]:
    """``limit``, ``since_seq`` and filters of the ledger's query string. Raises ``GatewayError`` 400."""
    fields = parse_qs(query.decode("latin-1"))
    limit, since_seq = (_whole_number(fields, name) for name in ("limit", "since_seq"))
    if limit is not None and not 1 <= limit <= DECISIONS_PAGE_MAX:
        raise bad_request(f"limit: must be in 1..{DECISIONS_PAGE_MAX}.", "limit")
    lever, target, since = (fields.get(name, [None])[-1] for name in ("lever", "target", "since"))
    if lever is not None and lever not in LEVERS:
        raise bad_request(f"lever: there is none of that name; there are: {', '.join(LEVERS)}.", "lever")
    since_s = None if since is None else since_unix_s(since, now_unix_s)
    return DECISIONS_DEFAULT if limit is None else limit, since_seq, DecisionFilter(lever, target, since_s)


def tick_of(query: bytes) -> int | None:
    """``tick`` of a query string; ``None``: it names none. Raises ``GatewayError`` 400."""
    return _whole_number(parse_qs(query.decode("latin-1")), "tick")


def since_unix_s(text: str, now_unix_s: float) -> float:
    """Seconds since 1970 of ``15m`` (so long ago) or of an ISO 8601 time with a zone. Raises ``GatewayError`` 400."""
    if (span := _SPAN.fullmatch(text)) is not None:
        return now_unix_s - float(span[1]) * _SPAN_S[span[2]]
    try:
        parsed = datetime.fromisoformat(text)
        if parsed.tzinfo is not None:
            return parsed.timestamp()
    except (ValueError, OverflowError):
        pass
    raise bad_request("since: must be a span such as 90s, 15m or 2h, or a time such as 2026-11-30T21:15:00Z.", "since")


def _whole_number(fields: dict[str, list[str]], name: str) -> int | None:
    values = fields.get(name)
    if not values:
        return None
    if not (values[-1].isascii() and values[-1].isdigit() and len(values[-1]) <= 18):
        raise bad_request(f"{name}: must be a whole number.", name)
    return int(values[-1])
