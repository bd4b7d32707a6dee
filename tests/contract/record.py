"""Record what a server answers to every contract case.

``python -m tests.contract.record URL MODEL OUT.json [RAW.json]``. Run it once against a real vLLM server of the pinned
version and commit the result. ``RAW.json`` receives the whole answers, to read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx

from tests import loopback
from tests.contract.cases import CASES, MODEL, Case
from tests.contract.shape import answer_shape

TIMEOUT_S = 120.0


def ask(client: httpx.Client, case: Case, model: str) -> httpx.Response:
    """Send one case as it is, without headers of our own."""
    request = client.build_request(case.method, case.path.replace(MODEL, model), content=case.content(model))
    request.headers.update(case.headers)
    return client.send(request)


def ask_shape(client: httpx.Client, case: Case, model: str) -> dict[str, Any]:
    """Shape of the answer to one case."""
    r = ask(client, case, model)
    return answer_shape(r.status_code, r.headers.get("content-type", ""), r.content, case.loose)


def main(url: str, model: str, out: str, raw: str = "") -> None:
    """Ask all cases and write their shapes, one case a line."""
    shapes: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    with loopback.Client(base_url=url, timeout=TIMEOUT_S) as client:
        for case in CASES:
            try:
                r = ask(client, case, model)
            except httpx.HTTPError as error:
                whole[case.name] = {"failed": repr(error)}
                sys.stderr.write(f"{case.name}: {error!r}\n")
                continue
            shapes[case.name] = answer_shape(r.status_code, r.headers.get("content-type", ""), r.content, case.loose)
            whole[case.name] = {"status": r.status_code, "headers": dict(r.headers), "body": r.text[:4_000]}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(shape, sort_keys=True)}" for name, shape in shapes.items())
    Path(out).write_text("{\n" + lines + "\n}\n")
    if raw:
        Path(raw).write_text(json.dumps(whole, indent=1))
    sys.stdout.write(f"{len(shapes)} of {len(CASES)} cases recorded\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
