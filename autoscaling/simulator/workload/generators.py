"""Open-loop generators: arrivals from a rate curve, lengths from a distribution, prefixes shared or not.

Each function returns a ``SourceFactory``; the run gives it a random stream of its own. A generator needs an end: the
curve's, ``duration_s`` or ``limit``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from autoscaling.simulator.spec import SimRequest, Source, SourceFactory
from autoscaling.simulator.workload.blocks import PromptText, label_of
from autoscaling.simulator.workload.lengths import Fixed, Lengths
from autoscaling.simulator.workload.rates import RateCurve, arrivals_ns, gamma_gaps
from autoscaling.simulator.workload.trace import Options, TraceError, check_number, stream_of

BLOCK_TOKENS = 128
"""Tokens in one prefix block of generated prompts."""

MakeRequest = Callable[[int, int, Random], SimRequest]
"""Request number ``index`` that arrives at ``arrival_ns``, with the stream of lengths."""


class OpenSource:
    """Arrivals from a curve, each request made by a function; what a request's end does is nobody's business."""

    def __init__(self, name: str, times: Callable[[Random], Iterator[int]], make: MakeRequest, rng: Random) -> None:
        self.name = name
        self._times, self._make = times, make
        self._seed = stream_of(rng)

    def arrivals(self) -> Iterator[SimRequest]:
        """Times and lengths have a stream each, so that one does not move the other."""
        lengths = Random(f"{self._seed}/lengths")
        for index, at_ns in enumerate(self._times(Random(f"{self._seed}/arrivals"))):
            yield self._make(index, at_ns, lengths)

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:  # noqa: ARG002
        """None: open loop."""
        return ()


def needs_end(curve: RateCurve, options: Options) -> None:
    """Raise :class:`TraceError` where nothing would end the arrivals."""
    if curve.periodic and options.duration_s is None and options.limit is None:
        raise TraceError("this load never ends; give duration or limit", curve.name)


def from_curve(
    curve: RateCurve, lengths: Lengths, options: Options | None = None, *, cv: float = 1.0, tenant: str = ""
) -> SourceFactory:
    """Requests at the rate of ``curve`` with unrelated prompts; ``cv`` of the gaps: 1 is Poisson, more is bursty."""
    options = options or Options()
    needs_end(curve, options)
    curve.with_options(options)  # what is wrong with it is said now, not in the run
    gamma_gaps(cv)

    def make(index: int, at_ns: int, rng: Random) -> SimRequest:
        prompt_tokens, output_tokens = lengths.draw(rng)
        return SimRequest(index, at_ns, prompt_tokens, output_tokens, tenant=tenant)

    def source(rng: Random) -> Source:
        return OpenSource(curve.name, lambda stream: arrivals_ns(curve, stream, options, cv), make, rng)

    return source


def poisson(
    rate_rps: float,
    prompt_tokens: int,
    output_tokens: int,
    *,
    duration_s: float | None = None,
    limit: int | None = None,
) -> SourceFactory:
    """The plainest load: Poisson arrivals, every request alike, no shared prefix."""
    options = Options(duration_s=duration_s, limit=limit)
    return from_curve(RateCurve.constant(rate_rps), Fixed(prompt_tokens, output_tokens), options)


def bursty(
    rate_rps: float, cv: float, lengths: Lengths, *, duration_s: float | None = None, limit: int | None = None
) -> SourceFactory:
    """Gamma distributed gaps with coefficient of variation ``cv``."""
    return from_curve(RateCurve.constant(rate_rps), lengths, Options(duration_s=duration_s, limit=limit), cv=cv)


def shared_prefix(
    curve: RateCurve,
    options: Options | None = None,
    *,
    groups: int = 150,
    prompts: int = 5,
    prefix_tokens: int = 6_000,
    question_tokens: int = 1_200,
    output_tokens: int = 1_000,
    block_tokens: int = BLOCK_TOKENS,
) -> SourceFactory:
    """``groups`` long prefixes with ``prompts`` questions each, in shuffled order and again from the start at the end.

    The defaults are the workload of llm-d-benchmark's comparison of precise and approximate prefix routing.
    """
    options = options or Options()
    needs_end(curve, options)
    curve.with_options(options)
    Fixed(prefix_tokens + question_tokens, output_tokens)
    check_number("groups", groups, at_least=1, to=1_000_000)
    check_number("prompts", prompts, at_least=1, to=1_000_000 // groups)

    def source(rng: Random) -> Source:
        pairs = [(group, prompt) for group in range(groups) for prompt in range(prompts)]
        rng.shuffle(pairs)
        prefixes: dict[int, PromptText] = {}

        def make(index: int, at_ns: int, _lengths: Random) -> SimRequest:
            group, prompt = pairs[index % len(pairs)]
            if group not in prefixes:
                prefixes[group] = PromptText(block_tokens)
                prefixes[group].append(label_of("group", group), prefix_tokens)
            text = prefixes[group].copy()
            text.append(label_of("question", group, prompt), question_tokens)
            blocks, tokens = text.blocks, text.tokens
            text.append(label_of("answer", group, prompt, index), output_tokens)
            return SimRequest(
                index, at_ns, tokens, output_tokens, blocks, block_tokens, text.blocks, tenant=f"group-{group}"
            )

        return OpenSource("shared prefix", lambda stream: arrivals_ns(curve, stream, options), make, rng)

    return source
