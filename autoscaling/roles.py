"""Roles of a split fleet of fixed size: the scalers of its two pools, joined by one board.

    prefill pool's target = n,  decode pool's target = N - n          n: policies/disaggregation.py

Each pool has a controller of its own and asks its own scaler; the board holds what the two saw last, and the tuner
speaks when the prefill pool ticks. A replica changes its role by leaving one pool and joining the other: the pool that
grows gets its replica first and the other gives one up when it is there, so that no role is ever short of one for as
long as a start takes.

Rates are those of the window: a ratio that follows an average of a minute stays behind a load that turns.

What this must not do: change how many replicas there are altogether. Without fresh figures of both pools it holds.
"""

from __future__ import annotations

from policies.config import PolicyConfig
from policies.control.scaler import ScaleAdvice
from policies.control.signals import Signals
from policies.disaggregation import RolePoint, RoleTuner
from policies.step_model import mean_coefficients
from policies.types import Reason, StepCoefficients

KV_TOKENS_MEAN_PRIOR = 256.0
"""KV tokens of a decoding sequence before any ran."""


class RoleBoard:
    """What two pools' scalers know of each other. One for each run; give its methods to the pools as factories.

    Args:
        prefill: replicas that prefill at the start.
        decode: those that decode.
    """

    def __init__(self, prefill: int, decode: int) -> None:
        if prefill < 1 or decode < 1:
            raise ValueError(f"a split fleet has at least one replica of each role, not {prefill} and {decode}")
        self.replicas = prefill + decode
        self.prefill = prefill
        """Replicas that should prefill."""
        self._seen: dict[str, Signals] = {}
        self._tuner: RoleTuner | None = None
        self._config: PolicyConfig | None = None

    def prefill_scaler(self, config: PolicyConfig) -> RoleScaler:
        """Factory for the prefill pool."""
        return self._scaler(config, "prefill")

    def decode_scaler(self, config: PolicyConfig) -> RoleScaler:
        """Factory for the decode pool."""
        return self._scaler(config, "decode")

    def _scaler(self, config: PolicyConfig, role: str) -> RoleScaler:
        self._config = config
        if self._tuner is None:
            self._tuner = RoleTuner(config.objectives)
        return RoleScaler(self, role)

    def ask(self, role: str, signals: Signals) -> ScaleAdvice:
        """Replicas that ``role`` should have."""
        self._seen[role] = signals
        reason, inputs = Reason("Held", "the other role decides"), {}
        if role == "prefill":
            point = self._point()
            if point is None or self._tuner is None:
                reason = Reason("ModelNotReady", "one of the roles says nothing, or its step model is new")
            else:
                move = self._tuner.step(point, self.prefill, self.replicas)
                self.prefill = move.after
                reason, inputs = move.reason, move.inputs
        return ScaleAdvice(self._allowed(role), reason, inputs)

    def _allowed(self, role: str) -> int:
        """The target, but no fewer than there are while the other role waits for its new replica."""
        wanted = {"prefill": self.prefill, "decode": self.replicas - self.prefill}
        other = "decode" if role == "prefill" else "prefill"
        fleets = {name: signals.fleet for name, signals in self._seen.items()}
        own, others = fleets.get(role), fleets.get(other)
        if own is None or others is None or others.replicas_running >= wanted[other]:
            return wanted[role]
        return max(wanted[role], own.replicas_target)

    def _point(self) -> RolePoint | None:
        prefill, decode = self._seen.get("prefill"), self._seen.get("decode")
        if prefill is None or decode is None or decode.work is None or prefill.work is None or self._config is None:
            return None
        samples_min = self._config.batching.samples_min
        models = _mean_model(prefill, samples_min), _mean_model(decode, samples_min)
        traffic = prefill.traffic
        if models[0] is None or models[1] is None or traffic is None or not traffic.routed_ps:
            return None
        uncached = 1 - (prefill.work.prefix_hit_share or 0.0)
        output = traffic.output_tps / traffic.succeeded_ps if traffic.succeeded_ps else 0.0
        work, first = decode.work, decode.serving[0].latest
        return RolePoint(
            prefill_model=models[0],
            decode_model=models[1],
            prefill_tps=max(prefill.work.prefill_tps, traffic.routed_prompt_tps * uncached),
            decode_tps=max(work.decode_tps, traffic.routed_ps * output),
            prompt_tokens=traffic.routed_prompt_tps / traffic.routed_ps * uncached,
            kv_per_seq=work.kv_tokens_used / work.running if work.running else KV_TOKENS_MEAN_PRIOR,
            kv_tokens_max=first.kv_tokens_max,
            running_seqs_max=first.running_seqs_hard,
        )


class RoleScaler:
    """The ``Scaler`` of one pool of a split fleet."""

    def __init__(self, board: RoleBoard, role: str) -> None:
        self._board = board
        self._role = role

    def recommend(self, signals: Signals, now_ns: int) -> ScaleAdvice:  # noqa: ARG002 - the protocol's arguments
        """One tick."""
        return self._board.ask(self._role, signals)


def _mean_model(signals: Signals, samples_min: int) -> StepCoefficients | None:
    """Mean of the coefficients of the replicas that take requests; ``None`` where none has learned enough."""
    latest = [r.latest.step_model for r in signals.serving]
    return mean_coefficients([m for m in latest if m is not None and m.samples >= samples_min])
