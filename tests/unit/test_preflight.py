from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from deployments import preflight
from deployments.cluster import Ports
from deployments.preflight import Finding, Holder, Level, Machine, Needs, judge, measure, packages_for
from deployments.settings import Settings

GIB = preflight.GIB
GOOD = Machine(
    python=(3, 11),
    packages_missing=(),
    ports_busy={},
    ray_heads=(),
    memory_bytes_free=32 * GIB,
    disk_bytes_free=100_000_000_000,
    disk_used_share=0.5,
    disk_path="/tmp",
    cores=8,
    files_max=65_536,
)


def needs(**model: Any) -> Needs:
    settings = Settings.load({"model": {"engine_args": {"enforce_eager": True}, **model}})
    return Needs(settings, Ports().listed(), packages_for(settings))


def judged(machine: Machine, needed: Needs | None = None) -> list[Finding]:
    return judge(machine, needed or needs())


def only(machine: Machine, needed: Needs | None = None) -> Finding:
    found = judged(machine, needed)
    assert len(found) == 1, found
    return found[0]


def with_(**changes: Any) -> Machine:
    return dataclasses.replace(GOOD, **changes)


def test_a_good_machine_has_no_findings() -> None:
    assert judged(GOOD) == []


def test_a_busy_port_names_its_holder_and_the_way_out() -> None:
    text = only(with_(ports_busy={8000: Holder(17, "nginx", "www")})).text
    assert text.startswith(
        "port 8000 (Tidegate's HTTP) is held by nginx (pid 17, user www); end it, or set http_options"
    )


def test_a_port_held_by_someone_invisible_says_so() -> None:
    text = only(with_(ports_busy={8265: None})).text
    assert "held by a process that this user cannot see" in text
    assert "--dashboard-port 8266" in text


@pytest.mark.parametrize("port", Ports().listed())
def test_every_port_of_the_start_is_judged(port: preflight.Port) -> None:
    assert f"port {port.number} ({port.purpose})" in only(with_(ports_busy={port.number: None})).text


def test_another_ray_cluster_is_named_once_instead_of_its_ports() -> None:
    machine = with_(
        ray_heads=(Holder(5, "gcs_server", "ann"),), ports_busy={6379: Holder(5, "gcs_server", "ann"), 8265: None}
    )
    finding = only(machine)
    assert finding.level is Level.ERROR
    assert "gcs_server (pid 5, user ann)" in finding.text
    assert "serve deploy serve_config.yaml" in finding.text


@pytest.mark.parametrize("version", [(3, 10), (3, 13), (2, 7)])
def test_other_pythons_are_refused(version: tuple[int, int]) -> None:
    assert f"Python {version[0]}.{version[1]}" in only(with_(python=version)).text


def test_missing_packages_are_named_with_the_command() -> None:
    assert only(with_(packages_missing=("vllm", "uvloop"))).text.startswith(
        "not installed: vllm, uvloop; run: make serve"
    )


def test_the_emulated_engine_does_not_need_vllm() -> None:
    assert "vllm" in packages_for(Settings.load({}))
    assert "vllm" not in packages_for(Settings.load({"model": {"engine": "emulated"}}))


def test_too_little_memory_for_the_first_replica_is_an_error_for_the_last_a_warning() -> None:
    each = preflight.VLLM_CPU_GIB + 1
    least = preflight.RAY_GIB + each
    assert only(with_(memory_bytes_free=int((least - 0.1) * GIB))).level is Level.ERROR
    assert only(with_(memory_bytes_free=int((least + 0.1) * GIB))).level is Level.WARNING
    assert judged(with_(memory_bytes_free=int((least + each + 0.1) * GIB))) == []


def test_kv_cache_counts_into_memory() -> None:
    small = with_(memory_bytes_free=8 * GIB)
    assert judged(small) == []
    assert only(small, needs(cpu={"kv_cache_gib": 8})).level is Level.ERROR


@pytest.mark.parametrize("changes", [{"disk_bytes_free": 10_000_000}, {"disk_used_share": 0.97}])
def test_a_full_disk_is_an_error(changes: dict[str, Any]) -> None:
    assert "free some" in only(with_(**changes)).text


def test_a_low_limit_of_open_files_is_an_error() -> None:
    assert "ulimit -Hn" in only(with_(files_max=1024)).text


def test_cores_for_the_first_replica_are_needed_for_the_last_wanted() -> None:
    assert only(with_(cores=1)).level is Level.WARNING
    assert only(with_(cores=1), needs(num_cpus=2)).level is Level.ERROR


def test_the_compiler_is_needed_only_where_vllm_compiles() -> None:
    without = with_(compiler=False)
    assert judged(without) == []
    assert "no C++ compiler" in only(without, needs(engine_args={"enforce_eager": False})).text
    assert "no C++ compiler" in only(without, needs(device="gpu", num_gpus=1)).text
    assert judged(without, Needs(Settings.load({}), (), ())) == []


def test_a_gpu_that_is_not_there_is_an_error() -> None:
    gpu = needs(device="gpu", num_gpus=1)
    assert "no NVIDIA GPU" in only(with_(gpus=0), gpu).text
    assert judged(with_(gpus=1), gpu) == []


def test_errors_come_first() -> None:
    found = judged(with_(cores=1, files_max=10))
    assert [finding.level for finding in found] == [Level.ERROR, Level.WARNING]


def test_measuring_finds_the_holder_of_a_port() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        holder = preflight.busy_ports([port])[port]
        assert holder is not None
        assert holder.pid == os.getpid()
    assert preflight.busy_ports([port]) == {}


def test_measuring_this_machine_gives_plausible_numbers() -> None:
    machine = measure(Needs(Settings.load({}), (), ("no_such_package_here", "json")), Path("/tmp/not/there/yet"))
    assert machine.packages_missing == ("no_such_package_here",)
    assert machine.cores >= 1
    assert machine.memory_bytes_free > 0
    assert 0 < machine.disk_used_share < 1
    assert machine.gpus is None
