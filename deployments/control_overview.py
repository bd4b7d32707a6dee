"""What an operator looks at, as one JSON of a few bytes a replica: ``/control/overview``.

``/control/state`` holds everything, 1.5 KB a replica; this, a tenth of it, is what the page at ``/dashboard`` and the
command ``status`` ask for each second, so replicas are rows under :data:`COLUMNS` and figures are rounded. Pure
functions of the controller's values; ``None`` is unknown. It must not decide, and it must not tell what
``/control/...`` does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deployments import explain
from deployments.control_view import plain
from policies.control.objective import ObjectiveSample
from policies.control.signals import GatewaySignals, ReplicaSignals, Signals
from policies.types import Histogram, Plan

COLUMNS = (
    "id", "state", "age_s", "fresh", "confidence", "running", "waiting", "open", "kv_share", "hit_share",
    "prefill_tps", "decode_tps", "itl_ms", "busy_share", "gpu_share", "bound", "running_seqs_max", "step_tokens_max",
    "speculative_depth", "ejected_by", "retired", "warm",
)  # fmt: skip
"""Fields of one replica's row. ``hit_share``: of prompt tokens looked up, those found in the prefix cache.
``prefill_tps``, ``decode_tps``: tokens per second. ``itl_ms``: the gap between tokens at the objectives' quantile.
``bound``: what limits its steps. The knobs are those in force. ``ejected_by``: gateways that leave it alone now.
``warm``: it stands by, out of rotation."""
DIGITS = 4
"""Figures are rounded to so many significant digits."""
DECISIONS_SHOWN = 12
OBJECTIVE_S = 60
"""Time that cost and kept promises are counted over, in seconds."""


def short(value: float | None) -> float | int | None:
    """``value`` in :data:`DIGITS` significant digits; whole from 1,000 on; ``None`` where it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    if value == 0 or abs(value) >= 1_000:
        return round(value)
    return round(value, DIGITS - 1 - math.floor(math.log10(abs(value))))


def signals_overview(signals: Signals | None, plan: Plan | None, at_ns: int, quantile: float) -> dict[str, Any]:
    """Replicas, gateways and traffic. ``signals`` are ``None`` before the first tick."""
    if signals is None:
        nothing: list[Any] = []
        return {"blind": True, "replicas": nothing, "unknown_replicas": None, "gateways": nothing, "traffic": None}
    retired, warm = (plan.retired, plan.warm) if plan is not None else (frozenset(), frozenset())
    ejected = signals.traffic.ejected if signals.traffic is not None else {}
    since_s = (at_ns - signals.now_ns) / 1e9
    return {
        "blind": signals.blind,
        "replicas": [
            [
                *_row(r, since_s, quantile),
                ejected.get(r.replica_id, 0),
                r.replica_id in retired,
                r.replica_id in warm,
            ]
            for r in signals.replicas
        ],
        "unknown_replicas": signals.unknown_replicas,
        "gateways": [_gateway(g, since_s) for g in signals.gateways],
        "traffic": _traffic(signals),
    }


def _row(replica: ReplicaSignals, since_s: float, quantile: float) -> list[Any]:
    """All but the last three columns."""
    latest, knobs, used = replica.latest, replica.latest.knobs, replica.utilisation
    queried = replica.prefix_query_tokens
    return [
        latest.replica_id,
        latest.state.value,
        round(replica.age_ms / 1_000 + since_s, 1),
        replica.fresh,
        short(replica.confidence),
        latest.running,
        latest.waiting,
        latest.http_inflight,
        short(latest.kv_tokens_used / latest.kv_tokens_max) if latest.kv_tokens_max > 0 else None,
        short(replica.prefix_hit_tokens / queried) if queried > 0 else None,
        short(replica.prefill_tps),
        short(replica.decode_tps),
        short(replica.itl.quantile_ms(quantile)),
        short(replica.busy_share),
        short(latest.gpu_utilisation_share),
        None if used is None else used.bound.value,
        knobs.running_seqs_max,
        knobs.step_tokens_max,
        knobs.speculative_depth,
    ]


def _gateway(gateway: GatewaySignals, since_s: float) -> dict[str, Any]:
    latest = gateway.latest
    return {
        "id": gateway.gateway_id,
        "age_s": round(gateway.age_ms / 1_000 + since_s, 1),
        "fresh": gateway.fresh,
        "inflight": latest.inflight,
        "queued": latest.queued,
        "arrivals_ps": short(latest.arrivals * 1_000 / latest.window_ms) if latest.window_ms > 0 else None,
        "ejected": plain(latest.ejected),
    }


def _traffic(signals: Signals) -> dict[str, Any] | None:
    traffic = signals.traffic
    if traffic is None:
        return None
    return {
        "arrivals_ps": short(traffic.arrivals_ps),
        "output_tps": short(traffic.output_tps),
        "inflight": traffic.inflight,
        "queued": traffic.queued,
        "retries_ps": short(traffic.retries_ps),
        "ttft": _quantiles(traffic.ttft),
        "itl": _quantiles(traffic.itl),
        "classes": {
            name: {
                "arrivals_ps": short(c.arrivals_ps),
                "met_share": short(c.met_share),
                "refused_ps": short(c.refused_ps),
            }
            for name, c in traffic.by_class.items()
        },
    }


def _quantiles(histogram: Histogram) -> dict[str, float | int | None]:
    return {"p50_ms": short(histogram.quantile_ms(0.5)), "p95_ms": short(histogram.quantile_ms(0.95))}


def objective_overview(sample: ObjectiveSample, priced: bool) -> dict[str, Any]:
    """Cost and kept promises of the last :data:`OBJECTIVE_S`. Not ``priced``: a replica counts as 1 USD an hour."""
    return {
        "seconds": short(sample.seconds),
        "met_share": short(sample.met_share),
        "successes_per_usd": short(sample.successes_per_usd),
        "usd_per_hour": short(sample.usd_per_hour),
        "succeeded": sample.succeeded,
        "refused": sample.refused,
        "failed": sample.failed,
        "priced": priced,
    }


def decisions_overview(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ledger entries in a line each, newest first."""
    return [
        {
            "seq": entry["seq"],
            "at": entry["at"],
            "line": explain.headline(entry),
            "why": entry["reason"]["text"],
            "code": entry["reason"]["code"],
            "verdict": entry["verdict"],
            "verdict_text": entry["verdict_text"],
        }
        for entry in reversed(list(entries))
    ]


def conditions_overview(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many are watched, and those that are active."""
    fields = ("name", "title", "since_s", "text", "confidence", "targets", "next_step")
    active = [{field: row.get(field) for field in fields} for row in rows if row["active"]]
    return {"watched": len(rows), "active": active}
