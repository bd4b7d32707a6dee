"""The clients: they send requests, lose patience, repeat, leave in the middle, and go on when an answer is there.

Open-loop arrivals are read one by one as time goes on; a closed loop's next requests come from ``Source.follow_ups``
when one ends. A balancer gives tries to gateways in turn. One request of a client is one row, whatever happened to it:
times count from its first try, bytes are those of its last.

    refused, failed, out of patience: repeated up to ``retries_max`` times, after a pause of half to one and a half of
    ``retry_pause_ms`` or ``Retry-After``, whichever is longer
    left in the middle of the answer: never repeated

What this must not do: know of replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random

from autoscaling.simulator.context import Ask, Call, Context, ns
from autoscaling.simulator.gateway import Gateway
from autoscaling.simulator.records import Records, Row
from autoscaling.simulator.spec import SimRequest, Source
from policies.events import Finish, Outcome


class SourceError(ValueError):
    """A source made requests that cannot be."""


class Clients:
    """See the module."""

    def __init__(self, ctx: Context, source: Source, gateways: Sequence[Gateway]) -> None:
        self.records = Records()
        self._ctx = ctx
        self._source = source
        self._gateways = gateways
        self._turn = 0
        self._open: dict[Ask, Call | None] = {}
        """Requests on their way, oldest first."""
        self._coming = 0
        """Requests that will be sent for the first time."""
        self._arrivals: Iterator[SimRequest] = iter(())
        self._last_ns = 0
        """The last arrival so far."""
        self._deadline_ns = -1

    def begin(self) -> None:
        """Read the first arrival."""
        self._arrivals = iter(self._source.arrivals())
        self._read()
        self._look_if_over(0)

    @property
    def open(self) -> int:
        """Requests that were made and are not over."""
        return len(self._open)

    # --- sending ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Fetch the next open-loop arrival."""
        request = next(self._arrivals, None)
        if request is not None and self._expect(request, self._last_read_ns()):
            self._ctx.queue.at(request.arrival_ns + self._ctx.delays.entry, self._on_arrival, request)

    def _last_read_ns(self) -> int:
        return max(0, self._ctx.queue.now_ns - self._ctx.delays.entry)

    def _expect(self, request: SimRequest, earliest_ns: int) -> bool:
        """Whether ``request`` will be made; raises :class:`SourceError` when it cannot be."""
        if request.arrival_ns < earliest_ns:
            raise SourceError(
                f"{self._source.name}: request {request.index} arrives at {request.arrival_ns} ns, before "
                f"{earliest_ns} ns: arrivals must grow"
            )
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise SourceError(f"{self._source.name}: request {request.index} has no prompt or no output tokens")
        duration_ns = self._ctx.scenario.duration_ns
        if duration_ns is not None and request.arrival_ns > duration_ns:
            return False
        self._coming += 1
        self._last_ns = max(self._last_ns, request.arrival_ns)
        return True

    def _on_arrival(self, now_ns: int, request: SimRequest) -> None:
        self._read()  # first: a request that is refused at once must not look like the last one
        self._begin(now_ns, request)
        self._look_if_over(now_ns)

    def _on_follow_up(self, now_ns: int, request: SimRequest) -> None:
        self._begin(now_ns, request)

    def _begin(self, now_ns: int, request: SimRequest) -> None:
        self._coming -= 1
        self._ctx.counters["requests"] += 1
        ask = Ask(request)
        share = self._ctx.scenario.clients.abort_share
        if share:
            rng = self._rng(ask)
            if rng.random() < share:
                ask.leave_tokens = 1 + int(rng.random() * request.output_tokens)
        self._open[ask] = None
        self._send(now_ns, ask)

    def _rng(self, ask: Ask) -> Random:
        if ask.rng is None:
            ask.rng = self._ctx.rng(f"client/{ask.request.index}")
        return ask.rng

    def _send(self, now_ns: int, ask: Ask) -> None:
        """``ask`` is at the next gateway."""
        ask.tries += 1
        gateway = self._gateways[self._turn]
        self._turn = (self._turn + 1) % len(self._gateways)
        self._open[ask] = None
        call = gateway.receive(now_ns, ask)
        patience_ms = self._ctx.scenario.clients.patience_ms
        if call.flow.done:
            return
        self._open[ask] = call
        if patience_ms is not None:
            self._ctx.queue.at(max(now_ns, ask.sent_ns + ns(patience_ms)), self._on_impatient, call)

    def _on_impatient(self, now_ns: int, call: Call) -> None:
        client_ns = self._ctx.delays.client
        seen = call.first_byte_ns is not None and call.first_byte_ns + client_ns <= now_ns
        if seen or call.flow.done or call.gone_ns is not None:
            return
        call.gone_ns, call.gone_why = now_ns, "gave_up"
        self._ctx.queue.at(now_ns + client_ns, call.gateway.gone, call)

    # --- the end of a call --------------------------------------------------------------------------------------------

    def ended(self, call: Call, finish: Finish, now_ns: int) -> None:
        """A gateway is done with ``call``."""
        ask, clients = call.ask, self._ctx.scenario.clients
        outcome, reason = finish.outcome, finish.reason.code
        end_ns = now_ns + self._ctx.delays.client
        if call.gone_ns is not None:
            outcome, reason, end_ns = Outcome.CANCELLED, call.gone_why, call.gone_ns
        own_fault = reason == "engine_client_error"
        again = (outcome in (Outcome.REFUSED, Outcome.FAILED) and not own_fault) or call.gone_why == "gave_up"
        if again and call.may_retry and ask.tries <= clients.retries_max:
            self._ctx.counters["client_retries"] += 1
            pause_ns = ns(clients.retry_pause_ms * (0.5 + self._rng(ask).random()))
            ask.sent_ns = max(end_ns, now_ns) + max(pause_ns, call.retry_after_ns)
            self._ctx.queue.at(ask.sent_ns + self._ctx.delays.entry, self._send, ask)
            return
        self._over(ask, call, outcome.value, reason, end_ns)
        follow_ups = self._source.follow_ups(ask.request, outcome is Outcome.SUCCEEDED, end_ns)
        for request in follow_ups:
            if self._expect(request, end_ns):
                at_ns = max(now_ns, request.arrival_ns + self._ctx.delays.entry)
                self._ctx.queue.at(at_ns, self._on_follow_up, request)
        self._look_if_over(now_ns)

    def _over(self, ask: Ask, call: Call | None, outcome: str, reason: str, end_ns: int) -> None:
        del self._open[ask]
        self._ctx.counters[outcome] += 1
        request = ask.request
        attempt = call.attempt if call is not None else None
        ttft_ms = math.nan
        if call is not None and call.first_byte_ns is not None and call.gone_why != "gave_up":
            ttft_ms = (call.first_byte_ns + self._ctx.delays.client - request.arrival_ns) / 1e6
        self.records.add(
            Row(
                index=request.index,
                arrival_ns=request.arrival_ns,
                prompt_tokens=request.prompt_tokens,
                output_tokens=call.delivered if call is not None else 0,
                cached_tokens=attempt.cached_tokens if attempt is not None else 0,
                ttft_ms=ttft_ms,
                e2e_ms=(end_ns - request.arrival_ns) / 1e6,
                outcome=outcome,
                reason=reason,
                attempts=ask.attempts,
                tries=ask.tries,
                replica=attempt.replica.id if attempt is not None else "",
                tenant=request.tenant,
                task=request.task,
                task_last=request.task_last,
            )
        )

    # --- the end of the run -------------------------------------------------------------------------------------------

    def _look_if_over(self, now_ns: int) -> None:
        """Plan the end once nothing comes any more: when all is answered, or when the time for that is over."""
        if self._coming:
            return
        scenario, queue = self._ctx.scenario, self._ctx.queue
        if not self._open:
            queue.at(now_ns + scenario.settle_ns, self._on_over)
            return
        deadline_ns = max(now_ns, self._last_ns + scenario.drain_ns_max)
        if deadline_ns != self._deadline_ns:
            self._deadline_ns = deadline_ns
            queue.at(deadline_ns, self._on_deadline, deadline_ns)

    def _on_over(self, now_ns: int, _: object) -> None:  # noqa: ARG002 - an event's arguments
        self._ctx.queue.over = True

    def _on_deadline(self, now_ns: int, deadline_ns: int) -> None:  # noqa: ARG002 - an event's arguments
        if deadline_ns == self._deadline_ns and not self._coming:
            self._ctx.queue.over = True

    def give_up(self, now_ns: int) -> None:
        """The run is over: what is open is lost."""
        for ask, call in list(self._open.items()):
            self._over(ask, call, "lost", "run_ended", now_ns)
