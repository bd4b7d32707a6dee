"""Who is looked at for one request, where a fleet is too large to look at everybody.

Up to :data:`SIZE` available replicas: all of them. Beyond, :data:`SIZE` of them:

* holders of the prompt's prefix, longest hits first, at most :data:`HOLDERS` of one length and twice as many in all;
  where more hold as much, the fastest of :data:`HOLDERS_SEEN` drawn from them;
* where nobody holds any: the prompt's homes, the first :data:`HOMES` on the ring that follow its first block and are
  about as fast as the fastest, so that several gateways send a prefix that is new to all of them to the same replica;
* the least loaded of each kind of replica (there is always one below the load bound, and in a mixed fleet a fast one);
* those with the longest TTFT, for requests that nobody can serve in time;
* the rest: those with the least TTFT for a prompt of a usual length.

The board keeps these orders to a tenth; equals are drawn by the gateway's own random numbers, so that gateways that
know nothing of each other spread. Everybody on the list is ranked by exact figures, and the list is filled from the
orders as long as anybody is available: it is never empty while somebody could take the request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from policies.routing.board import Board
from policies.routing.fleet import Fleet
from policies.routing.predict import Standing
from policies.routing.prefix_index import Levels, PrefixIndex
from policies.types import ReplicaId, Request

SIZE = 12
"""Replicas on a shortlist."""

HOLDERS = 3
HOLDERS_SEEN = 8
HOMES = 3
HOMES_SEEN = 24
"""Points of the ring that are looked at for homes."""

TIE_SHARE = 0.1
"""Predictions within this share of the least are equal."""

TIE_MS_MIN = 5.0
"""Predictions within this many ms of the least are equal, however short."""

KINDS = 3
"""Kinds of replicas that are looked at, the fastest first."""

LATEST = 2
"""Replicas with the longest TTFT that are looked at: where those go that nobody can serve in time."""

OF_A_KIND = 2
OF_A_KIND_SEEN = 8
"""Of the so many that are roughly the least loaded."""
"""Replicas of a kind that are taken for their load."""


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Candidates for one request."""

    standings: Mapping[ReplicaId, Standing]
    homes: Sequence[ReplicaId] | None = None
    """Candidates that lead their equals, first one first; ``None``: every replica is on the list, weigh them."""


def make_shortlist(
    request: Request,
    fleet: Fleet,
    board: Board,
    exclude: Collection[ReplicaId],
    index: PrefixIndex,
    levels: Levels,
    rng: Random,
    now_ns: int,
) -> Shortlist:
    """Candidates for ``request`` without ``exclude``, with their standings at ``now_ns``."""
    available = board.standings
    if len(available) <= SIZE + len(exclude):
        ids = sorted(r for r in available if r not in exclude)
        if len(ids) <= SIZE:
            return Shortlist(fleet.standings(ids, now_ns))
    taken = set(exclude)
    chosen = _holders(board, levels, index, rng, taken) if levels else []
    homes = [] if levels or not request.blocks else _homes(board, request.blocks[0], taken)
    chosen += homes
    turn = rng.random()
    for kind in sorted(board.by_load)[:KINDS]:
        seen = board.by_load[kind].least(OF_A_KIND_SEEN, turn, taken)
        seen.sort(key=lambda r: available[r].load_tokens)
        chosen += seen[:OF_A_KIND]
    taken.update(chosen)
    latest = board.by_ttft.most(LATEST, taken)
    chosen += latest
    taken.update(latest)
    chosen += board.by_ttft.least(SIZE - len(chosen), turn, taken)
    return Shortlist(fleet.standings(chosen, now_ns), homes)


def _holders(board: Board, levels: Levels, index: PrefixIndex, rng: Random, taken: set[ReplicaId]) -> list[ReplicaId]:
    """Replicas that hold some of the prefix, longest hits first; they are added to ``taken``."""
    chosen: list[ReplicaId] = []
    standings = board.standings
    for _, holders in levels:
        seen: list[ReplicaId] = []
        for replica_id in index.owners(holders, int(rng.random() * index.bits)):
            if replica_id in standings and replica_id not in taken:
                seen.append(replica_id)
                if len(seen) >= HOLDERS_SEEN:
                    break
        if len(seen) > HOLDERS:
            seen.sort(key=board.by_ttft.level)
        chosen += seen[:HOLDERS]
        taken.update(chosen)
        if len(chosen) >= 2 * HOLDERS:
            break
    return chosen[: 2 * HOLDERS]


def _homes(board: Board, block: int, taken: set[ReplicaId]) -> list[ReplicaId]:
    """Where a prefix that nobody holds goes, first choice first; they are added to ``taken``."""
    order = board.by_ttft
    level_max = order.level_max(TIE_SHARE, TIE_MS_MIN)
    homes: list[ReplicaId] = []
    for replica_id in islice(board.ring.walk(block), HOMES_SEEN):
        if replica_id in board.standings and replica_id not in taken and order.level(replica_id) <= level_max:
            homes.append(replica_id)
            taken.add(replica_id)
            if len(homes) >= HOMES:
                break
    return homes
