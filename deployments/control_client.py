"""Asks a running gateway for ``/control/...``: what the commands of ``control_commands.py`` are built on.

One request, one answer, no retries: an operator sees what happened. The key goes into a header and nowhere else; an
error is :class:`ControlError` with words for the terminal.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from deployments.keys import hide_keys

TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 64_000_000
"""More is not read."""


class ControlError(Exception):
    """The gateway cannot be asked, or refused; the message is for people. ``status``: of an HTTP answer, else 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ControlClient:
    """One gateway. ``url`` is its base, such as ``http://127.0.0.1:8000``; questions are about ``model``."""

    def __init__(self, url: str, key: str | None, model: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ControlError(f"--url {url}: must begin with http:// or https://")
        self._url = url.rstrip("/")
        self._key = key
        self._query = "" if model is None else urllib.parse.urlencode({"model": model})

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer to GET ``path``; values of ``query`` that are ``None`` are left out."""
        given = {name: value for name, value in (query or {}).items() if value is not None}
        return self._ask("GET", path + ("?" + urllib.parse.urlencode(given) if given else ""), None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to POST; fields of ``body`` that are ``None`` are left out."""
        given = {name: value for name, value in body.items() if value is not None}
        return self._ask("POST", path, json.dumps(given).encode())

    def delete(self, path: str) -> Any:
        """The JSON answer to DELETE."""
        return self._ask("DELETE", path, None)

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        headers = {} if body is None else {"content-type": "application/json"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        try:
            if self._query:
                path += ("&" if "?" in path else "?") + self._query
            request = urllib.request.Request(self._url + path, data=body, headers=headers, method=method)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.loads(answer.read(ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            raise ControlError(_words(error), error.code) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise ControlError(f"{self._url} cannot be asked: {hide_keys(str(why))}; is Tidegate up? (--url)") from None


def _words(error: urllib.error.HTTPError) -> str:
    """The gateway's own message, and what to do about the usual ones."""
    try:
        message = str(json.loads(error.read(1_000_000))["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        message = f"the gateway answered with status {error.code}"
    if error.code == 401:
        message += " Set TIDEGATE_API_KEY, or give --key-file."
    if error.code == 403:
        message += " Make one: python -m deployments.cli keys create --scope control:read --scope control:write"
    return message
