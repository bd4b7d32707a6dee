"""A gateway of which only the answers are there: what commands in a terminal are tested against."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """Answers with JSON and prints nothing; what it answers is its subclass's."""

    def send(self, status: int, value: Any) -> None:
        """Send ``value`` as the whole answer."""
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class's name)
        pass


def listening(handler: type[JsonHandler]) -> Iterator[str]:
    """Serve with ``handler`` on a free port of loopback until the fixture ends; yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
