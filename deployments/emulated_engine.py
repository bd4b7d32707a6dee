"""The ``Engine`` deployment with the emulated engine in it, and the same engine as a plain server.

In Ray Serve it stands exactly where vLLM stands: the same :class:`ReplicaHost` with its gate, port, signals, knobs,
health and leaving, the same deployment name and options. ``set_faults`` on the deployment handle changes the script of
a replica while it runs.

``python -m deployments.emulated_engine --port N`` serves the engine alone, without Ray.
"""

from __future__ import annotations

import sys

from deployments.emulation.standalone import main

if __name__ == "__main__":
    sys.exit(main())
