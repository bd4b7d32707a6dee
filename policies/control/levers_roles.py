"""The lever of roles: how many replicas of one fleet compute prompts, and how many write answers.

What is asked of the fleet comes from live signals, and ``policies/disaggregation.py`` says what ratio that wants::

    prefill_tps    = max(dispatched prompt tokens/s * (1 - share believed cached), prompt tokens/s computed)
    prompt_tokens  = the same per request
    decode_tps     = max(tokens/s decoded, output tokens/s of requests that ended)

All replicas are the same engine, so both roles are reckoned with the mean of their step models. Prompts too short to be
split count for the prefill role although they are computed where they decode: with many of them it gets a little more
than it needs.

It must not say which replicas they are (``policies/split.py``), and holds while it is blind or nothing comes in.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.config import PolicyConfig
from policies.control.levers import LeverView
from policies.control.moves import Move, Place, Wishes
from policies.control.signals import Signals
from policies.disaggregation import RolePoint, RoleTuner
from policies.steering import ANY, Knob, Lever
from policies.step_model import mean_coefficients

PREFILL: Place = (Knob.PREFILL_REPLICAS, ANY)

KV_TOKENS_MEAN_PRIOR = 256.0
"""KV tokens of a decoding sequence before any ran."""


class RolesLever:
    """See the module."""

    lever = Lever.ROLES

    def __init__(self, config: PolicyConfig) -> None:
        self._samples_min = config.batching.samples_min
        self._tuner = RoleTuner(config.objectives)
        self._prefill = config.disaggregation.prefill_replicas

    @property
    def wishes(self) -> Wishes:
        """Replicas that prefill."""
        return {PREFILL: self._prefill}

    def propose(self, view: LeverView, now_ns: int) -> Sequence[Move]:  # noqa: ARG002 - it counts ticks
        """At most one change; none in a fleet of one, where nothing is split."""
        signals, replicas = view.signals, len(view.signals.serving)
        point = role_point(signals, self._samples_min) if replicas > 1 else None
        if point is None:
            return ()
        move = self._tuner.step(point, min(self._prefill, replicas - 1), replicas)
        if not move.changed:
            return ()
        before, self._prefill = self._prefill, move.after
        return [
            Move(
                self.lever, signals.model, {PREFILL: before}, {PREFILL: move.after}, move.reason, move.inputs,
                move.predicted,
            )
        ]  # fmt: skip

    def reconfigure(self, config: PolicyConfig) -> None:
        """Steer by the objectives of ``config`` from now on."""
        self._tuner = RoleTuner(config.objectives)

    def adopt(self, in_force: Wishes, now_ns: int) -> None:  # noqa: ARG002 - the protocol's arguments
        """Take over what stands."""
        value = in_force.get(PREFILL)
        if value is not None:
            self._prefill = int(value)


def role_point(signals: Signals, samples_min: int) -> RolePoint | None:
    """What the fleet is asked to carry; ``None``: not known, or nothing is asked of it."""
    traffic, work = signals.traffic, signals.work
    if traffic is None or work is None or not traffic.arrivals_ps or not traffic.routed_prompt_tps:
        return None
    models = [r.latest.step_model for r in signals.serving]
    model = mean_coefficients([m for m in models if m is not None and m.samples >= samples_min])
    if model is None:
        return None
    first = signals.serving[0].latest
    uncached_tps = traffic.routed_prompt_tps * (1 - (traffic.predicted_hit_share or 0.0))
    return RolePoint(
        prefill_model=model,
        decode_model=model,
        prefill_tps=max(work.prefill_tps, uncached_tps),
        decode_tps=max(work.decode_tps, traffic.output_tps),
        prompt_tokens=uncached_tps / traffic.arrivals_ps,
        kv_per_seq=work.kv_tokens_used / work.running if work.running else KV_TOKENS_MEAN_PRIOR,
        kv_tokens_max=first.kv_tokens_max,
        running_seqs_max=first.running_seqs_hard,
    )
