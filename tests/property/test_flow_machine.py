"""Many requests over a small fleet that comes and goes, with every legal event in any order.

Claims, for every history: exactly one end per request, and it is the last effect; whatever was counted is given back;
attempts stay within their bound; no replica is tried twice by one request; after a first byte only what can be
continued exactly is sent again, as a continuation, and never after a good answer; what was sent again without a wait
was paid for, and what was paid stays within the budget that answers paid in; who waits for its turn is let through,
refused or gone, once; of two attempts side by side each is counted until it is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.build import build_policies
from policies.config import AdmissionConfig, FaultsConfig, PolicyConfig
from policies.events import (
    AbortUpstream,
    ArmHedge,
    Arrived,
    ClientGone,
    Dispatch,
    Effect,
    Enqueue,
    Event,
    Expired,
    Finish,
    FirstByte,
    Granted,
    HedgeDue,
    HedgeWon,
    Outcome,
    RefusalKind,
    Relay,
    ReplicaRefused,
    ResponseEnded,
    ResponseStarted,
    Route,
    Routed,
    SendError,
    SendStreamError,
    TimeUp,
    UpstreamFailed,
    UpstreamFailure,
    WaitedOut,
    WaitForReplica,
)
from policies.flow import RequestFlow, State
from policies.types import Priority, Request
from tests.examples import examples

MS = 1_000_000
WAIT_MS = 100.0
FLEET_MAX = 4
REQUESTS_MAX = 6

AT_REPLICA: dict[State, tuple[Event, ...]] = {
    State.SENT: (
        ReplicaRefused(RefusalKind.CONNECT),
        ReplicaRefused(RefusalKind.DRAINING),
        ReplicaRefused(RefusalKind.UNAVAILABLE),
        *(ResponseStarted(status) for status in (200, 400, 500)),
        *(UpstreamFailed(kind) for kind in UpstreamFailure),
        TimeUp(),
    ),
    State.ANSWERED: (
        FirstByte(),
        ResponseEnded(),
        ResponseStarted(400),
        ResponseStarted(500),
        *(UpstreamFailed(kind) for kind in UpstreamFailure),
    ),
    State.STREAMING: (
        ResponseEnded(),
        ResponseEnded(stream_error=True),
        *(UpstreamFailed(kind) for kind in UpstreamFailure),
        *(UpstreamFailed(kind, resumable=True) for kind in UpstreamFailure),
        TimeUp(),
    ),
}
"""What a replica and the way to it can do to a request, by the state it is in."""


@dataclass
class Trail:
    """What one request went through, written down by the driver and not by the flow."""

    flow: RequestFlow
    sent_to: list[str] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    errors_sent: int = 0
    answered: int | None = None
    """Status of an engine's answer, the last attempt's."""
    byte_seen: bool = False
    breaks: int = 0
    draining_refusals: int = 0
    wait_until_ns: int | None = None
    exclude: frozenset[str] = frozenset()
    armed: bool = False
    """A second attempt may be due."""
    hedge: str = ""
    """Where a second attempt runs beside the first."""
    unpaid: bool = False
    """The next dispatch is a repetition that must be paid for."""


class FlowMachine(RuleBasedStateMachine):
    @initialize(
        attempts_max=st.integers(1, 4),
        burst=st.integers(0, 3),
        share=st.sampled_from([0.0, 0.2, 1.0]),
        draining_refusals_max=st.integers(1, 3),
        tokens_max=st.integers(1, 300),
        hedge_after_factor=st.sampled_from([None, 1.0]),
    )
    def start(
        self,
        attempts_max: int,
        burst: int,
        share: float,
        draining_refusals_max: int,
        tokens_max: int,
        hedge_after_factor: float | None,
    ) -> None:
        self.config = PolicyConfig(
            admission=AdmissionConfig(
                inflight_requests_max=REQUESTS_MAX, inflight_tokens_max=tokens_max, no_replica_wait_ms=WAIT_MS
            ),
            faults=FaultsConfig(
                attempts_max=attempts_max,
                retry_burst=burst,
                retry_share_max=share,
                draining_refusals_max=draining_refusals_max,
                hedge_after_factor=hedge_after_factor,
            ),
        )
        self.policies = build_policies(self.config, seed=1)
        self.ctx = self.policies.flow_context
        self.now_ns = 0
        self.trails: list[Trail] = []
        self.members: set[str] = set()
        self.replicas_made = 0
        self.answered: set[int] = set()
        self.paid = 0

    # --- the world ----------------------------------------------------------------------------------------------------

    @rule()
    @precondition(lambda self: len(self.members) < FLEET_MAX)
    def replica_comes(self) -> None:
        self.replicas_made += 1
        self.change_members(self.members | {f"replica-{self.replicas_made}"})

    @rule(data=st.data())
    @precondition(lambda self: self.members)
    def replica_leaves(self, data: st.DataObject) -> None:
        self.change_members(self.members - {data.draw(st.sampled_from(sorted(self.members)))})

    @rule(ms=st.sampled_from([1, 40, 200]))
    def time_passes(self, ms: int) -> None:
        self.now_ns += ms * MS
        for trail in self.live():
            assert trail.flow.state is not State.WAITING or trail.wait_until_ns is not None
            if trail.flow.state is State.WAITING and self.now_ns >= (trail.wait_until_ns or 0):
                self.tell(trail, WaitedOut())
        self.pump()

    def pump(self) -> None:
        """Let those go on whose turn it is."""
        by_id = {t.flow.request.request_id: t for t in self.live()}
        while True:
            pumped = self.policies.pump(self.now_ns)
            for request_id in pumped.expired:
                self.tell(by_id[request_id], Expired())
            for request_id in pumped.granted:
                self.tell(by_id[request_id], Granted())
            if not pumped.granted:
                return

    @rule(prompt_tokens=st.integers(0, 120), output_tokens=st.none() | st.integers(0, 120), blocks=st.integers(0, 3))
    @precondition(lambda self: len(self.live()) < REQUESTS_MAX + 1)
    def request_arrives(self, prompt_tokens: int, output_tokens: int | None, blocks: int) -> None:
        request = Request(
            request_id=f"request-{len(self.trails)}",
            model="m",
            endpoint="/v1/completions",
            tenant="",
            prompt_tokens=prompt_tokens,
            output_tokens_max=output_tokens,
            blocks=tuple(range(blocks)),
            block_tokens=64,
            stream=True,
            arrival_ns=self.now_ns,
            priority=Priority.INTERACTIVE,
        )
        trail = Trail(RequestFlow(self.ctx, request))
        self.trails.append(trail)
        self.tell(trail, Arrived())

    @rule(data=st.data())
    @precondition(lambda self: any(t.flow.state in AT_REPLICA and not t.hedge for t in self.live()))
    def replica_acts(self, data: st.DataObject) -> None:
        at_replica = [i for i, t in enumerate(self.trails) if t.flow.state in AT_REPLICA and not t.hedge]
        trail = self.trails[data.draw(st.sampled_from(at_replica))]
        self.tell(trail, data.draw(st.sampled_from(AT_REPLICA[trail.flow.state])))

    @rule(data=st.data())
    @precondition(lambda self: any(t.armed and t.flow.state is State.SENT for t in self.live()))
    def first_byte_is_late(self, data: st.DataObject) -> None:
        trail = data.draw(st.sampled_from([t for t in self.live() if t.armed and t.flow.state is State.SENT]))
        trail.armed = False
        self.tell(trail, HedgeDue())
        if trail.hedge and trail.hedge not in self.members:  # it left since the choice was made
            trail.hedge = ""
            assert trail.flow.step(ReplicaRefused(RefusalKind.CONNECT, hedge=True), self.now_ns) == []

    @rule(data=st.data(), of_hedge=st.booleans(), kind=st.sampled_from(RefusalKind), wins=st.booleans())
    @precondition(lambda self: any(t.hedge for t in self.live()))
    def one_of_two_attempts_ends(self, data: st.DataObject, of_hedge: bool, kind: RefusalKind, wins: bool) -> None:
        """It answers, breaks off, or is refused; the other one goes on, alone."""
        trail = data.draw(st.sampled_from([t for t in self.live() if t.hedge]))
        of_hedge = of_hedge if trail.hedge in self.members else not wins
        if wins and of_hedge:
            self.promote(trail)
            assert self.tell(trail, HedgeWon()) == []
        elif wins:
            trail.hedge = ""
            self.tell(trail, ResponseStarted(200))
        else:
            breaks = data.draw(st.booleans())
            trail.breaks += breaks
            broken, refused = UpstreamFailed(UpstreamFailure.RESET, hedge=of_hedge), ReplicaRefused(kind, of_hedge)
            if of_hedge:
                trail.hedge = ""
            else:
                self.promote(trail)
            assert trail.flow.step(broken if breaks else refused, self.now_ns) == []

    def promote(self, trail: Trail) -> None:
        """The second attempt is the request's own."""
        trail.sent_to.remove(trail.hedge)
        trail.sent_to.append(trail.hedge)
        trail.hedge = ""

    @rule(data=st.data())
    @precondition(lambda self: self.trails)
    def client_leaves(self, data: st.DataObject) -> None:
        trail = data.draw(st.sampled_from(self.trails))
        before, was_sent = len(trail.finishes), trail.flow.state in AT_REPLICA
        effects = self.tell(trail, ClientGone())
        assert len(trail.finishes) == 1
        assert (AbortUpstream() in effects) == was_sent
        assert before == 0 or effects == []

    @rule(data=st.data())
    @precondition(lambda self: any(t.flow.state is State.GONE for t in self.trails))
    def late_event_after_the_client_left(self, data: st.DataObject) -> None:
        trail = data.draw(st.sampled_from([t for t in self.trails if t.flow.state is State.GONE]))
        late = data.draw(st.sampled_from([e for events in AT_REPLICA.values() for e in events]))
        assert trail.flow.step(late, self.now_ns) == []

    # --- the driver ---------------------------------------------------------------------------------------------------

    def live(self) -> list[Trail]:
        return [t for t in self.trails if not t.flow.done]

    def change_members(self, members: set[str]) -> None:
        self.members = members
        self.policies.update_members({m: self.sample(m) for m in members}, self.now_ns)
        for trail in self.live():
            if trail.flow.state is State.WAITING:
                self.tell(trail, self.answer(trail))
        self.pump()

    def answer(self, trail: Trail) -> Routed:
        return Routed(self.policies.choose(trail.flow.request, trail.exclude, self.now_ns))

    def sample(self, member: str) -> dict[str, object]:
        """Some replicas have so much ahead of them that new requests wait for their turn."""
        backlog = 20_000 if int(member.rpartition("-")[2]) % 3 == 0 else 0
        return {
            "seq": 1, "running": 1, "waiting": 0, "prefill_backlog_tokens": backlog, "kv_tokens_used": 0,
            "kv_tokens_max": 100_000, "running_seqs_max": 16, "step_tokens_max": 2_048, "state": "ready",
            "step_a_ms": 10.0, "step_b_ms": 0.1, "step_c_ms": 0.0, "step_d_ms": 0.1, "step_samples": 100,
        }  # fmt: skip

    def tell(self, trail: Trail, event: Event) -> list[Effect]:
        self.note(trail, event)
        waited = trail.flow.state is State.WAITING
        effects = trail.flow.step(event, self.now_ns)
        for effect in effects:
            assert not trail.finishes, "nothing comes after the end"
            self.act(trail, effect, waited)
        if isinstance(event, ResponseStarted) and effects and isinstance(effects[-1], Route):
            trail.breaks += 1
            trail.unpaid = True
        if isinstance(event, FirstByte) or (isinstance(event, ResponseEnded) and (trail.answered or 0) < 500):
            self.answered.add(id(trail))
        if effects and isinstance(effects[-1], Route):
            return [*effects, *self.tell(trail, self.answer(trail))]
        return effects

    def note(self, trail: Trail, event: Event) -> None:
        match event:
            case ReplicaRefused(kind=RefusalKind.DRAINING):
                trail.draining_refusals += 1
            case ReplicaRefused():
                trail.unpaid = True
            case ResponseStarted(status=status):
                trail.answered = status
            case FirstByte():
                trail.byte_seen = True
            case UpstreamFailed():
                trail.breaks += 1
                trail.unpaid = True
            case _:
                pass

    def act(self, trail: Trail, effect: Effect, waited: bool) -> None:
        match effect:
            case Route(exclude=exclude) | WaitForReplica(exclude=exclude):
                assert exclude == frozenset(trail.sent_to)
                trail.exclude = exclude
                if isinstance(effect, WaitForReplica):
                    self.wait(trail, effect.ms)
            case Enqueue():
                assert not trail.sent_to
            case ArmHedge():
                assert not trail.byte_seen
                trail.armed = True
            case Dispatch(replica_id=replica_id, hedge=True):
                assert replica_id not in trail.sent_to
                self.paid += 1
                trail.sent_to.insert(-1, replica_id)
                trail.hedge = replica_id
            case Dispatch(replica_id=replica_id, resume=resume):
                assert resume == trail.byte_seen
                self.dispatch(trail, replica_id, waited)
            case Relay():
                assert trail.answered is not None
            case SendError():
                assert not trail.byte_seen
                trail.errors_sent += 1
            case SendStreamError():
                assert trail.byte_seen
                trail.errors_sent += 1
            case Finish():
                trail.finishes.append(effect)
            case AbortUpstream():
                assert trail.sent_to

    def wait(self, trail: Trail, ms: float) -> None:
        assert 0 < ms <= WAIT_MS
        assert trail.breaks == 0, "a request that may have broken a replica does not wait for the next one"
        until_ns = self.now_ns + round(ms * MS)
        assert trail.wait_until_ns in {None, until_ns}, "waits share one deadline"
        trail.wait_until_ns = until_ns

    def dispatch(self, trail: Trail, replica_id: str, waited: bool) -> None:
        assert replica_id in self.members
        assert replica_id not in trail.sent_to
        assert trail.answered is None or ((trail.answered < 400 or trail.answered >= 500) and trail.breaks)
        assert trail.breaks < 2
        self.paid += trail.unpaid and not waited
        trail.unpaid = False
        trail.answered = None
        trail.sent_to.append(replica_id)

    # --- the claims ---------------------------------------------------------------------------------------------------

    @invariant()
    def budget_bounds_what_was_sent_again(self) -> None:
        if hasattr(self, "config"):
            faults = self.config.faults
            assert self.paid <= faults.retry_burst + len(self.answered) * faults.retry_share_max + 1e-9

    @invariant()
    def attempts_are_bounded(self) -> None:
        for trail in getattr(self, "trails", ()):
            assert trail.flow.attempts <= self.config.faults.attempts_max
            assert len(trail.sent_to) <= self.config.faults.attempts_max + self.config.faults.draining_refusals_max
            assert len(trail.sent_to) - trail.draining_refusals <= trail.flow.attempts

    @invariant()
    def counts_follow_the_live_requests(self) -> None:
        if not hasattr(self, "ctx"):
            return
        live = self.live()
        assert self.ctx.admission.requests == len(live) <= REQUESTS_MAX
        at_member = [t for t in live if t.flow.state in AT_REPLICA and t.sent_to[-1] in self.members]
        hedges = [t.hedge for t in live if t.hedge in self.members]
        for replica_id in self.members:
            own = sum(t.sent_to[-1] == replica_id for t in at_member)
            assert self.ctx.book.requests(replica_id) == own + hedges.count(replica_id)
        assert self.ctx.book.inflight == len(at_member) + len(hedges)

    @invariant()
    def the_end_comes_once(self) -> None:
        for trail in getattr(self, "trails", ()):
            assert len(trail.finishes) == trail.flow.done
            if trail.flow.done:
                self.check_end(trail, trail.finishes[0].outcome)

    def check_end(self, trail: Trail, outcome: Outcome) -> None:
        if outcome is Outcome.FAILED:
            engine_answered = trail.answered is not None and trail.errors_sent == 0
            assert trail.errors_sent == 1 or engine_answered
        else:
            assert trail.errors_sent == (outcome is Outcome.REFUSED)

    def teardown(self) -> None:
        if not hasattr(self, "ctx"):
            return
        for i, trail in enumerate(self.live()):
            while trail.flow.state in AT_REPLICA and i % 2:
                self.tell(trail, ResponseStarted(200) if trail.flow.state is State.SENT else ResponseEnded())
            if not trail.flow.done:
                self.tell(trail, ClientGone())
        assert (self.ctx.admission.requests, self.ctx.admission.tokens, self.ctx.book.inflight) == (0, 0, 0)
        assert self.ctx.unproven == {}
        assert all(len(t.finishes) == 1 for t in self.trails)


TestFlowMachine = FlowMachine.TestCase
TestFlowMachine.settings = settings(max_examples=examples(100), stateful_step_count=60, deadline=None)
