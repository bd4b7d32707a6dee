"""Whether the model's files are there and whole, as far as a second's look can tell. Nothing is loaded or fetched.

A folder: ``config.json``, and weights whose files are as long as their own headers say. A bundled model: the sizes of
its manifest. An id on the hub: only where nothing may be fetched (``HF_HUB_OFFLINE``), whether its cache has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from deployments import model
from deployments.model import ModelError
from deployments.preflight import Cause, Finding, Level
from deployments.settings import ModelSettings, child_environment

HEADER_BYTES_MAX = 100_000_000
"""Of one safetensors file; the format's own bound."""
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")


def check_model(settings: ModelSettings) -> Iterator[Finding]:
    """What is wrong with the files of the model; nothing for the emulated engine, which needs none."""
    if settings.engine != "vllm":
        return
    if settings.source in model.CATALOGUE:
        yield from _bundled(settings.source)
        return
    try:
        location = Path(model.resolve(settings.source))
    except ModelError as error:
        todo = "mend model.source: a bundled model's name, a folder, or an id on the Hugging Face hub"
        yield Finding(Level.ERROR, Cause.MODEL_MISSING, str(error), todo)
        return
    if location.is_dir():
        for fault in _faults(location):
            yield Finding(
                Level.ERROR, Cause.MODEL_DAMAGED, f"model.source: {fault}", "copy or download the folder anew"
            )
    else:
        yield from _hub(settings.source, child_environment({}))


def _bundled(name: str) -> Iterator[Finding]:
    folder = model.folder_of(name)
    if not folder.exists():
        what = f"model '{name}' is not in {folder} yet"
        yield Finding(Level.NOTE, Cause.MODEL_MISSING, what, "the start fetches it (about 100 MB), or now: make model")
    elif not model.is_intact(folder, model.CATALOGUE[name]):
        what = f"model '{name}' in {folder} is damaged, or of an older version"
        yield Finding(Level.NOTE, Cause.MODEL_DAMAGED, what, "the start makes it anew, or now: make model")


def _hub(source: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    if environment.get("HF_HUB_OFFLINE", "").upper() not in {"1", "ON", "YES", "TRUE"}:
        return
    home = Path(environment.get("HF_HOME") or "~/.cache/huggingface")
    cache = Path(environment.get("HF_HUB_CACHE") or home / "hub").expanduser()
    if not (cache / f"models--{source.replace('/', '--')}").is_dir():
        what = f"model.source '{source}' is not in {cache}, and HF_HUB_OFFLINE forbids to fetch it"
        yield Finding(Level.ERROR, Cause.MODEL_MISSING, what, "unset HF_HUB_OFFLINE for one start, or name a folder")


def _faults(folder: Path) -> Iterator[str]:
    try:
        if not isinstance(json.loads((folder / "config.json").read_text(encoding="utf-8")), dict):
            yield f"{folder / 'config.json'} is no JSON object"
    except OSError as error:
        yield f"{folder / 'config.json'} cannot be read: {error.strerror}"
    except ValueError as error:
        yield f"{folder / 'config.json'} is not JSON: {error}"
    files = set(folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index.json"):
        try:
            wanted = {
                folder / str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            }
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            yield f"{index} is not an index of weights"
            continue
        if absent := sorted(path.name for path in wanted - files):
            yield f"{folder} lacks {len(absent)} of {len(wanted)} weight files, such as {absent[0]}"
    if not files and not any(True for pattern in OTHER_WEIGHTS for _ in folder.glob(pattern)):
        yield f"{folder} holds no weights"
    for path in sorted(files):
        wanted_bytes, found_bytes = safetensors_bytes(path), path.stat().st_size
        if wanted_bytes is None:
            yield f"{path} is no safetensors file"
        elif wanted_bytes != found_bytes:
            yield f"{path} has {found_bytes:,} bytes, its header says {wanted_bytes:,}"


def safetensors_bytes(path: Path) -> int | None:
    """The length a safetensors file must have by its header; ``None`` where that cannot be read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= HEADER_BYTES_MAX:
                return None
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return 8 + length + max(ends, default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
