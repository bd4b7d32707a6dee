"""What is done about replicas and requests that fail: budget of extra attempts, ejection, quarantine."""

from policies.faults.breaker import BreakerState
from policies.faults.budget import RetryBudget
from policies.faults.health import PROBATION, ReplicaHealth, with_probe
from policies.faults.quarantine import Quarantine

__all__ = ["PROBATION", "BreakerState", "Quarantine", "ReplicaHealth", "RetryBudget", "with_probe"]
