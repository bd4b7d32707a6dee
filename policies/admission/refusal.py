"""Why a request does not get in, in the words its client is told. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

RATE_LIMIT = "rate_limit_error"
"""Type of errors that end by themselves: come again after ``Retry-After``."""

QUOTA = "insufficient_quota"
"""Type of errors that do not end by waiting a little: a budget is spent."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal."""

    code: str
    """Stable, one of few: labels metrics, and is the ``code`` of the error body."""
    text: str
    """For people; begins small and ends without a full stop."""
    type: str = RATE_LIMIT
    status: int = 429
    retry_after_s: float | None = None
    """``None``: coming again does not help, or nobody knows when it would."""
    should_retry: bool | None = None
    """Told to clients' libraries; ``None``: their own rule."""
