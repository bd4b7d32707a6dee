"""The roofline of a modelled replica, from its profile: what a live one finds out from its device and its model.

Parameters are read off the model's name (``Llama-3.1-8B``: 8 billion; ``Qwen3-30B-A3B``: 30 billion, 3 of them active),
the width of its weights off the profile's (``...-fp8`` or ``...-bf16``). That is within a tenth of the truth; how
fast the simulator's engines are is given by their step law, not by this.

What this must not do: guess a device or a model that is not named so; GPU readings are not modelled at all.
"""

from __future__ import annotations

import re

from autoscaling.simulator.spec import EngineProfile
from policies.measures import Roofline
from policies.roofline import ModelFigures, roofline_of

_PARAMETERS = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)B(?:-A(\d+(?:\.\d+)?)B)?", re.IGNORECASE)


def roofline_of_profile(profile: EngineProfile) -> Roofline | None:
    """Its roofline; ``None`` where the name of device or model says too little."""
    found = _PARAMETERS.search(profile.model)
    if found is None or not profile.kv_bytes_per_token:
        return None
    parameters = float(found[1]) * 1e9
    active = float(found[2]) * 1e9 if found[2] else parameters
    bits = 8 if "-fp8" in profile.name else 16
    figures = ModelFigures(parameters, active, bits, float(profile.kv_bytes_per_token))
    return roofline_of(profile.gpu, profile.gpus, figures)
