"""Engine profiles on disk: those that ship with the project, by name, and the user's own, by path."""

from __future__ import annotations

import difflib
from pathlib import Path

from autoscaling.simulator.profile import ProfileError, profile_from_json, profile_to_json
from autoscaling.simulator.spec import EngineProfile

PROFILES = Path(__file__).resolve().parents[2] / "autoscaling" / "simulator" / "profiles"
"""Folder of the profiles that ship with the project."""

PROFILE_BYTES_MAX = 1_000_000
"""A larger file is no profile."""


def profile_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def load_profile(name_or_path: str) -> EngineProfile:
    """Shipped profile by name, or a file of the user's (anything with a ``/`` or that ends in ``.json``).

    Raises :class:`ProfileError` with one line: no such name (with the nearest), an unreadable file, or what is wrong in
    it.
    """
    path = Path(name_or_path).expanduser()
    if "/" not in name_or_path and path.suffix != ".json":
        path = PROFILES / f"{name_or_path}.json"
        if not path.is_file():
            names = profile_names()
            near = difflib.get_close_matches(name_or_path, names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ProfileError("profile", name_or_path, f"no such profile; {hint}Known: {', '.join(names)}")
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ProfileError(str(path), "", "is a device or a pipe; a profile is a file")
        with path.open("rb") as file:
            raw = file.read(PROFILE_BYTES_MAX + 1)
        if len(raw) > PROFILE_BYTES_MAX:
            raise ProfileError(str(path), "", f"larger than {PROFILE_BYTES_MAX:,} bytes, no profile")
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise ProfileError(str(path), "", f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ProfileError(str(path), "", "is not UTF-8 text") from None
    return profile_from_json(text, path.name)


def save_profile(profile: EngineProfile, path: Path) -> None:
    """Write ``profile`` as JSON. Raises ``OSError``."""
    path.write_text(profile_to_json(profile), encoding="utf-8")
