"""API keys as stored: a hash and no key, bounded, replaced whole, refused when they cannot be trusted."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments import keys
from deployments.key_file import (
    KEYS_FILE_BYTES_MAX,
    KEYS_MAX,
    KeyFileError,
    add_key,
    parse_keys,
    read_keys,
    revoke_key,
    rotate_key,
    write_keys,
)
from deployments.keys import KEY_BYTES_MAX, SCOPES, KeyRecord, hide_keys, new_key, record_of, split_key, values_of
from policies.config_base import ConfigError

NOW_S = 1_800_000_000.0


def line(record: KeyRecord) -> str:
    return json.dumps(values_of(record))


def good(**changes: Any) -> dict[str, Any]:
    return values_of(new_key("acme", ["inference"], NOW_S)[1]) | changes


def test_a_record_holds_nothing_a_key_could_be_made_from() -> None:
    key, record = new_key("acme", ["inference"], NOW_S)
    prefix, key_id, secret = key.split("-")
    assert (prefix, key_id, len(secret)) == ("tg", record.id, 64)
    assert secret not in line(record)
    assert secret not in repr(record)
    assert keys.secret_hash(bytes.fromhex(record.salt), secret.encode()).hex() == record.hash


def test_two_keys_share_no_part() -> None:
    made = [new_key("acme", ["inference"], NOW_S) for _ in range(50)]
    for part in ("id", "salt", "hash"):
        assert len({getattr(record, part) for _, record in made}) == 50
    assert len({key.split("-")[2] for key, _ in made}) == 50


def test_a_record_survives_the_file() -> None:
    record = new_key("acme", SCOPES, NOW_S, NOW_S + 5)[1]
    assert parse_keys(f"# a comment\n\n{line(record)}\n") == (record,)
    assert record_of(values_of(replace(record, revoked=record.created))).state(NOW_S) == "revoked"


def test_a_key_is_valid_until_it_expires() -> None:
    record = new_key("acme", ["metrics"], NOW_S, NOW_S + 5)[1]
    assert [record.state(NOW_S + s) for s in (0, 4.9, 5.0)] == ["valid", "valid", "expired"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", ""), ("id", "x-y"), ("id", "a" * 65), ("id", "é"), ("id", "a\n"),
        ("tenant", ""), ("tenant", "a b"), ("tenant", "a" * 65), ("tenant", "x\ny"), ("tenant", None),
        ("scopes", []), ("scopes", ["all"]), ("scopes", "inference"), ("scopes", None), ("scopes", [3]),
        ("scopes", [["inference"]]),
        ("salt", "0" * 14), ("salt", "0" * 33), ("salt", "0" * 130), ("salt", "x" * 32),
        ("hash", "0" * 63), ("hash", "0" * 65), ("hash", "A" * 64),
        ("created", None), ("created", "yesterday"), ("created", "2026-11-30T12:00:00"), ("created", 17),
        ("expires", "soon"), ("expires", 0), ("revoked", True), ("revoked", ""), ("revoked", "2026-13-01T00:00:00Z"),
    ],
)  # fmt: skip
def test_a_record_that_is_not_right_is_refused_by_field_and_without_its_value(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        record_of(good(**{field: value}))
    assert caught.value.field == field
    if field in {"id", "salt", "hash"} and value:
        assert str(value) not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "3", "null", '"tg-a-b"', "[" * 100_000, '{"id": "a"}', json.dumps(good(secret="tg-a-b")), "\x00"],
)
def test_a_line_that_is_no_record_is_named_by_its_number_and_not_shown(text: str) -> None:
    with pytest.raises(KeyFileError) as caught:
        parse_keys(f"{line(new_key('acme', ['inference'], NOW_S)[1])}\n{text}\n")
    assert str(caught.value).startswith("line 2: ")
    assert "tg-a-b" not in str(caught.value)


def test_an_id_that_is_given_twice_is_refused() -> None:
    record = new_key("acme", ["inference"], NOW_S)[1]
    with pytest.raises(KeyFileError, match="line 2: the id is given twice"):
        parse_keys(f"{line(record)}\n{line(replace(record, tenant='other'))}\n")


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        (b"tg-a-b", ("a", b"b")), (b"tg-a-b-c_d", ("a", b"b-c_d")),
        (b"tg-\xff-b", ("\xff", b"b")),
        (b"", None), (b"tg", None), (b"tg-a", None), (b"tg-a-", None), (b"TG-a-b", None), (b"sk-a-b", None),
        (b"-a-b", None),
        (b"tg-a-" + b"b" * (KEY_BYTES_MAX - 5), ("a", b"b" * (KEY_BYTES_MAX - 5))),
        (b"tg-a-" + b"b" * (KEY_BYTES_MAX - 4), None),
    ],
)  # fmt: skip
def test_a_key_comes_apart_or_not_at_all(key: bytes, parts: tuple[str, bytes] | None) -> None:
    assert split_key(key) == parts


def test_what_looks_like_a_key_is_hidden() -> None:
    key, _ = new_key("acme", ["inference"], NOW_S)
    assert hide_keys(f"got '{key}', not 'tg-x-y'") == "got 'tg-...', not 'tg-...'"
    assert hide_keys("tidegate-a plain text") == "tidegate-a plain text"


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_file_of_keys_max_is_read_and_one_more_is_refused(tmp_path: Path) -> None:
    path, record = tmp_path / "keys.jsonl", new_key("acme", ["inference"], NOW_S)[1]
    many = [replace(record, id=f"k{n}") for n in range(KEYS_MAX)]
    write_keys(path, many)
    assert len(read_keys(path)) == KEYS_MAX
    with pytest.raises(KeyFileError, match=f"more than {KEYS_MAX} keys"):
        add_key(path, record)
    write_keys(path, [*many, record])
    with pytest.raises(KeyFileError, match=f"more than {KEYS_MAX} keys"):
        read_keys(path)


def test_a_file_that_is_too_large_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    path.write_bytes(b"#" * (KEYS_FILE_BYTES_MAX + 1))
    with pytest.raises(KeyFileError, match="larger than"):
        read_keys(path)


def test_a_new_file_is_its_owners_only_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "keys.jsonl"
    add_key(path, new_key("acme", ["inference"], NOW_S)[1])
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    add_key(path, new_key("acme", ["inference"], NOW_S)[1])
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in path.parent.iterdir()) == [".keys.jsonl.lock", "keys.jsonl"]


def test_a_file_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    write_keys(path, [new_key("acme", ["inference"], NOW_S)[1]])
    path.chmod(0o606)
    with pytest.raises(KeyFileError, match="chmod o-w"):
        read_keys(path)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", "folder"])
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "keys.jsonl"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(KeyFileError, match=r"^(cannot be read: |is not )"):
        read_keys(path)


def test_commands_at_the_same_time_lose_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    made = [new_key("acme", ["inference"], NOW_S)[1] for _ in range(24)]
    threads = [threading.Thread(target=add_key, args=(path, record)) for record in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {record.id for record in read_keys(path)} == {record.id for record in made}


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, record = tmp_path / "keys.jsonl", new_key("acme", ["inference"], NOW_S)[1]
    add_key(path, record)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(KeyFileError, match="No space left"):
        add_key(path, new_key("acme", ["inference"], NOW_S)[1])
    assert read_keys(path) == (record,)
    assert not list(tmp_path.glob(".keys.jsonl.????????"))


def test_a_revoked_key_keeps_its_first_time(tmp_path: Path) -> None:
    path, record = tmp_path / "keys.jsonl", new_key("acme", ["inference"], NOW_S)[1]
    add_key(path, record)
    assert revoke_key(path, record.id, NOW_S + 1).state(NOW_S) == "revoked"
    first = read_keys(path)
    assert revoke_key(path, record.id, NOW_S + 9) == first[0]
    assert read_keys(path) == first


def test_a_rotated_key_lives_on_for_its_grace_and_no_longer_than_it_had(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    endless = new_key("acme", ["metrics", "inference"], NOW_S)[1]
    short = new_key("acme", ["inference"], NOW_S, NOW_S + 60)[1]
    for record in (endless, short):
        add_key(path, record)
    key, new, old = rotate_key(path, endless.id, NOW_S + 10, grace_s=100)
    assert (new.tenant, new.scopes, new.expires) == ("acme", ("metrics", "inference"), None)
    assert (old.state(NOW_S + 109), old.state(NOW_S + 110)) == ("valid", "expired")
    assert key.split("-")[1] == new.id != old.id
    _, new, old = rotate_key(path, short.id, NOW_S + 10, grace_s=100)
    assert old.expires_s == NOW_S + 60
    assert new.expires_s == NOW_S + 70
    assert len(read_keys(path)) == 4


def test_a_rotation_without_grace_revokes(tmp_path: Path) -> None:
    path, record = tmp_path / "keys.jsonl", new_key("acme", ["inference"], NOW_S)[1]
    add_key(path, record)
    _, new, old = rotate_key(path, record.id, NOW_S, grace_s=0, lifetime_s=30)
    assert old.state(NOW_S) == "revoked"
    assert new.expires_s == NOW_S + 30
    with pytest.raises(KeyFileError, match="is revoked"):
        rotate_key(path, record.id, NOW_S, grace_s=0)


def test_an_id_that_is_not_there_is_told(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    for change in (lambda: revoke_key(path, "x", NOW_S), lambda: rotate_key(path, "x", NOW_S, 0)):
        with pytest.raises(KeyFileError, match="there is no key x"):
            change()
    assert not path.exists()
