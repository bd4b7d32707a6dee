"""One request over two replicas: the prompt is computed at one, the answer written at another that pulls its KV cache.

    route: rank -> split? --no--> as it is
                     yes -> prefill replica: the same body, one token, not streamed
                            <- kv_transfer_params: engine, blocks, address of the blocks
                            rank again, without a prompt to compute -> decode replica
    send:  body + kv_transfer_params -> decode replica; its engine pulls the blocks (NIXL), then writes

``policies/split.py`` decides. Whatever goes wrong on the way, the request goes on whole: a prefill replica that
refuses, breaks off, answers with an error or takes longer than ``prefill_timeout_ms``; a decode replica that answers
with an error, or streams nothing within ``pull_timeout_ms`` (of an answer in one piece, whose first byte is its last:
once its prefill replica is gone as well). A decode engine that cannot pull computes the prompt itself
(``kv_load_failure_policy``, ``kv_transfer.py``). Blocks that nobody pulls are freed after ``lease_s``.

It must not decide, nor retry at another replica: that is the flow's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from deployments.attempt import Dispatched
from deployments.clock import now_ns
from deployments.endpoints import Endpoint
from deployments.prompt import choices_of
from deployments.relay import usage_of
from deployments.resume_plan import CHAT_PATH, COMPLETIONS_PATH, splice
from deployments.upstream import UpstreamBrokenError
from policies.events import Event, RefusalKind, ReplicaRefused, ResponseStarted, Usage
from policies.objectives import objectives_for
from policies.split import SplitChoice, SplitCode, begun, decide, decode_first, handed_over, without_prompt
from policies.types import ReplicaId, RouteChoice

if TYPE_CHECKING:
    from deployments.core import GatewayCore
    from deployments.inbound import Inbound

PARAMS = "kv_transfer_params"
"""Field of requests and answers in which engines name blocks to each other. Never the client's to set."""
LEG_BYTES_MAX = 4_000_000
"""Of a prefill replica's answer: ids of blocks, a few bytes for each."""
_DROPPED = (
    "stream_options", "n", "best_of", "min_tokens", "logprobs", "top_logprobs", "response_format", "structured_outputs",
    "return_token_ids", "max_completion_tokens", "logprob_token_ids",
)  # fmt: skip
"""Fields that say nothing about the prompt."""
_NO_BLOCKS = {"do_remote_decode": False, "do_remote_prefill": False}
"""Nothing to keep, nothing to pull. Not ``null``: vLLM then takes what the client's ``vllm_xargs`` have by the name of
:data:`PARAMS`, and an engine whose connector finds a text there ends."""


class Handoff:
    """See the module. One for each request."""

    def __init__(self, core: GatewayCore, inbound: Inbound) -> None:
        self._core = core
        self._inbound = inbound
        self._config = core.policies.config.disaggregation
        self._params: Mapping[str, Any] | None = None
        """Of the blocks that wait at the prefill replica."""
        self._prefill_id: ReplicaId = ""
        self._cached_there = 0
        """Prompt tokens that the prefill replica had and did not compute."""

    # --- the first leg ------------------------------------------------------------------------------------------------

    async def route(self, exclude: frozenset[ReplicaId]) -> RouteChoice:
        """Where the request goes. Computes its prompt at a prefill replica first, where that is decided."""
        core, request, record = self._core, self._inbound.request, self._inbound.record
        choice = await core.route(request, exclude)
        if not self._config.enabled:
            return choice
        prefill = core.membership.prefill()
        if exclude or record.split_code or not choice.tiers:
            return decode_first(choice, prefill)
        objectives = objectives_for(core.policies.config, core.settings.model.name, request.priority)
        split = decide(choice, prefill, request, self._config.uncached_tokens_min, objectives.ttft_ms)
        if split.prefill_id is None:
            self._note(split.code)
            return split.choice
        fields = self._inbound.fields()
        if not suits(fields, self._inbound.endpoint):
            self._note(SplitCode.UNSUITED)
            return split.choice
        there_ms = choice.predicted_ttft_ms.get(split.prefill_id)
        if core.policies.flow_context.admission.too_late(request, there_ms, now_ns()) is not None:
            self._note(SplitCode.BUSY)  # whole, the flow says whether it may still be served
            return split.choice
        failed = await self._compute(split, split.prefill_id, fields)
        if failed is not None:
            self._note(failed)
            return begun(decode_first(await core.route(request, frozenset({split.prefill_id})), prefill))
        self._note(SplitCode.SPLIT)
        return handed_over(await core.route(without_prompt(request), exclude), prefill, request)

    async def _compute(self, split: SplitChoice, prefill_id: ReplicaId, fields: dict[str, Any]) -> SplitCode | None:
        """The first leg; why it failed, or ``None``. Whatever ends it gives its counts and its connection back."""
        core, request, record = self._core, self._inbound.request, self._inbound.record
        ctx, target = core.policies.flow_context, core.membership.targets.get(prefill_id)
        if target is None:
            return SplitCode.PREFILL_FAILED
        body = leg_body(fields, self._inbound.cache_salt)
        entry, sent_ns = f"{request.request_id}/prefill", now_ns()
        ctx.count_dispatch(entry, request, split.choice, prefill_id, sent_ns)
        core.meter.dispatched(split.choice, prefill_id, request.prompt_tokens)
        attempt = Dispatched(core, prefill_id, target, record.sent(prefill_id, sent_ns))
        failed: SplitCode | None = SplitCode.PREFILL_FAILED
        event: Event | None = None
        try:
            async with asyncio.timeout(self._config.prefill_timeout_ms / 1_000):
                event = await attempt.open(self._inbound.endpoint.path, body, request.request_id, record.trace)
                if isinstance(event, ResponseStarted) and event.status == 200:
                    answer = await attempt.exchange.read_all(LEG_BYTES_MAX)
                    self._params, self._cached_there = params_of(answer), usage_of(answer).cached_tokens or 0
            if self._params is not None:
                failed, self._prefill_id = None, prefill_id
        except TimeoutError:
            failed, event = SplitCode.PREFILL_TIMEOUT, None
        except UpstreamBrokenError as error:
            event = attempt.broken(error)
        except asyncio.CancelledError:
            ctx.health.withdrew(prefill_id, now_ns())
            raise
        finally:
            attempt.exchange.close()
            attempt.record.close(now_ns(), "prefill" if failed is None else attempt.failed_why or failed.value)
            if failed is None:
                ctx.first_byte(entry)
            ctx.released(entry, failed=failed is not None)
        self._judge(prefill_id, event, sent_ns, split.choice)
        if failed is None:
            record.prefill_id = prefill_id
            core.meter.prefilled(now_ns() - sent_ns)
        return failed

    def _judge(self, prefill_id: ReplicaId, event: Event | None, sent_ns: int, choice: RouteChoice) -> None:
        """Tell what this says of the replica."""
        health, request, at_ns = self._core.policies.flow_context.health, self._inbound.request, now_ns()
        if isinstance(event, ResponseStarted) and event.status < 500:
            predicted_ms = choice.predicted_ttft_ms.get(prefill_id)
            tells = event.status == 200 and request.stream
            ttft_ms = (at_ns - sent_ns) / 1e6 if tells else None
            health.answered(prefill_id, at_ns, ttft_ms, predicted_ms if tells else None)
        elif isinstance(event, ReplicaRefused):
            draining = event.kind is RefusalKind.DRAINING
            health.withdrew(prefill_id, at_ns) if draining else health.failed(prefill_id, 0, at_ns)
        else:
            health.failed(prefill_id, request.fingerprint, at_ns)

    # --- the second leg -----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Blocks wait to be pulled by the next replica the request is sent to."""
        return self._params is not None

    async def send(
        self, attempt: Dispatched, path: str, body: bytes, begin: Callable[[ReplicaId, bool], Dispatched | None]
    ) -> tuple[Dispatched, Event]:
        """Send ``body`` with the blocks it may pull; where that comes to nothing, without, to the same replica.

        ``begin`` makes an attempt at a replica. Returns the attempt that counts, and its event.
        """
        params, self._params = self._params, None
        request, trace = self._inbound.request, self._inbound.record.trace
        if attempt.replica_id == self._prefill_id:  # it has them
            return attempt, await attempt.open(path, body, request.request_id, trace)
        pulling = asyncio.ensure_future(
            attempt.open_and_read(path, splice(body, {PARAMS: params}), request.request_id, trace)
        )
        try:
            event = await self._pulled(pulling)
        finally:
            if not pulling.done():
                pulling.cancel()
                attempt.exchange.close()
        if event is not None and not (isinstance(event, ResponseStarted) and event.status >= 400):
            return attempt, event
        code = SplitCode.PULL_TIMEOUT if event is None else SplitCode.PULL_FAILED
        attempt.exchange.close()
        attempt.record.close(now_ns(), code.value)
        self._note(code)
        again = begin(attempt.replica_id, False)
        if again is None:
            return attempt, ReplicaRefused(RefusalKind.CONNECT)
        try:
            return again, await again.open(path, body, request.request_id, trace)
        except asyncio.CancelledError:
            again.exchange.close()
            raise

    async def _pulled(self, pulling: asyncio.Future[Event]) -> Event | None:
        """What the decode replica answers; ``None``: nothing in time."""
        while True:
            done, _ = await asyncio.wait({pulling}, timeout=self._config.pull_timeout_ms / 1_000)
            if done:
                return pulling.result()
            if self._inbound.request.stream or not self._core.policies.fleet.takes(self._prefill_id, now_ns()):
                return None

    def spent(self, usage: Usage) -> Usage:
        """The answer is complete: did its engine pull? ``usage`` as it is counted and charged.

        To the decode engine all that it pulled is cached; the prefill replica computed it all the same.
        """
        if self._inbound.record.split_code != SplitCode.SPLIT or usage.cached_tokens is None:
            return usage
        if usage.cached_tokens == 0:
            self._note(SplitCode.RECOMPUTED)
        return replace(usage, cached_tokens=min(usage.cached_tokens, self._cached_there))

    def _note(self, code: SplitCode) -> None:
        """What became of the request. A fallback takes the place of ``split``; all are counted."""
        self._inbound.record.split_code = code.value
        self._core.meter.split_as(code)


def no_params(endpoint: Endpoint) -> dict[str, Any]:
    """What is written over a client's own, with which engines would keep blocks for nobody or ask any address."""
    return {PARAMS: _NO_BLOCKS} if endpoint.generates else {}


def suits(fields: Mapping[str, Any], endpoint: Endpoint) -> bool:
    """Whether a request's cache can be handed over: one prompt, one answer, at an endpoint whose answers carry it.

    Not one that the engine is to cut: ``truncate_prompt_tokens: -1`` cuts it to what ``max_tokens`` leaves, which is
    more for the one token of the first leg. The blocks would be those of another prompt.
    """
    if endpoint.path not in (CHAT_PATH, COMPLETIONS_PATH) or choices_of(dict(fields), endpoint) != 1:
        return False
    if any(fields.get(name) for name in ("best_of", "echo", "use_beam_search")):
        return False
    if any(fields.get(name) is not None for name in ("prompt_logprobs", "truncate_prompt_tokens")):
        return False
    return fields.get("tool_choice") in (None, "auto", "none")


def leg_body(fields: Mapping[str, Any], cache_salt: str | None) -> bytes:
    """The body of the first leg: the same prompt, one token of answer, blocks kept for whoever pulls them."""
    leg = {name: value for name, value in fields.items() if name not in _DROPPED}
    if cache_salt is not None:
        leg["cache_salt"] = cache_salt
    leg |= {"stream": False, "max_tokens": 1, PARAMS: {"do_remote_decode": True, "do_remote_prefill": False}}
    return msgspec.json.encode(leg)


def params_of(answer: bytes) -> Mapping[str, Any] | None:
    """What a prefill replica's answer says of its blocks; ``None``: there are none to pull."""
    try:
        params = msgspec.json.decode(answer)[PARAMS]
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
    return params if isinstance(params, dict) and params.get("do_remote_prefill") else None
