"""A speculating engine, step by step: it obeys a step law, explores, and its drafts come true with a given chance."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from policies.config_guard import SpeculationConfig
from policies.measures import DepthUse
from policies.speculation import Bounds, DepthExplorer, SpeculationMove, SpeculationTuner, batch_class
from policies.step_model import predict_step_ms
from policies.types import Histogram, Knobs, ReplicaReport, ReplicaState, Sampled, StepCoefficients

HARD = 4
SECOND_NS = 1_000_000_000
CPU_STEP = StepCoefficients(a_ms=25.0, b_ms=2.0, c_ms=0.5, d_ms=1.9, samples=1_000, error_share=0.02)
"""About one core with SmolLM2-135M."""


@dataclass
class Text:
    """What sequences write: the chance that anything is drafted in a step, and of each drafted token to come true."""

    drafted: float
    accepted: float


REPETITIVE = Text(1.0, 0.97)
MISLEADING = Text(1.0, 0.05)
"""Drafts are made and all but none is right: the worst case."""
UNDRAFTABLE = Text(0.0, 0.0)


@dataclass
class SpeculatingEngine:
    """``verify_ms`` is what one draft token adds to a step."""

    law: StepCoefficients = CPU_STEP
    verify_ms: float = 1.9
    noise: float = 0.0
    wander: float = 0.0
    """A busy machine: its pace wanders, by this much in the log, from one few seconds to the next."""
    seed: int = 1
    hard: int = HARD
    share: float = 0.02
    speed: float = 1.0
    drifts: int = 0
    text: Text = field(default_factory=lambda: REPETITIVE)
    batch: int = 1
    waiting: int = 0
    kv_per_seq: int = 300
    tokens: int = 0
    explored_ms: float = 0.0
    busy_ms: float = 0.0
    work_ms: float = 0.0
    """Busy time at an even pace."""
    pace_log: float = 0.0

    def __post_init__(self) -> None:
        self.explorer = DepthExplorer(self.hard)
        self.rng = random.Random(self.seed)
        self.next_depth = self.hard
        self.seq = 0

    def second(self, asked: int | None) -> ReplicaReport:
        """One second of decoding, and its report."""
        self.seq += 1
        uses: dict[tuple[int, int], list[float]] = {}
        left_ms, decoded, steps = 1_000.0, 0, 0
        depth = self.hard if asked is None else asked
        bounds = Bounds(0.0 if asked is None else self.share)
        while left_ms > 0 and self.batch:
            ran_at, self.next_depth = self.next_depth, self.explorer.choose(depth, bounds, self.batch)
            tokens, drafted = self._step_tokens(ran_at)
            ms = predict_step_ms(self.law, self.batch, self.batch * self.kv_per_seq, 0) + self.verify_ms * drafted
            self.work_ms += ms
            self.pace_log += 0.03 * (self.rng.gauss(0, 1) * self.wander * 4 - self.pace_log)
            ms *= self.speed * math.exp(self.pace_log) * (1 + self.noise * self.rng.uniform(-1, 1))
            self.explorer.ran(ran_at, self.batch, tokens, ms)
            use = uses.setdefault((ran_at, batch_class(self.batch)), [0, 0, 0, 0.0, 0])
            for i, value in enumerate((1, self.batch, tokens, ms, drafted)):
                use[i] += value
            left_ms -= ms
            decoded += tokens
            steps += 1
            self.busy_ms += ms
            self.explored_ms += ms if ran_at != depth else 0.0
        self.tokens += decoded
        model = StepCoefficients(
            self.law.a_ms, self.law.b_ms, self.law.c_ms, self.verify_ms, 1_000, 0.02, drifts=self.drifts
        )
        return ReplicaReport(
            replica_id="r1",
            model="m",
            seq=self.seq,
            window_ms=1_000.0,
            state=ReplicaState.READY,
            running=self.batch,
            waiting=self.waiting,
            http_inflight=self.batch + self.waiting,
            kv_tokens_used=self.batch * self.kv_per_seq,
            kv_tokens_max=40_000,
            prefill_tokens=0,
            decode_tokens=decoded,
            prefix_query_tokens=0,
            prefix_hit_tokens=0,
            preemptions=0,
            steps=steps,
            busy_share=1.0 if steps else 0.0,
            gpu_utilisation_share=None,
            itl=Histogram(),
            step_model=model,
            knobs=Knobs(64, 2_048, depth),
            running_seqs_hard=64,
            step_tokens_hard=2_048,
            finished=0,
            aborted=0,
            cold_start_ms=None,
            speculative_depth_hard=self.hard,
            depth_use=tuple(
                DepthUse(d, b, int(n), int(seqs), int(tokens), ms, int(drafted))
                for (d, b), (n, seqs, tokens, ms, drafted) in sorted(uses.items())
            ),
        )

    def _step_tokens(self, depth: int) -> tuple[int, int]:
        tokens = drafted = 0
        for _ in range(self.batch):
            tokens += 1
            if depth and self.rng.random() < self.text.drafted:
                drafted += depth
                for _ in range(depth):
                    if self.rng.random() >= self.text.accepted:
                        break
                    tokens += 1
        return tokens, drafted


class Steered:
    """An engine, its window of reports, and the tuner that steers it."""

    def __init__(self, engine: SpeculatingEngine, config: SpeculationConfig | None = None) -> None:
        self.engine = engine
        self.tuner = SpeculationTuner(config or SpeculationConfig())
        self.window: list[Sampled[ReplicaReport]] = []
        self.now_ns = 0
        self.moves: list[SpeculationMove] = []
        self.depths: list[int | None] = []

    def second(self) -> SpeculationMove:
        self.now_ns += SECOND_NS
        report = self.engine.second(self.tuner.wish)
        self.window = [*self.window, Sampled(report, self.now_ns)][-12:]
        move = self.tuner.step(self.window, self.now_ns)
        self.moves.append(move)
        self.depths.append(move.after)
        return move

    def seconds(self, n: int) -> list[SpeculationMove]:
        return [self.second() for _ in range(n)]

    @property
    def changes(self) -> list[SpeculationMove]:
        return [m for m in self.moves if m.changed]
