"""Closed loops: what a request's end leads to. Conversations, agent tasks and fixed numbers of users are scripts.

A script yields one :class:`Call` after the other, each made when the one before has ended and its pause is over, or a
:class:`Fork`: several scripts side by side, after all of which the script goes on. Each session has a random stream of
its own, so that what a session asks for does not depend on how fast others are answered. A call that fails ends its
session: what the others of its forks still have open is let run, nothing new is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias

from autoscaling.simulator.spec import SimRequest, SourceFactory
from autoscaling.simulator.workload.blocks import PromptText
from autoscaling.simulator.workload.rates import RateCurve, arrivals_ns
from autoscaling.simulator.workload.trace import Options, TraceError, stream_of
from policies.types import BlockHash

PAUSE_S_MAX = 1e6
"""Longest pause, 11 days; longer ones are cut."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a session."""

    pause_s: float
    """After the end of what came before."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[BlockHash, ...] = ()
    blocks_after: tuple[BlockHash, ...] = ()
    block_tokens: int = 512
    last: bool = False
    """The session is over when this call is."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Scripts that run side by side."""

    scripts: tuple[Script, ...]


Script: TypeAlias = Iterator["Call | Fork"]


@dataclass(frozen=True, slots=True)
class Session:
    """A session that begins."""

    script: Script
    tenant: str = ""
    task: bool = True
    """Its calls are one task; else each is a task of its own."""
    goes_on: bool = False
    """It goes on after a call that failed."""


MakeSession = Callable[[int, Random], Session]
"""Session number ``n``, with the session's own stream."""


def call_with(text: PromptText, pause_s: float, output_tokens: int, answer: int, *, last: bool = False) -> Call:
    """Call whose prompt is ``text``; the answer, labelled ``answer``, is appended to it."""
    blocks, prompt_tokens = text.blocks, text.tokens
    text.append(answer, output_tokens)
    return Call(pause_s, prompt_tokens, output_tokens, blocks, text.blocks, text.block_tokens, last)


class _Running:
    """A session that has begun."""

    __slots__ = ("alive", "spec", "task")

    def __init__(self, spec: Session, task: str) -> None:
        self.spec, self.task, self.alive = spec, task, True


class _Branch:
    """A script that runs, and the one that waits for it."""

    __slots__ = ("parent", "pending", "script", "session")

    def __init__(self, session: _Running, script: Script, parent: _Branch | None) -> None:
        self.session, self.script, self.parent = session, script, parent
        self.pending = 0


class SessionSource:
    """Starts sessions at given times and makes each of their calls when it is due."""

    def __init__(self, name: str, starts: Callable[[Random], Iterator[int]], make: MakeSession, rng: Random) -> None:
        self.name = name
        self._starts, self._make = starts, make
        self._seed = stream_of(rng)
        self._made = 0
        self._open: dict[int, _Branch] = {}

    def arrivals(self) -> Iterator[SimRequest]:
        """First calls of all sessions; a pause before them is left out, so that they come in order."""
        for number, at_ns in enumerate(self._starts(Random(f"{self._seed}/arrivals"))):
            spec = self._make(number, Random(f"{self._seed}/{number}"))
            running = _Running(spec, f"{self.name}-{number}" if spec.task else "")
            for request in self._advance(_Branch(running, spec.script, None), at_ns):
                yield request if request.arrival_ns == at_ns else replace(request, arrival_ns=at_ns)

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        """What the session does next, now that ``request`` is over."""
        branch = self._open.pop(request.index, None)
        if branch is None:
            return ()
        branch.session.alive &= succeeded or branch.session.spec.goes_on
        return self._advance(branch, now_ns) if branch.session.alive else ()

    def _advance(self, branch: _Branch, now_ns: int) -> list[SimRequest]:
        """Take the next step of ``branch``; where its script is over, of the one that waits for it."""
        step = next(branch.script, None)
        if isinstance(step, Call):
            return [self._request(branch, step, now_ns)]
        made: list[SimRequest] = []
        if isinstance(step, Fork):
            children = [_Branch(branch.session, script, branch) for script in step.scripts]
            branch.pending = len(children)
            if not children:
                return self._advance(branch, now_ns)
            for child in children:
                made += self._advance(child, now_ns)
        elif branch.parent is not None:
            branch.parent.pending -= 1
            if not branch.parent.pending:
                made += self._advance(branch.parent, now_ns)
        return made

    def _request(self, branch: _Branch, call: Call, now_ns: int) -> SimRequest:
        index = self._made
        self._made += 1
        self._open[index] = branch
        return SimRequest(
            index=index,
            arrival_ns=now_ns + round(min(max(call.pause_s, 0.0), PAUSE_S_MAX) * 1e9),
            prompt_tokens=call.prompt_tokens,
            output_tokens=call.output_tokens,
            blocks=call.blocks,
            block_tokens=call.block_tokens,
            blocks_after=call.blocks_after,
            tenant=branch.session.spec.tenant,
            task=branch.session.task,
            task_last=call.last or not branch.session.task,
        )


def sessions(name: str, curve: RateCurve, make: MakeSession, options: Options) -> SourceFactory:
    """Sessions that start at the rate of ``curve``."""
    if curve.periodic and options.duration_s is None and options.limit is None:
        raise TraceError("this load never ends; give duration or limit", name)
    curve.with_options(options)
    return lambda rng: SessionSource(name, lambda stream: arrivals_ns(curve, stream, options), make, rng)
