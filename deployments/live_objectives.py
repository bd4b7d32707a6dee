"""Objectives that change while a gateway runs: Serve's ``user_config``, checked, put in force, told to the controller.

Found out with Serve 2.60: a ``reconfigure`` that raises does not keep the old values. Serve stops that replica, starts
another with the same ``user_config``, which raises as well, three times, and ends in DEPLOY_FAILED; with one gateway
the service is gone. So nothing here raises: what is refused is an error in the log, a count in
``tidegate_objectives_reloads_total{result="refused"}`` and ``objectives_refused`` in ``/control/state``, and the
objectives in force stay. A change that is good reaches the running replicas and restarts nothing.

A gateway that starts under a ``user_config`` it must refuse has no older one: it takes what the controller was told
last, else the configuration's ``args``. It must not decide what objectives mean.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from deployments.settings import Settings, SettingsError
from deployments.telemetry import Telemetry
from policies.build import Policies

logger = logging.getLogger("ray.serve")


class LiveObjectives:
    """Of one gateway."""

    def __init__(self, settings: Settings, policies: Policies, telemetry: Telemetry) -> None:
        self._settings = settings
        self._policies = policies
        self._telemetry = telemetry
        self._taken: Any = None
        """The ``user_config`` in force; ``None``: there was none."""
        self._told: tuple[str, Any] | None = None
        """Epoch of the controller that was told, and what."""
        self.refused: str | None = None
        """Why the last ``user_config`` is not in force."""

    def take(self, user_config: Any) -> bool:
        """Put the objectives of ``user_config`` in force, or refuse them and say why. Never raises."""
        try:
            config = self._settings.with_objectives(user_config).policy_config()
        except SettingsError as error:
            self.refused = str(error)
            self._telemetry["tidegate_objectives_reloads_total"].inc(result="refused")
            for problem in error.problems:
                logger.error("user_config is refused, the objectives in force stay: %s", problem)
            return False
        self._policies.reconfigure(config.objectives, config.classes)
        self._taken, self.refused = user_config, None
        self._telemetry["tidegate_objectives_reloads_total"].inc(result="ok")
        logger.info("Objectives of user_config are in force: %s.", config.objectives)
        return True

    async def tell(self, call: Callable[..., Awaitable[Any]], epoch: str, gateway_id: str) -> None:
        """Tell the controller of life ``epoch`` what is in force, once; ``call`` asks it."""
        if self.refused is not None and self._taken is None:
            in_force = await call("objectives")
            if in_force is not None:
                refused = self.refused
                self.take(in_force)
                self.refused = refused
        if self._taken is not None and self._told != (epoch, self._taken):
            await call("set_objectives", self._taken, gateway_id)
            self._told = epoch, self._taken
