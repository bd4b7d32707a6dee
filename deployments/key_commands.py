"""``keys create|list|revoke|rotate``: API keys in a file. A new key is printed on standard output and kept nowhere.

The file is the one of ``--file``, else ``auth.keys_file`` of the configuration. Gateways follow it without a restart. A
key is never taken on the command line, which everybody on the host can read: commands name keys by their ids.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.config_file import IMPORT_PATH, load_yaml
from deployments.key_file import KeyFileError, add_key, read_keys, revoke_key, rotate_key
from deployments.keys import INFERENCE, SCOPES, KeyRecord, hide_keys, new_key, split_key, values_of
from deployments.progress import Progress
from deployments.settings import Settings, SettingsError
from policies.config import DEFAULT_TENANT
from policies.config_base import ConfigError

CONFIG = Path(__file__).resolve().parent.parent / "serve_config.yaml"
DAY_S = 86_400.0
HOUR_S = 3_600.0

keys_cli = typer.Typer(help="API keys: create, list, revoke, rotate.", no_args_is_help=True)

FileOption = Annotated[Path | None, typer.Option("--file", help="Key file; else auth.keys_file of the configuration.")]
ConfigOption = Annotated[Path, typer.Option("--config", help="Serve configuration file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LifetimeOption = Annotated[float | None, typer.Option(min=0, help="Valid for so many days; for ever when absent.")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The key's id: the part between its first two hyphens.")]


@contextmanager
def _words_for_errors(path: Path | None = None) -> Iterator[None]:
    """Turn what goes wrong into one line and exit code 1."""
    try:
        yield
    except KeyFileError as error:
        Progress().fail(f"{path}: {error}")
        raise typer.Exit(1) from None
    except (SettingsError, ConfigError) as error:
        Progress().fail(hide_keys(str(error)))
        raise typer.Exit(1) from None


@keys_cli.command()
def create(
    tenant: Annotated[str, typer.Option(help="Whom requests with the key are counted for.")] = DEFAULT_TENANT,
    scope: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SCOPES)}; may be given again.")] = None,
    lifetime_days: LifetimeOption = None,
    no_file: Annotated[bool, typer.Option("--no-file", help="Print the record, for auth.keys; write no file.")] = False,
    file: FileOption = None,
    config: ConfigOption = CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it, this once."""
    now_s = time.time()
    with _words_for_errors():
        path = None if no_file else _key_file(file, config)
        ends_s = None if lifetime_days is None else now_s + lifetime_days * DAY_S
        key, record = new_key(tenant, scope or [INFERENCE], now_s, ends_s)
    with _words_for_errors(path):
        if path is not None:
            add_key(path, record)
    _print_key(key, record, path, as_json)


@keys_cli.command("list")
def list_keys(file: FileOption = None, config: ConfigOption = CONFIG, as_json: JsonOption = False) -> None:
    """Show all keys of the file: id, tenant, scopes, state and times."""
    with _words_for_errors():
        path = _key_file(file, config)
    with _words_for_errors(path):
        records = read_keys(path)
    rows = [_shown(record) for record in records]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = [("id", "tenant", "state", "created", "expires", "scopes")]
    table += [
        (r["id"], r["tenant"], r["state"], r["created"], r["expires"] or "never", " ".join(r["scopes"])) for r in rows
    ]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@keys_cli.command()
def revoke(
    key_id: IdArgument, file: FileOption = None, config: ConfigOption = CONFIG, as_json: JsonOption = False
) -> None:
    """Take a key back at once."""
    with _words_for_errors():
        path = _key_file(file, config)
    with _words_for_errors(path):
        record = revoke_key(path, _id(key_id), time.time())
    typer.echo(json.dumps(_shown(record)) if as_json else f"key {record.id} of tenant {record.tenant} is revoked")


@keys_cli.command()
def rotate(
    key_id: IdArgument,
    grace_hours: Annotated[float, typer.Option(min=0, help="The old key stays valid for so long.")] = 24.0,
    lifetime_days: LifetimeOption = None,
    file: FileOption = None,
    config: ConfigOption = CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Make a key with the same tenant, scopes and lifetime, print it, and let the old one end."""
    with _words_for_errors():
        path = _key_file(file, config)
    with _words_for_errors(path):
        lifetime_s = None if lifetime_days is None else lifetime_days * DAY_S
        key, record, old = rotate_key(path, _id(key_id), time.time(), grace_hours * HOUR_S, lifetime_s)
    _print_key(key, record, path, as_json, old)


def register(cli: typer.Typer) -> None:
    """Add the commands to ``cli``."""
    cli.add_typer(keys_cli, name="keys")


def _key_file(file: Path | None, config: Path) -> Path:
    if file is not None:
        return file.absolute()
    try:
        content = load_yaml(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"{config}: cannot be read: {error}"]) from None
    apps = content.get("applications")
    for app in apps if isinstance(apps, list) else []:
        if isinstance(app, dict) and app.get("import_path") == IMPORT_PATH:
            found = Settings.load(app.get("args")).auth.keys_file
            if found is not None:
                return Path(found)
    raise SettingsError([f"{config.name} names no auth.keys_file; add it, or give --file"])


def _id(given: str) -> str:
    """Refuses a whole key: by now it is in the process list and in a shell's history."""
    if (parts := split_key(given.encode("utf-8", "surrogateescape"))) is not None:
        raise KeyFileError(
            f"give the id ({parts[0]}) and not the key: others on this host can read what is on a command line"
        )
    return given


def _shown(record: KeyRecord) -> dict[str, Any]:
    values: dict[str, Any] = {"expires": None, "revoked": None, **values_of(record), "state": record.state(time.time())}
    return {name: value for name, value in values.items() if name not in {"salt", "hash"}}


def _print_key(key: str, record: KeyRecord, path: Path | None, as_json: bool, old: KeyRecord | None = None) -> None:
    if as_json:
        values = {"key": key, **_shown(record)}
        values |= {"record": values_of(record)} if path is None else {"file": str(path)}
        values |= {} if old is None else {"old": _shown(old)}
        typer.echo(json.dumps(values))
        return
    typer.echo(key)
    if path is None:
        typer.echo(json.dumps(values_of(record)))
    ends = "never expires" if record.expires is None else f"expires {record.expires}"
    typer.echo(f"id {record.id}, tenant {record.tenant}, scopes {' '.join(record.scopes)}, {ends}", err=True)
    if old is not None:
        typer.echo(
            f"old key {old.id}: " + (f"valid until {old.expires}" if old.revoked is None else "revoked"), err=True
        )
    typer.echo("The key is shown this once and kept nowhere.", err=True)
