"""The models that one gateway serves: for each a core and a line to its control loop; and whose a request is.

The gateway's front doors know this class; cores, drivers and policies know one model each. A request that names no
model, or none that is served, is the first model's: its core takes it, or refuses it in the right words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec

from deployments.errors import model_not_found

if TYPE_CHECKING:
    from deployments.controller_link import ControllerLink
    from deployments.core import GatewayCore


class _Named(msgspec.Struct):
    """The one field of a body that says whose it is."""

    model: Any = None


_DECODER = msgspec.json.Decoder(_Named)


class Served:
    """See the module. The first core, and the first line, are those of the first model."""

    def __init__(self, cores: Sequence[GatewayCore], links: Sequence[ControllerLink] = ()) -> None:
        self.first = cores[0]
        self.cores: Mapping[str, GatewayCore] = {core.settings.model.name: core for core in cores}
        self.links: Mapping[str, ControllerLink] = dict(zip(self.cores, links, strict=False))

    def core_of(self, body: bytes) -> GatewayCore:
        """Whose request ``body`` is."""
        if len(self.cores) == 1:
            return self.first
        try:
            asked = _DECODER.decode(body).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self.first  # which says what is wrong
        return self.cores.get(asked, self.first) if isinstance(asked, str) else self.first

    def asked(self, query: bytes) -> str:
        """The model that a query string names with ``model=``; the first one where it names none.

        Raises:
            GatewayError: 404, it is not served.
        """
        values = parse_qs(query.decode("latin-1")).get("model")
        if not values:
            return self.first.settings.model.name
        if values[-1] not in self.cores:
            raise model_not_found(values[-1])
        return values[-1]
