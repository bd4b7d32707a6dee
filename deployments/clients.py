"""Who may talk to the gateway, until there are API keys: clients of this host only, unless the settings say ``any``.

Loopback rule, all of it for every request:

* the peer is this host: a loopback address, or the very address the connection came in on (only this host can connect
  to itself from it; Serve's HAProxy reaches a replica this way);
* Serve's HTTP front is bound to loopback. With HAProxy a gateway's own port listens on all interfaces and HAProxy
  hides the client's address, so a front that others can reach makes every peer look local: then all are refused;
* the ``Host`` header names this host, so that a web page elsewhere cannot reach the API through a browser by pointing
  its own name at 127.0.0.1.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from deployments.errors import GatewayError

_LOCAL_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


def is_loopback(host: str) -> bool:
    """Whether ``host`` (an address or a name of this host) is loopback."""
    if host.lower().rstrip(".") in _LOCAL_NAMES:
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def host_name(header: bytes) -> str:
    """The name or address in a ``Host`` header, without its port."""
    text = header.decode("latin-1").strip()
    if text.startswith("["):
        return text[1:].split("]", 1)[0]
    return text.rsplit(":", 1)[0] if text.count(":") == 1 else text


def check_site(headers: Mapping[bytes, bytes]) -> None:
    """Refuse what a browser sends for a page of another site: where there are no keys, that page would be the operator.

    Browsers say so themselves (``Sec-Fetch-Site``), to this host even without TLS; other clients send no such header.

    Raises:
        GatewayError: 403.
    """
    if headers.get(b"sec-fetch-site", b"none") not in {b"none", b"same-origin"}:
        raise _forbidden("Nothing is changed for pages of other sites.")


class ClientRule:
    """Decides for each connection whether it is answered."""

    def __init__(self, clients: str, front_host: str) -> None:
        self._any = clients == "any"
        self._front_host = front_host
        self._front_open = not self._any and not is_loopback(front_host)

    @property
    def closed_reason(self) -> str | None:
        """Why every request is refused, naming the settings to change; ``None`` when the rule can be applied."""
        if not self._front_open:
            return None
        return (
            f"gateway.clients is 'loopback' but Serve's HTTP front listens on {self._front_host or 'all interfaces'}: "
            "set http_options.host to 127.0.0.1, or gateway.clients to 'any' to answer every client"
        )

    def refusal(self, scope: Mapping[str, Any], host: bytes | None) -> GatewayError | None:
        """The error for a client that is not answered; ``None`` for one that is."""
        if self._any:
            return None
        if self._front_open:
            return _forbidden(f"This server answers no client: {self.closed_reason}.")
        if not _is_this_host(scope):
            return _forbidden("This server answers clients on its own host only.")
        if host is not None and not self._names_this_host(host, scope):
            return _forbidden("This server answers requests for its own host only; the Host header names another.")
        return None

    def _names_this_host(self, header: bytes, scope: Mapping[str, Any]) -> bool:
        name = host_name(header)
        return is_loopback(name) or name == _address(scope, "server")


def _is_this_host(scope: Mapping[str, Any]) -> bool:
    client = _address(scope, "client")
    return client is not None and (is_loopback(client) or client == _address(scope, "server"))


def _address(scope: Mapping[str, Any], side: str) -> str | None:
    pair = scope.get(side)
    return str(pair[0]) if pair else None


def _forbidden(message: str) -> GatewayError:
    return GatewayError(403, "permission_error", "client_not_allowed", message)
