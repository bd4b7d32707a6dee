"""Batch size and token budget of one engine: see README.md."""

from policies.batching.load import OfferedLoad
from policies.batching.tuner import BatchMove, BatchTuner

__all__ = ["BatchMove", "BatchTuner", "OfferedLoad"]
