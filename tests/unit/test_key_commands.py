"""The commands for API keys: a key is shown once and kept nowhere; ids on the command line, never keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from deployments.auth import Authenticator
from deployments.key_commands import keys_cli
from deployments.key_file import read_keys
from deployments.keys import SCOPES
from deployments.settings import Settings


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


def run(*words: str) -> Result:
    return CliRunner().invoke(keys_cli, words)


def made(path: Path, *words: str) -> dict[str, Any]:
    result = run("create", "--file", str(path), "--json", *words)
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def tenant_of(key: str, section: dict[str, Any]) -> str:
    auth = Authenticator(Settings.load({"auth": section}).auth)
    auth.reload()
    return auth.authenticate({b"x-api-key": key.encode()}).tenant


def failed(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


def test_a_key_alone_is_on_standard_output_and_its_secret_nowhere_else(path: Path) -> None:
    result = run("create", "--file", str(path), "--tenant", "acme")
    key = result.stdout.strip()
    assert tenant_of(key, {"keys_file": str(path)}) == "acme"
    secret = key.split("-")[2]
    assert secret not in result.stderr
    assert "shown this once" in result.stderr
    for file in path.parent.iterdir():
        assert secret not in file.read_text()
    for output in (run("list", "--file", str(path)), run("list", "--file", str(path), "--json")):
        assert output.exit_code == 0
        assert secret not in output.output


def test_scopes_and_lifetime_are_as_asked_and_inference_for_ever_when_not(path: Path) -> None:
    assert made(path)["scopes"] == ["inference"]
    values = made(path, "--scope", "metrics", "--scope", "control:read", "--lifetime-days", "2")
    assert values["scopes"] == ["metrics", "control:read"]
    first, second = read_keys(path)
    assert (first.tenant, first.expires) == ("default", None)
    assert second.expires_s - second.created_s == 2 * 86_400


def test_without_a_file_the_record_is_for_the_configuration() -> None:
    result = run("create", "--no-file", "--tenant", "acme")
    key, record = result.stdout.splitlines()
    assert tenant_of(key, {"keys": [yaml.safe_load(record)]}) == "acme"
    values = json.loads(run("create", "--no-file", "--json").stdout)
    assert tenant_of(values["key"], {"keys": [values["record"]]}) == "default"


def test_the_configuration_names_the_file(tmp_path: Path, path: Path) -> None:
    app = {"name": "a", "import_path": "deployments.app:build", "args": {"auth": {"keys_file": str(path)}}}
    config = tmp_path / "serve_config.yaml"
    config.write_text(yaml.safe_dump({"applications": [app]}))
    assert run("create", "--config", str(config)).exit_code == 0
    assert len(read_keys(path)) == 1
    app["args"] = {"auth": "none"}
    config.write_text(yaml.safe_dump({"applications": [app]}))
    assert "names no auth.keys_file" in failed("create", "--config", str(config))
    assert "cannot be read" in failed("list", "--config", str(tmp_path / "no.yaml"))


def test_a_list_shows_states_and_neither_salts_nor_hashes(path: Path) -> None:
    ids = [made(path, "--tenant", f"t{n}")["id"] for n in range(3)]
    assert run("revoke", ids[0], "--file", str(path)).exit_code == 0
    assert run("rotate", ids[1], "--file", str(path), "--grace-hours", "0").exit_code == 0
    rows = json.loads(run("list", "--file", str(path), "--json").stdout)
    assert [row["state"] for row in rows] == ["revoked", "revoked", "valid", "valid"]
    assert [row["tenant"] for row in rows] == ["t0", "t1", "t2", "t1"]
    text = run("list", "--file", str(path)).stdout
    assert [line.split()[0] for line in text.splitlines()] == ["id", *(row["id"] for row in rows)]
    for record in read_keys(path):
        assert record.hash not in text + json.dumps(rows)
        assert record.salt not in text + json.dumps(rows)


def test_a_rotated_key_comes_with_the_same_rights_and_its_predecessors_end(path: Path) -> None:
    old = made(path, "--tenant", "acme", *(word for scope in SCOPES for word in ("--scope", scope)))
    result = run("rotate", old["id"], "--file", str(path), "--json")
    values = json.loads(result.stdout)
    assert (values["tenant"], values["scopes"]) == ("acme", list(SCOPES))
    assert values["old"]["id"] == old["id"]
    assert values["old"]["expires"] is not None
    for key in (old["key"], values["key"]):
        assert tenant_of(key, {"keys_file": str(path)}) == "acme"


@pytest.mark.parametrize("command", ["revoke", "rotate"])
def test_a_key_on_the_command_line_is_refused_and_not_repeated(path: Path, command: str) -> None:
    key = made(path)["key"]
    told = failed(command, key, "--file", str(path))
    assert "give the id" in told
    assert key.split("-")[2] not in told
    assert read_keys(path)[0].revoked is None


def test_no_command_takes_a_key_or_a_secret() -> None:
    for command in ("create", "list", "revoke", "rotate"):
        options = [word for word in run(command, "--help").stdout.split() if word.startswith("--")]
        assert not [option for option in options if "secret" in option or option == "--key"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("create", "--scope", "all"), "scopes: must be"), (("create", "--tenant", "a b"), "tenant: must be"),
        (("create", "--tenant", "tg-abc-secret/"), "tenant: must be"), (("revoke", "nobody"), "there is no key nobody"),
        (("rotate", "nobody"), "there is no key nobody"), (("list",), "cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line(path: Path, words: tuple[str, ...], told: str) -> None:
    assert told in failed(*words, "--file", str(path))
