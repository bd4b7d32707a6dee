"""How a configuration value is refused: the error that names its field. Decides nothing."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration value is out of range; ``field`` is its name inside its family."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(f"{field_name}: {message}")
        self.field = field_name


def need(ok: bool, field_name: str, message: str) -> None:
    """Raise :class:`ConfigError` unless ``ok``."""
    if not ok:
        raise ConfigError(field_name, message)
