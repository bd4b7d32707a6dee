"""Every named condition once: its formula, how long its detection may take, and what an operator does next.

Code (``detect.py``), documentation (``CONDITIONS.md``, checked against this table by a test), commands, metrics and the
scenario suite read it. ``begin`` and ``end`` are the two thresholds of the formula; between them a condition keeps its
state, and it changes only after ``on_ticks`` or ``off_ticks`` ticks in a row. ``detect_s`` is the time from the begin
of what ``scenario`` describes to the condition, at one tick and one report a second; the scenario suite checks it.

Values only. What this must not do: judge signals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from policies.steering import Lever


@dataclass(frozen=True, slots=True)
class ConditionSpec:
    """One named condition, as operators read it."""

    name: str
    title: str
    """One line: what is wrong."""
    begin: str
    """When it becomes active, as a formula."""
    end: str
    """When it becomes inactive."""
    on_ticks: int
    """Ticks in a row that must say *begin*."""
    off_ticks: int
    """Ticks in a row that must say *end*."""
    detect_s: float
    """Longest time from the beginning of ``scenario`` until it is active."""
    scenario: str
    """What ``detect_s`` is measured from."""
    next_step: str
    """What an operator does when the control plane does not cure it by itself."""
    levers: tuple[Lever, ...] = ()
    """Levers that can cure it, in the order in which they should be tried; empty: no lever can."""
    targets: bool = False
    """Whether it names replicas."""


_A, _B, _S, _D, _R = Lever.AFFINITY, Lever.BATCH, Lever.SPECULATION, Lever.ADMISSION, Lever.REPLICAS

CONDITIONS: tuple[ConditionSpec, ...] = (
    ConditionSpec(
        name="cache_cold",
        title="Prefix caches hold less than routing believes",
        begin="realised / predicted hit share < 0.6, of 64 prompts and affinity.query_tokens_min tokens in 12 s",
        end="realised / predicted hit share >= 0.8, or too few hits predicted to compare",
        on_ticks=3,
        off_ticks=5,
        detect_s=20,
        scenario="caches lose what they held (restart, another model version, more prefixes than they can hold)",
        next_step="Compare KV cache size with the working set of prefixes; look for restarts and changed prompts",
        levers=(_A,),
    ),
    ConditionSpec(
        name="cold_start_gap",
        title="Requests wait for replicas that are still starting",
        begin="replicas start or are asked for, and 2 requests wait per serving replica, or some and TTFT "
        "burns >= 1 over 5 s",
        end="no replica is starting, or nothing waits",
        on_ticks=3,
        off_ticks=3,
        detect_s=20,
        scenario="replicas were asked for, and more is queued than the fleet serves",
        next_step="Wait for cold_start_ms, or raise replicas_min; a warm pool or faster model load closes the gap",
        levers=(_D,),
    ),
    ConditionSpec(
        name="decode_bound",
        title="Token gaps are what limits: batches are as large as gaps allow",
        begin="decode takes > 0.6 of step time, and gaps burn >= 1 over 60 s, or 9 of 10 sequences run and 2 "
        "requests wait per replica or more are refused than the quantile allows",
        end="decode takes < 0.5 of step time, or gaps burn < 1, less than half a request waits per replica and few are "
        "refused",
        on_ticks=5,
        off_ticks=5,
        detect_s=30,
        scenario="long answers fill every batch",
        next_step="More replicas, more devices per replica, or speculation; fewer sequences at once shorten gaps",
        levers=(_B, _S, _D, _R),
        targets=True,
    ),
    ConditionSpec(
        name="grey_failure",
        title="A replica answers, but slower than its kind, or its device reports faults",
        begin="busy time / what the law of its kind predicts for the same work > sqrt(faults.grey_factor) x the median "
        "of its kind, or most gateways (one, where its pace is not known to be good) ejected it for its answers, "
        "or uncorrected ECC or XID errors",
        end="all within 1.2 x the median of their kind, none ejected, no device errors",
        on_ticks=5,
        off_ticks=10,
        detect_s=30,
        scenario="one of at least three like replicas becomes three times slower",
        next_step="Look at its device (throttling, temperature, neighbours, ECC); replace the replica or its node",
        levers=(_A, _B, _R),
        targets=True,
    ),
    ConditionSpec(
        name="hot_spot",
        title="One replica queues while others have room",
        begin="a replica queues above routing.load_bound x mean load, and another is at most half full",
        end="no such replica",
        on_ticks=3,
        off_ticks=3,
        detect_s=15,
        scenario="most requests share one prefix, or all go to one replica",
        next_step="Lower affinity_strength or load_bound; look for one prefix that everybody sends",
        levers=(_A,),
        targets=True,
    ),
    ConditionSpec(
        name="kv_pressure",
        title="A KV cache is nearly full",
        begin="kv_tokens_used / kv_tokens_max > 0.9 on the fullest replica",
        end="< 0.8 on every replica",
        on_ticks=2,
        off_ticks=5,
        detect_s=10,
        scenario="sequences hold more than nine tenths of a cache",
        next_step="Lower running_seqs_max or the largest context; more replicas; a quantised KV cache",
        levers=(_B, _D, _R),
        targets=True,
    ),
    ConditionSpec(
        name="over_provisioned",
        title="One replica fewer would do",
        begin="full share x N / (N - 1) < 0.4 by the step law (by the busy share without one), no queue, N > "
        "replicas_min",
        end="> 0.5, or a queue, or N <= replicas_min",
        on_ticks=15,
        off_ticks=3,
        detect_s=30,
        scenario="load falls to a tenth of what the fleet carries",
        next_step="Nothing, unless it lasts: then lower replicas_min or check scaling.down_window_s",
        levers=(_R,),
    ),
    ConditionSpec(
        name="preemption_thrash",
        title="Sequences are thrown out of the KV cache again and again",
        begin="a replica preempted at least 3 times within the window of reports (12 s)",
        end="no preemption in the window",
        on_ticks=1,
        off_ticks=3,
        detect_s=15,
        scenario="running sequences outgrow the KV cache",
        next_step="Lower running_seqs_max (the tuner's brake does); check kv_tokens_max after the last deployment",
        levers=(_B, _D, _R),
        targets=True,
    ),
    ConditionSpec(
        name="prefill_bound",
        title="Prompt computation is what limits: requests wait for their first token",
        begin="prefill takes > 0.5 of step time, and 2 requests wait per replica or TTFT burns >= 1 over 60 s",
        end="prefill takes < 0.4 of step time, or TTFT burns < 1 and less than half a request waits per replica",
        on_ticks=5,
        off_ticks=5,
        detect_s=30,
        scenario="prompts become several times longer",
        next_step="Check hit shares first; then a larger step_tokens_max, prefill replicas, or more replicas",
        levers=(_A, _B, _D, _R),
        targets=True,
    ),
    ConditionSpec(
        name="queue_growing",
        title="The queue grows without bound",
        begin="queue >= 4 and >= replicas; mean of the newer half of 12 ticks >= 1.5 x the older half's and 2 more",
        end="queue < 2, or newer half < 1.1 x older half",
        on_ticks=3,
        off_ticks=3,
        detect_s=20,
        scenario="arrivals exceed what the fleet serves by half",
        next_step="More replicas (replicas_max?), or lower limits so that what cannot be served is refused at once",
        levers=(_B, _D, _R),
    ),
    ConditionSpec(
        name="retry_storm",
        title="Repeated attempts are a load of their own",
        begin="(gateways' retries + clients' repeats) / first arrivals > faults.retry_share_max, at least 10 "
        "within 12 s",
        end="half of that share, or less than 5",
        on_ticks=2,
        off_ticks=5,
        detect_s=15,
        scenario="engines fail requests and clients send them again",
        next_step="Find what fails first (ejected replicas, engine log); clients must honour Retry-After",
    ),
    ConditionSpec(
        name="signal_loss",
        title="The controller does not hear everybody",
        begin="blind, or replicas run and say nothing, or no gateway reports",
        end="all speak",
        on_ticks=3,
        off_ticks=2,
        detect_s=15,
        scenario="reports of a replica, or of all, stop",
        next_step="Check the network to the controller and the named replicas' logs; the last plan holds meanwhile",
        targets=True,
    ),
    ConditionSpec(
        name="slo_burn_fast",
        title="An error budget burns fast",
        begin="burn >= 3 over 60 s and over 5 s, of any objective of any class",
        end="burn < 1 over 5 s, of every objective; with nothing counted in 5 s, nothing in flight",
        on_ticks=2,
        off_ticks=5,
        detect_s=60,
        scenario="a quarter of the requests, or token gaps, miss an objective",
        next_step="Read which objective and class burns; other active conditions say why",
        levers=(_A, _B, _S, _D, _R),
    ),
    ConditionSpec(
        name="slo_burn_slow",
        title="An error budget burns slowly but steadily",
        begin="burn >= 1.5 over 12 min and over 60 s, of any objective of any class",
        end="burn < 1 over 60 s, of every objective; with nothing counted in 60 s, nothing in flight",
        on_ticks=2,
        off_ticks=5,
        detect_s=420,
        scenario="a sixth of the requests, or token gaps, miss an objective",
        next_step="Read which objective and class burns; plan capacity, or change the objective",
        levers=(_A, _B, _S, _D, _R),
    ),
    ConditionSpec(
        name="stuck_replica",
        title="A replica has work and makes no step",
        begin="it says so, or work and no step for 10 s and twice its longest predicted step",
        end="every replica with work makes steps",
        on_ticks=1,
        off_ticks=2,
        detect_s=25,
        scenario="an engine freezes",
        next_step="Read its log and stack; Serve replaces it after its health checks",
        targets=True,
    ),
    ConditionSpec(
        name="stuck_scale_up",
        title="Replicas were asked for and cannot be scheduled or do not come up",
        begin="Ray finds no room, target > running and none came up for 60 s and twice the longest cold start, "
        "or 3 starts in a row failed",
        end="running >= target, and a start ended well",
        on_ticks=3,
        off_ticks=2,
        detect_s=75,
        scenario="a replica was asked for and none comes up",
        next_step="Add nodes or free GPUs (`ray status`); check quotas and start-up errors in the replica's log",
        levers=(_D,),
    ),
)
"""Sorted by name."""

SPECS: Mapping[str, ConditionSpec] = MappingProxyType({spec.name: spec for spec in CONDITIONS})
"""By name."""
