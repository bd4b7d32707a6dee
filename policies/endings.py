"""How requests end: the words of their errors, and which of them are load.

What this must not do: decide that one ends.
"""

from __future__ import annotations

from policies.admission.refusal import Refusal
from policies.events import Outcome, SendError, SendStreamError

_OWN_LIMITS = ("tenant_", "task_", "budget_", "quarantined", "deadline_unreachable")
_CLIENT_FAULTS = frozenset({"engine_client_error"})
"""Failures that the request itself is to blame for."""


def is_demand(outcome: Outcome, reason_code: str) -> bool:
    """Whether a request that ended counts as load that more replicas could have served.

    One that was refused by a limit of its own tenant or task does not, however many there are.
    """
    return outcome is not Outcome.REFUSED or not reason_code.startswith(_OWN_LIMITS)


def is_fault(outcome: Outcome, reason_code: str) -> bool:
    """Whether a request ended without success for a fault of ours, as availability counts them."""
    return outcome is Outcome.FAILED and reason_code not in _CLIENT_FAULTS


def refusal_error(refusal: Refusal) -> SendError:
    """The error of a request that did not get in."""
    message = f"The request was refused: {refusal.text}."
    if refusal.retry_after_s is not None:
        message += " Try again later."
    return SendError(refusal.status, refusal.type, refusal.code, message, refusal.retry_after_s, refusal.should_retry)


def server_error(
    status: int, code: str, why: str, retry_after_s: float | None = None, should_retry: bool | None = None
) -> SendError:
    """The error of a request that got in and could not be served; its client has seen no byte."""
    message = f"The request could not be served: {why}."
    return SendError(status, "server_error", code, message, retry_after_s, should_retry)


def broken_stream(why: str) -> SendStreamError:
    """The end of a response that was begun and cannot go on."""
    return SendStreamError("server_error", "stream_broken", f"The response is incomplete: {why}.")
