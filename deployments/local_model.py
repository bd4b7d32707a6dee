"""Ray's engine start-up without its download step, for a model that is a folder on every host already.

Before it starts an engine Ray Serve LLM runs a task on each host that fetches the model's files. For a folder there is
nothing to fetch, and the task's process pays for importing vLLM: 13 s of a replica's start on two cores.
"""

from __future__ import annotations

from ray.llm._internal.common.callbacks.base import CallbackBase

CALLBACK = f"{__name__}:LocalModel"
"""How ``LLMConfig.callback_config`` names :class:`LocalModel`."""


class LocalModel(CallbackBase):
    """Hook of ``LLMConfig`` that switches the download task off."""

    async def on_before_node_init(self) -> None:
        """Ray asks before it would run the task."""
        self.ctx.run_init_node = False
