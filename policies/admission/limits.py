"""Decides whether one gateway takes one more request: bounded in requests and in tokens.

    tokens(request) = prompt_tokens + (output_tokens_max or, when the client names none, output_tokens_estimate)
    admitted        = requests < inflight_requests_max
                      and (nothing in flight or tokens in flight + tokens(request) <= inflight_tokens_max)

A request larger than ``inflight_tokens_max`` is admitted when it would be alone: otherwise it could never run, and one
request cannot be refused for the load that others cause.

A gateway that serves several models has one of these for each, and they bound each other (``peers``): beyond its
even part of a bound a model takes only what all together leave free. So a model whose requests pile up refuses its own,
and never those of another; all together hold less than twice the bound.

What this must not do: queue, look at replicas, or give a share back by itself. The flow that was admitted releases.
"""

from __future__ import annotations

from policies.config import AdmissionConfig
from policies.types import Reason, Request


class Admission:
    """Counts what one gateway holds. Bounded: it never remembers more than ``inflight_requests_max`` requests.

    ``peers``: those of the same gateway's models, this one among them from now on; ``None``: it serves one model.
    """

    def __init__(self, config: AdmissionConfig, peers: list[Admission] | None = None) -> None:
        self._config = config
        self._tokens_of: dict[str, int] = {}
        self._tokens = 0
        self.peers = [] if peers is None else peers
        self.peers.append(self)

    @property
    def requests(self) -> int:
        """Requests admitted and not yet released."""
        return len(self._tokens_of)

    @property
    def tokens(self) -> int:
        """Tokens admitted and not yet released, by the formula of this module."""
        return self._tokens

    def try_admit(self, request: Request) -> Reason | None:
        """Take the request into account and return ``None``, or return the reason why it is refused.

        :raises ValueError: the id is in flight already. Ids are the server's own, so this is a programming error.
        """
        refusal = self.refusal(request)
        if refusal is None:
            self.admit(request)
        return refusal

    def refusal(self, request: Request) -> Reason | None:
        """Why the request does not fit now; ``None``: it does. ``ValueError`` for an id in flight."""
        if request.request_id in self._tokens_of:
            raise ValueError(f"request {request.request_id} is admitted already")
        return self._refusal(request_tokens(self._config, request))

    def admit(self, request: Request) -> None:
        """Take the request into account."""
        tokens = self._tokens_of[request.request_id] = request_tokens(self._config, request)
        self._tokens += tokens

    def release(self, request_id: str) -> None:
        """Give the request's share back. Unknown ids, and a second release, change nothing."""
        self._tokens -= self._tokens_of.pop(request_id, 0)

    def _refusal(self, tokens: int) -> Reason | None:
        requests_max, tokens_max = self._config.inflight_requests_max, self._config.inflight_tokens_max
        models = len(self.peers)
        held = self.requests if models == 1 else sum(peer.requests for peer in self.peers)
        if held >= requests_max and self.requests >= requests_max / models:
            return Reason("inflight_requests", f"{held} requests are in flight, the limit is {requests_max}")
        held = self._tokens if models == 1 else sum(peer.tokens for peer in self.peers)
        if self.requests and held + tokens > tokens_max and self._tokens + tokens > tokens_max / models:
            return Reason(
                "inflight_tokens",
                f"{held} tokens are in flight and this request needs {tokens}, the limit is {tokens_max}",
            )
        return None


def request_tokens(config: AdmissionConfig, request: Request) -> int:
    """Tokens one request may come to: prompt plus the client's output limit, or the configured estimate without one."""
    output_tokens = request.output_tokens_max
    if output_tokens is None:
        output_tokens = config.output_tokens_estimate
    return request.prompt_tokens + output_tokens
