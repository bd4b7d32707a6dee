"""Methods that vLLM adds to its workers (``worker_extension_cls``), called through ``collective_rpc`` by name.

A GPU worker is an actor of its own, so only it knows which device Ray gave it.
"""

from __future__ import annotations


class DeviceName:
    """Mixed into vLLM's worker class."""

    def tidegate_device(self) -> str | None:
        """NVML's UUID of the worker's device, such as ``GPU-...``; ``None`` without CUDA."""
        import torch

        if not torch.cuda.is_available():
            return None
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
