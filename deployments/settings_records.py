"""Settings of what is written down: sections ``recording``, ``ledger`` and ``tracing`` of serve_config.yaml's ``args``.

Part of ``deployments/settings.py``, which checks the whole; import its names from there.
"""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from deployments.settings_engine import Strict


def absolute_path(value: str | None) -> str | None:
    """``value``, if it is an absolute path or ``None``. Raises ``ValueError``."""
    if value is not None and (not value.startswith("/") or "\0" in value):
        raise ValueError("must be an absolute path: processes of Ray have working folders of their own")
    return value


class RecordingSettings(Strict):
    """What gateways and the controller write down for ``replay``: sizes, times, hashes and reports, never text."""

    folder: str | None = Field(default=None, min_length=1, max_length=4_096)
    """Absolute path on each host; off when absent."""
    file_bytes_max: int = Field(default=64_000_000, ge=10_000)
    """A file is closed at this size and the next one begun."""
    files_max: int = Field(default=8, ge=2, le=10_000)
    """Files kept of all gateways of a host together, and as many of its controllers; the oldest goes."""

    @field_validator("folder")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return absolute_path(value)


class LedgerSettings(RecordingSettings):
    """The controller's decisions and what became of them, as JSON lines on disk; ``explain --ledger`` reads them."""

    enabled: bool = True
    folder: str | None = Field(default=None, min_length=1, max_length=4_096)
    """Absolute path on the controller's host; ``None``: the folder ``tidegate_ledger`` beside Serve's own logs."""
    file_bytes_max: int = Field(default=16_000_000, ge=10_000)
    """A file is closed at this size and the next one begun."""
    files_max: int = Field(default=8, ge=2, le=10_000)
    """Files kept; the oldest goes."""


class TracingSettings(Strict):
    """Traces of requests, sent to an OpenTelemetry collector."""

    otlp_endpoint: str | None = Field(default=None, max_length=2_048)
    """Base URL of a collector that takes OTLP over HTTP, such as ``http://127.0.0.1:4318``; off when absent."""
    sample_share: float = Field(default=0.01, ge=0, le=1)
    """Share traced of requests that bring no ``traceparent``; one that comes with a request decides for it."""
    service_name: str = Field(default="tidegate", min_length=1, max_length=128)

    @field_validator("otlp_endpoint")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", value):
            raise ValueError("must be a URL such as http://127.0.0.1:4318, without user, query or fragment")
        return value
