"""Container files pass their lint, and install and copy what the project needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HOSTING = ROOT / "deployments/hosting"
FILES = ("Dockerfile", "anyscale/Containerfile")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=]", name)[0]).lower()


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements/cpu.lock").read_text().splitlines() if "==" in line]
    return {normal(line): line.partition("==")[2] for line in lines}


@pytest.mark.parametrize("name", FILES)
def test_the_lint_finds_nothing(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [str(hadolint), "--no-color", str(HOSTING / name)], capture_output=True, text=True, check=False
    )
    assert done.stdout == ""
    assert done.returncode == 0


def test_the_image_has_every_part_of_the_project_and_runs_as_nobody_special() -> None:
    text = (HOSTING / "Dockerfile").read_text()
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    copied = set(re.findall(r"^COPY (\w+)/ \w+/$", text, re.MULTILINE))
    assert copied == packages
    ignored = (HOSTING / "Dockerfile.dockerignore").read_text().splitlines()
    sources = {word.rstrip("/") for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for word in line.split()}
    assert {f"!{source}" for source in sources} == {line for line in ignored if line.startswith("!")}
    assert all((ROOT / source).exists() for source in sources)
    assert "USER 1000:1000" in text, "KubeRay's runAsNonRoot wants a number"


def test_anyscales_image_installs_what_the_project_names_in_the_locked_versions() -> None:
    text = (HOSTING / "anyscale/Containerfile").read_text()
    found = dict(re.findall(r"([\w.-]+)(?:\[\w+\])?==([\w.+]+)", text))
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["gpu"]
    assert {normal(name) for name in found} == {normal(name) for name in wanted}
    locked = pins()
    assert {name: version for name, version in found.items() if locked.get(normal(name), version) != version} == {}


def test_versions_of_ray_agree() -> None:
    (ray,) = [item.partition("==")[2] for item in PROJECT["optional-dependencies"]["gpu"] if item.startswith("ray[")]
    for path in [*HOSTING.glob("kuberay/*.yaml"), HOSTING / "anyscale/Containerfile"]:
        for found in re.findall(r"rayVersion: (\S+)|anyscale/ray:([\d.]+)", path.read_text()):
            assert "".join(found) == ray, path.name


@pytest.mark.slow
def test_the_script_for_haproxy_is_written_and_leaves_ports_open(tmp_path: Path) -> None:
    script = tmp_path / "haproxy"
    command = [sys.executable, "-m", "deployments.haproxy", str(script)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    assert script.stat().st_mode & 0o100
    config = tmp_path / "haproxy.cfg"
    config.write_text("defaults\n    mode http\nfrontend prometheus\n    bind :9101\n")
    real = tmp_path / "real"
    real.write_text("#!/bin/sh\nexit 0\n")
    real.chmod(0o700)
    lines = script.read_text().splitlines()
    script.write_text("\n".join(f"exec {real} -dS" if line.startswith("exec ") else line for line in lines) + "\n")
    subprocess.run([str(script), "-db", "-f", str(config)], check=True)
    assert "    bind :9101" in config.read_text()
    assert "timeout http-request" in config.read_text()
