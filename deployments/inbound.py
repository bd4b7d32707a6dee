"""One request as it came in, and what of it is sent to a replica.

    body as sent = the client's body + fields of the gateway, spliced in at its end, where they win:
        cache_salt         the tenant's own part of the KV cache
        max_tokens ...     the output limit of a brownout, by the name the endpoint reads: its part for each answer,
                           not below what the client wants at least
        return_token_ids   where a stream could be resumed exactly (``resume.py`` takes the ids out again)

It must not decide whether a request gets in, or is resumed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import msgspec

from deployments.endpoints import Endpoint
from deployments.prompt import choices_of, limit_of, whole_of
from deployments.request_log import RequestRecord
from deployments.resume import Journal, splice
from deployments.resume_plan import ResumePlan
from policies.tasks import NO_LIMITS, TaskLimits, TaskOutcome
from policies.types import Request


@dataclass(slots=True)
class Inbound:
    """See the module."""

    endpoint: Endpoint
    request: Request
    body: bytes
    """As the client sent it."""
    prompt_bytes: int
    record: RequestRecord
    plan: ResumePlan | None = None
    """How a stream would be resumed; ``None``: it cannot be, exactly."""
    cache_salt: str | None = None
    limits: TaskLimits = NO_LIMITS
    outcome: TaskOutcome | None = None
    own_fields: dict[str, Any] = field(default_factory=dict)
    """What the gateway adds to the body; set by :meth:`seal`."""

    def seal(self, output_tokens_cap: int | None) -> bytes:
        """The body as it is sent. Called once, before the first dispatch."""
        own = self.own_fields
        if self.cache_salt is not None:
            own["cache_salt"] = self.cache_salt
        if output_tokens_cap is not None:
            name, limit = _capped(self.endpoint, self.fields(), output_tokens_cap)
            own[name] = limit
            if self.plan is not None:
                self.plan = dataclasses.replace(self.plan, tokens_max=limit)
        sent = splice(self.body, own)
        return splice(sent, {"return_token_ids": True}) if self.plan is not None else sent

    def journal(self) -> Journal | None:
        """The journal of its stream, if it could be resumed."""
        return Journal(self.plan) if self.plan is not None else None

    def fields(self) -> dict[str, Any]:
        """The body's fields, with the gateway's own; parsed again, because it is rarely needed."""
        fields: dict[str, Any] = msgspec.json.decode(self.body)
        return fields | self.own_fields


def _capped(endpoint: Endpoint, fields: dict[str, Any], cap: int) -> tuple[str, int]:
    """Name and value of the limit with which all answers together come to ``cap``."""
    name, own = limit_of(fields, endpoint)
    limit, least = max(1, cap // choices_of(fields, endpoint)), whole_of(fields.get("min_tokens")) or 0
    limit = max(limit, least)  # engines refuse a limit below it
    return name, limit if own is None else min(limit, own)
