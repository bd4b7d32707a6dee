"""A replica's reports second by second, and the batch tuner that sees them."""

from __future__ import annotations

from typing import Any

from policies.batching import BatchMove, BatchTuner
from policies.batching.solve import BatchPoint
from policies.config import BatchingConfig, ObjectivesConfig
from policies.types import Knobs, ReplicaReport, Sampled
from tests.unit.control.fleet import CPU_STEP, SECOND_NS, histogram, replica_report

CONFIG = BatchingConfig()
OBJECTIVES = ObjectivesConfig(itl_ms=200.0)


def point(**changes: Any) -> BatchPoint:
    values: dict[str, Any] = {
        "model": CPU_STEP,
        "running": 16,
        "kv_tokens": 4_800,
        "kv_tokens_max": 40_000,
        "running_seqs_hard": 16,
        "step_tokens_hard": 2_048,
    }
    return BatchPoint(**(values | changes))


class Replica:
    """A replica's sliding window, and a tuner that sees it."""

    def __init__(self, config: BatchingConfig = CONFIG, objectives: ObjectivesConfig = OBJECTIVES) -> None:
        self.tuner = BatchTuner(config, objectives)
        self.window: list[Sampled[ReplicaReport]] = []
        self.now_ns = 0
        self.moves: list[BatchMove] = []

    def second(self, *, obey: bool = True, **report: Any) -> BatchMove:
        self.now_ns += SECOND_NS
        wish = self.tuner.wish
        if obey and wish.step_tokens_max is not None:
            report.setdefault("knobs", Knobs(wish.running_seqs_max, wish.step_tokens_max, None))
        values: dict[str, Any] = {"running": 16, "kv_tokens_used": 4_800, "steps": 10, "decode_tokens": 160}
        values.setdefault("itl", histogram(*[60.0] * 20))
        values["prefill_tokens"] = 1 if report.get("steps", 10) else 0
        sample = Sampled(replica_report(seq=len(self.moves) + 1, **(values | report)), self.now_ns)
        self.window = [*self.window, sample][-12:]
        move = self.tuner.step(self.window, self.now_ns)
        self.moves.append(move)
        return move

    def seconds(self, n: int, **report: Any) -> list[BatchMove]:
        return [self.second(**report) for _ in range(n)]

    @property
    def changes(self) -> list[BatchMove]:
        return [m for m in self.moves if m.changed]
