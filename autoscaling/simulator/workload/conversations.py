"""Generators of closed loops: chat with shared system prompts, agent tasks with parallel calls, fixed concurrency."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from autoscaling.simulator.spec import SourceFactory
from autoscaling.simulator.workload.blocks import PromptText, label_of, mix
from autoscaling.simulator.workload.generators import BLOCK_TOKENS
from autoscaling.simulator.workload.lengths import Lengths, log_normal
from autoscaling.simulator.workload.rates import RateCurve
from autoscaling.simulator.workload.sessions import Call, Fork, Script, Session, SessionSource, call_with, sessions
from autoscaling.simulator.workload.trace import TIME_S_MAX, TOKENS_MAX, Options, TraceError, check_number


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversations in which every prompt begins with the prompt and the answer before it.

    Token counts and pauses are means of log-normal variates with ``cv``; numbers of turns are geometric.
    """

    name: str = "chat"
    """Chats of the same name have the same system prompts."""
    systems: int = 20
    """Different system prompts, each a tenant; their popularity falls as ``1 / rank ** popularity``."""
    popularity: float = 1.0
    system_tokens: int = 1_000
    turns_mean: float = 4.0
    turns_max: int = 40
    user_tokens_mean: float = 120.0
    output_tokens_mean: float = 250.0
    think_s_mean: float = 12.0
    cv: float = 1.0
    context_tokens_max: int = 32_000
    """A conversation ends before it grows beyond this."""
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        check_number("systems", self.systems, at_least=1, to=1_000_000)
        check_number("popularity", self.popularity, to=10.0)
        check_number("turns_mean", self.turns_mean, at_least=1, to=1e6)
        check_number("turns_max", self.turns_max, at_least=1, to=1e6)
        for what in ("user_tokens_mean", "output_tokens_mean"):
            check_number(what, getattr(self, what), at_least=1, to=TOKENS_MAX)
        check_number("system_tokens", self.system_tokens, to=TOKENS_MAX)
        check_number("think_s_mean", self.think_s_mean, to=TIME_S_MAX)
        check_number("cv", self.cv, to=20.0)
        check_number("context_tokens_max", self.context_tokens_max, at_least=self.system_tokens + 2, to=TOKENS_MAX)
        check_number("block_tokens", self.block_tokens, at_least=1, to=TOKENS_MAX)


def chat(curve: RateCurve, chat: Chat | None = None, options: Options | None = None) -> SourceFactory:
    """Conversations that start at the rate of ``curve``."""
    spec = chat or Chat()
    shares = list(accumulate(1.0 / rank**spec.popularity for rank in range(1, spec.systems + 1)))
    systems: dict[int, PromptText] = {}

    def make(_number: int, rng: Random) -> Session:
        system = bisect(shares, rng.random() * shares[-1], hi=spec.systems - 1)
        if system not in systems:
            systems[system] = PromptText(spec.block_tokens)
            systems[system].append(label_of(spec.name, "system", system), spec.system_tokens)
        return Session(_chat_script(spec, systems[system].copy(), rng), f"{spec.name}-system-{system}")

    return sessions(spec.name, curve, make, options or Options())


def _chat_script(spec: Chat, text: PromptText, rng: Random) -> Script:
    label = rng.getrandbits(64)
    turns = 1
    while turns < spec.turns_max and rng.random() > 1.0 / spec.turns_mean:
        turns += 1
    pause_s = 0.0
    user, output = _tokens(rng, spec.user_tokens_mean, spec.cv), _tokens(rng, spec.output_tokens_mean, spec.cv)
    user = min(user, spec.context_tokens_max - text.tokens - 1)
    output = min(output, spec.context_tokens_max - text.tokens - user)
    for turn in range(turns):
        text.append(mix(label, 2 * turn), user)
        answer = mix(label, 2 * turn + 1)
        ends_at = text.tokens + output
        user_next = _tokens(rng, spec.user_tokens_mean, spec.cv)
        output_next = _tokens(rng, spec.output_tokens_mean, spec.cv)
        last = turn == turns - 1 or ends_at + user_next + output_next > spec.context_tokens_max
        yield call_with(text, pause_s, output, answer, last=last)
        if last:
            return
        user, output = user_next, output_next
        pause_s = log_normal(rng, spec.think_s_mean, spec.cv)


@dataclass(frozen=True, slots=True)
class Agents:
    """Tasks of an agent: it plans, sends out helpers side by side, reads what they found, and plans again.

    A helper's context begins with that of its task; it calls tools between its requests and its context grows by each
    answer and each tool's result.
    """

    name: str = "agent"
    """Agents of the same name have the same instructions."""
    rounds: int = 2
    """Plans with helpers; one more request ends the task."""
    helpers: int = 3
    helper_calls: int = 3
    system_tokens: int = 4_000
    """Instructions and tools, the same for all tasks."""
    task_tokens_mean: float = 400.0
    output_tokens_mean: float = 150.0
    result_tokens_mean: float = 700.0
    """What a tool answers, and what a helper reports."""
    tool_s_mean: float = 2.0
    cv: float = 1.0
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        for what in ("rounds", "helpers", "helper_calls"):
            check_number(what, getattr(self, what), at_least=1, to=1_000)
        if self.rounds * self.helpers * self.helper_calls > 100_000:
            raise TraceError("rounds * helpers * helper_calls must be at most 100,000 requests a task")
        check_number("system_tokens", self.system_tokens, to=TOKENS_MAX)
        for what in ("task_tokens_mean", "output_tokens_mean", "result_tokens_mean"):
            check_number(what, getattr(self, what), at_least=1, to=TOKENS_MAX)
        check_number("tool_s_mean", self.tool_s_mean, to=TIME_S_MAX)
        check_number("cv", self.cv, to=20.0)
        check_number("block_tokens", self.block_tokens, at_least=1, to=TOKENS_MAX)


def agents(curve: RateCurve, agents: Agents | None = None, options: Options | None = None) -> SourceFactory:
    """Agent tasks that start at the rate of ``curve``."""
    spec = agents or Agents()
    system = PromptText(spec.block_tokens)
    system.append(label_of(spec.name, "system"), spec.system_tokens)
    make = lambda _number, rng: Session(_agent_script(spec, system.copy(), rng))  # noqa: E731
    return sessions(spec.name, curve, make, options or Options())


def _agent_script(spec: Agents, text: PromptText, rng: Random) -> Script:
    label = rng.getrandbits(64)
    text.append(label, _tokens(rng, spec.task_tokens_mean, spec.cv))
    for part in range(spec.rounds):
        yield call_with(text, 0.0, _tokens(rng, spec.output_tokens_mean, spec.cv), label_of(label, part, "plan"))
        seeds = [rng.getrandbits(63) for _ in range(spec.helpers)]
        yield Fork(tuple(_helper_script(spec, text.copy(), Random(seed)) for seed in seeds))
        for n in range(spec.helpers):
            text.append(label_of(label, part, n, "report"), _tokens(rng, spec.result_tokens_mean, spec.cv))
    yield call_with(text, 0.0, _tokens(rng, spec.output_tokens_mean, spec.cv), label_of(label, "end"), last=True)


def _helper_script(spec: Agents, text: PromptText, rng: Random) -> Script:
    label, pause_s = rng.getrandbits(64), 0.0
    for n in range(spec.helper_calls):
        text.append(mix(label, 2 * n), _tokens(rng, spec.result_tokens_mean, spec.cv))
        yield call_with(text, pause_s, _tokens(rng, spec.output_tokens_mean, spec.cv), mix(label, 2 * n + 1))
        pause_s = log_normal(rng, spec.tool_s_mean, spec.cv)


def concurrency(users: int, lengths: Lengths, requests: int, *, stagger_s: float = 0.0) -> SourceFactory:
    """``users`` who each send their next request as soon as the last one is answered, ``requests`` in all.

    The load of most published benchmark tables. ``stagger_s`` spreads the first requests evenly over this time. A
    user whose request fails sends the next one too.
    """
    check_number("users", users, at_least=1, to=1_000_000)
    check_number("requests", requests, at_least=1, to=1e9)
    check_number("stagger_s", stagger_s, to=TIME_S_MAX)
    users = min(users, requests)

    def starts(_rng: Random) -> Iterator[int]:
        return (round(stagger_s * 1e9 * user / users) for user in range(users))

    def script(number: int, rng: Random) -> Script:
        for _ in range(requests // users + (number < requests % users)):
            prompt_tokens, output_tokens = lengths.draw(rng)
            yield Call(0.0, prompt_tokens, output_tokens)

    def make(number: int, rng: Random) -> Session:
        return Session(script(number, rng), task=False, goes_on=True)

    return lambda rng: SessionSource(f"{users} users", starts, make, rng)


def _tokens(rng: Random, mean: float, cv: float) -> int:
    return max(1, min(TOKENS_MAX, round(log_normal(rng, mean, cv))))
