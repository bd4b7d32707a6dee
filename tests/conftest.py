"""Settings of all tests: no test depends on how fast the machine is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("tidegate", deadline=None, print_blob=True)
settings.load_profile("tidegate")
