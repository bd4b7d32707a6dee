"""How many tokens are drafted ahead, by measured goodput: see README.md."""

from policies.speculation.depths import batch_class, depths
from policies.speculation.explorer import NO_EXPLORATION, Bounds, DepthExplorer, exploration
from policies.speculation.goodput import GoodputBook
from policies.speculation.tuner import SpeculationMove, SpeculationTuner

__all__ = [
    "NO_EXPLORATION",
    "Bounds",
    "DepthExplorer",
    "GoodputBook",
    "SpeculationMove",
    "SpeculationTuner",
    "batch_class",
    "depths",
    "exploration",
]
