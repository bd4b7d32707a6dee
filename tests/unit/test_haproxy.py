"""The script that stands before HAProxy, run with a real configuration and, for its syntax, the real HAProxy."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deployments.haproxy import BINARY, HEAD_S_MAX, real_haproxy, stand_before, write_script

CONFIG = """global
    maxconn 10
defaults
    mode http
    timeout connect 5s
    timeout client 5s
    timeout server 5s
frontend prometheus
    bind :9101
    default_backend b
frontend http_frontend
    bind *:8000
    default_backend b
backend b
listen stats
  bind *:8404
  stats enable
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "haproxy.cfg"
    path.write_text(CONFIG)
    return path


def _run(folder: Path, binary: str, config: Path, *more: str) -> subprocess.CompletedProcess[str]:
    script = folder / "haproxy"
    write_script(script, binary, (8404, 9101))
    return subprocess.run([str(script), "-db", "-f", str(config), *more], capture_output=True, text=True, check=False)


def test_operators_ports_go_to_loopback_and_the_front_stays(tmp_path: Path, config: Path) -> None:
    done = _run(tmp_path, "/bin/echo", config, "-sf", "7")
    assert done.stdout == f"-dS -db -f {config} -sf 7\n"
    binds = [line.split()[1] for line in config.read_text().splitlines() if "bind" in line]
    assert binds == ["127.0.0.1:9101", "*:8000", "127.0.0.1:8404"]


def test_the_head_of_a_request_gets_a_time_limit(tmp_path: Path, config: Path) -> None:
    _run(tmp_path, "/bin/echo", config)
    assert f"defaults\n    timeout http-request {HEAD_S_MAX}s\n    mode http\n" in config.read_text()


def test_serves_template_has_the_lines_that_are_changed() -> None:
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE as TEMPLATE

    assert "\ndefaults\n" in TEMPLATE
    assert "timeout http-request" not in TEMPLATE.split("\ndefaults\n")[1].split("{%")[0]
    assert "    bind :{{ config.metrics_port }}\n" in TEMPLATE


def test_serves_processes_are_told_of_the_script_and_a_binary_of_ones_own_stays_behind_it(tmp_path: Path) -> None:
    environment = {BINARY: "/bin/echo"}
    stand_before(environment, tmp_path, (8404, 9101))
    assert environment == {BINARY: str(tmp_path / "haproxy")}
    assert "exec /bin/echo -dS" in (tmp_path / "haproxy").read_text()


def test_haproxy_takes_the_changed_file(tmp_path: Path, config: Path) -> None:
    binary = real_haproxy()
    if binary is None:
        pytest.skip("no HAProxy here")
    done = _run(tmp_path, binary, config, "-c")
    assert done.returncode == 0, done.stderr
