"""Raw bytes to a port, and what comes back."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
from enum import Enum, auto

STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


class End(Enum):
    """What the client does after its last byte."""

    WAIT = auto()
    """Keeps the connection and reads."""
    HALF = auto()
    """Says that it sends no more, and reads."""
    CLOSE = auto()
    """Leaves."""
    RESET = auto()
    """Leaves without a word."""


def connect(port: int, timeout_s: float = 1.0) -> socket.socket:
    """A connection to a port of this machine."""
    return socket.create_connection(("127.0.0.1", port), timeout_s)


def send(port: int, *parts: bytes, end: End = End.WAIT, quiet_s: float = 1.0, bytes_max: int = 1_000_000) -> bytes:
    """Send ``parts`` and return the answer: until the server closes, is quiet for ``quiet_s``, or has said enough."""
    found = b""
    with connect(port, quiet_s) as sock, contextlib.suppress(OSError):
        with contextlib.suppress(OSError):  # it may refuse before it has read all: its answer counts
            for part in parts:
                sock.sendall(part)
            if end is End.HALF:
                sock.shutdown(socket.SHUT_WR)
        if end is End.RESET:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if end in (End.CLOSE, End.RESET):
            return b""
        while len(found) < bytes_max and (more := sock.recv(65_536)):
            found += more
    return found


def statuses(answer: bytes) -> list[int]:
    """The status of each response in ``answer``."""
    return [int(code) for code in STATUS.findall(answer)]


def request(head: str, *headers: str, body: bytes = b"") -> bytes:
    """An HTTP/1.1 request with a ``host`` header."""
    return "\r\n".join([f"{head} HTTP/1.1", "host: localhost", *headers]).encode("latin-1") + b"\r\n\r\n" + body
