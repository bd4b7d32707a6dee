"""The last requests of this gateway that are over, for ``GET /control/requests/<id>``: where each went, and why.

A ring in memory: what its log line says, and the words with which routing chose its replica. Like the line it holds no
text of prompts, answers or engines. A request that was refused before it was known who asks is not kept: nobody
without a key shall push out what others look for.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from deployments.errors import GatewayError
from deployments.request_log import RequestRecord
from policies.types import Reason

KEPT = 1_000
"""Requests that are kept, about 1.5 KB each."""


class RecentRequests:
    """See the module. ``gateway_id`` is told in every answer: of several gateways only the one that answered knows."""

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        self._kept: OrderedDict[str, tuple[RequestRecord, Reason | None]] = OrderedDict()

    def put(self, record: RequestRecord, routed: Reason | None = None) -> None:
        """``record`` is over; ``routed`` is why its last replica was chosen, ``None`` where none was."""
        if not record.tenant:
            return
        self._kept[record.request_id] = record, routed
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def show(self, request_id: str) -> dict[str, Any]:
        """One request. Raises ``GatewayError`` 404 when it is not here."""
        found = self._kept.get(request_id)
        if found is None:
            message = (
                f"Gateway {self._gateway_id} does not have this request among its last {KEPT:,}: it is not over, too "
                "old, or was another gateway's. Where there are several, ask again; the gateways' logs have them all."
            )
            raise GatewayError(404, "invalid_request_error", "request_not_found", message)
        record, routed = found
        line = record.line()
        del line["event"]
        why = None if routed is None else {"code": routed.code, "text": routed.text}
        return {"object": "request", **line, "routed": why, "gateway": self._gateway_id}
