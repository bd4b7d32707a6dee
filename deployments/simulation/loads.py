"""Load as people write it: a file of recorded traffic, or ``kind:key=value,...`` for a generator.

    traces/mooncake_conversation.jsonl.gz
    poisson:rate=10,prompt=3000,output=300,duration=600
    sinusoid:low=5,high=45,period=600,prompt=3000,output=300,duration=1800
    shared:rate=20,groups=150,prefix=6000,question=1200,output=1000,duration=300
    chat:rate=2,turns=4,duration=1800           agents:rate=0.2,helpers=3,duration=1800

Every kind except ``users`` takes a shape: ``rate``; or ``low,high,period``; or ``rate,to`` (a ramp over the duration);
or ``rate,peak,at`` (a flash crowd). Lengths of ``prompt`` and ``output`` are fixed, or log-normal around these means
with ``spread`` as coefficient of variation. Unknown keys are refused with the nearest known one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autoscaling.simulator.spec import SourceFactory
from autoscaling.simulator.workload.conversations import Agents, Chat, agents, chat, concurrency
from autoscaling.simulator.workload.generators import from_curve, shared_prefix
from autoscaling.simulator.workload.lengths import Fixed, Lengths, LogNormal
from autoscaling.simulator.workload.rates import RateCurve
from autoscaling.simulator.workload.trace import Options, TraceError
from deployments.simulation.choices import ChoiceError, count_in, near, number_in, pairs_of
from deployments.simulation.files import FORMATS, RATES_ONLY, detect_format, open_trace, parse_lengths

DAY_S = 86_400.0

ARRIVALS_MAX = 20_000_000
"""More would take days and all memory."""

SHAPE_KEYS = ("rate", "low", "high", "period", "to", "peak", "at", "rise", "hold", "fall", "duration", "limit")
LENGTH_KEYS = ("prompt", "output", "spread")
SHARED_KEYS = ("groups", "prompts", "prefix", "question", "output")
CHAT_KEYS = {
    "systems": "systems", "popularity": "popularity", "system": "system_tokens", "turns": "turns_mean",
    "user": "user_tokens_mean", "output": "output_tokens_mean", "think": "think_s_mean", "spread": "cv",
    "context": "context_tokens_max",
}  # fmt: skip
"""Keys of ``chat`` and the fields of ``Chat`` they fill."""
AGENT_KEYS = {
    "rounds": "rounds", "helpers": "helpers", "calls": "helper_calls", "system": "system_tokens",
    "task": "task_tokens_mean", "output": "output_tokens_mean", "result": "result_tokens_mean", "tool": "tool_s_mean",
    "spread": "cv",
}  # fmt: skip
WHOLE = frozenset({"systems", "system_tokens", "context_tokens_max", "rounds", "helpers", "helper_calls"})
"""Fields that are whole numbers."""


@dataclass(frozen=True, slots=True)
class Load:
    """Where requests come from, with a name for people."""

    name: str
    factory: SourceFactory


def load_of(
    text: str, options: Options, *, trace_format: str = "auto", lengths: str | None = None, spread: bool = False
) -> Load:
    """Open what ``text`` names; see the module.

    Args:
        text: path of a trace, or ``kind:key=value,...``.
        options: start, duration, limit, scale; they win over ``duration`` and ``limit`` in ``text``.
        trace_format: of a trace; ``auto`` looks at it.
        lengths: of traces that hold rates only: ``PROMPT,OUTPUT`` or ``FILE:CATEGORY``.
        spread: requests of a trace with one time are spread up to the next time.

    Raises:
        ChoiceError: neither a file nor a kind, or a wrong key.
        TraceError: the trace is wrong (with file and line), or a number of a generator is.
    """
    kind, colon, rest = text.partition(":")
    if kind in KINDS and not Path(text).exists():
        for option, given in (("--format", trace_format != "auto"), ("--lengths", lengths), ("--spread", spread)):
            if given:
                raise ChoiceError(f"{option}: is for traces; {kind} makes its own load")
        return Load(text, _generated(kind, rest if colon else "", options))
    path = Path(text).expanduser()
    if not text.strip():
        raise ChoiceError(f"a load is missing; give a trace or one of: {', '.join(KINDS)}")
    if not path.exists():
        looks_like_path = "/" in kind or "." in kind
        words = "" if looks_like_path else f"; as a generator it is unknown{near(kind, KINDS)}"
        raise ChoiceError(f"{text}: no such file{words}")
    if path.is_dir():
        raise ChoiceError(f"{text}: is a folder; a trace is a file")
    drawn = parse_lengths(lengths) if lengths else None
    if drawn is not None:
        trace_format = detect_format(path) if trace_format == "auto" else trace_format
        if trace_format in FORMATS and trace_format not in RATES_ONLY:
            raise ChoiceError(
                f"--lengths: are for traces of rates ({', '.join(RATES_ONLY)}); {trace_format} has its own"
            )
    return Load(path.name, open_trace(path, trace_format, options, lengths=drawn, spread=spread))


def _generated(kind: str, rest: str, options: Options) -> SourceFactory:
    needed, known, make = KINDS[kind]
    pairs = pairs_of(kind, rest, known)
    missing = [key for key in needed if key not in pairs]
    if missing:
        example = ",".join(f"{key}=..." for key in needed)
        raise ChoiceError(f"{kind}: {', '.join(missing)} missing; expected {kind}:{example},...")
    if "duration" in pairs and options.duration_s is None:
        options = replace(options, duration_s=number_in(f"{kind}: duration", pairs["duration"], above=0.0, to=1e9))
    if "limit" in pairs and options.limit is None:
        options = replace(options, limit=count_in(f"{kind}: limit", pairs["limit"]))
    try:
        return make(kind, pairs, options)
    except TraceError as error:
        raise ChoiceError(f"{kind}: {error}") from None


def _number(kind: str, pairs: Mapping[str, str], key: str, default: float, *, above: float = -math.inf) -> float:
    if key not in pairs:
        return default
    at_least = 0.0 if above == -math.inf else -math.inf
    return number_in(f"{kind}: {key}", pairs[key], above=above, at_least=at_least, to=1e9)


def _curve(kind: str, pairs: Mapping[str, str], options: Options) -> RateCurve:
    curve = _shape(kind, pairs, options)
    expected = curve.total / curve.length_s * (options.duration_s or 0.0) * options.scale
    if expected > ARRIVALS_MAX and (options.limit or math.inf) > ARRIVALS_MAX:
        raise ChoiceError(
            f"{kind}: makes about {expected:,.0f} requests or sessions, more than {ARRIVALS_MAX:,}; "
            "give a shorter duration or a limit"
        )
    return curve


def _shape(kind: str, pairs: Mapping[str, str], options: Options) -> RateCurve:
    rate = _number(kind, pairs, "rate", 1.0, above=0.0)
    if "high" in pairs or "low" in pairs:
        high = _number(kind, pairs, "high", 0.0, above=0.0)
        low = _number(kind, pairs, "low", 0.0)
        if not low <= high:
            raise ChoiceError(f"{kind}: low ({low:g}) must not be above high ({high:g})")
        return RateCurve.sinusoid(low, high, _number(kind, pairs, "period", DAY_S, above=0.0))
    if ("to" in pairs or "peak" in pairs) and options.duration_s is None:
        raise ChoiceError(f"{kind}: this shape needs duration")
    if "to" in pairs and options.duration_s is not None:
        return RateCurve.ramp(rate, _number(kind, pairs, "to", 0.0), options.duration_s)
    if "peak" in pairs and options.duration_s is not None:
        peak = _number(kind, pairs, "peak", 0.0, above=0.0)
        at, rise = _number(kind, pairs, "at", options.duration_s / 3), _number(kind, pairs, "rise", 10.0)
        hold, fall = _number(kind, pairs, "hold", options.duration_s / 6), _number(kind, pairs, "fall", 10.0)
        if at + rise + hold + fall > options.duration_s:
            raise ChoiceError(f"{kind}: at + rise + hold + fall is beyond the duration of {options.duration_s:g} s")
        return RateCurve.flash_crowd(rate, peak, at, rise, hold, fall, options.duration_s)
    if "rate" not in pairs:
        raise ChoiceError(f"{kind}: rate missing (or low,high,period); expected {kind}:rate=...,duration=...")
    return RateCurve.constant(rate)


def _lengths(kind: str, pairs: Mapping[str, str]) -> Lengths:
    prompt, output = _number(kind, pairs, "prompt", 1_000.0), _number(kind, pairs, "output", 200.0)
    spread = _number(kind, pairs, "spread", 0.0)
    if spread > 0:
        return LogNormal(prompt, output, spread, spread)
    return Fixed(round(prompt), round(output))


def _requests(kind: str, pairs: Mapping[str, str], options: Options) -> SourceFactory:
    cv = _number(kind, pairs, "cv", 1.0)
    return from_curve(_curve(kind, pairs, options), _lengths(kind, pairs), options, cv=cv)


def _shared(kind: str, pairs: Mapping[str, str], options: Options) -> SourceFactory:
    counts = {key: count_in(f"{kind}: {key}", pairs[key]) for key in SHARED_KEYS if key in pairs}
    named = {key if key in ("groups", "prompts") else f"{key}_tokens": value for key, value in counts.items()}
    return shared_prefix(_curve(kind, pairs, options), options, **named)


def _fields(kind: str, pairs: Mapping[str, str], keys: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, field in keys.items():
        if key in pairs:
            what = f"{kind}: {key}"
            found[field] = count_in(what, pairs[key], at_least=0) if field in WHOLE else number_in(what, pairs[key])
    return found


def _chat(kind: str, pairs: Mapping[str, str], options: Options) -> SourceFactory:
    fields = _fields(kind, pairs, CHAT_KEYS)
    return chat(_curve(kind, pairs, options), Chat(**fields), options)  # type: ignore[arg-type] # whole where int


def _agents(kind: str, pairs: Mapping[str, str], options: Options) -> SourceFactory:
    fields = _fields(kind, pairs, AGENT_KEYS)
    return agents(_curve(kind, pairs, options), Agents(**fields), options)  # type: ignore[arg-type] # whole where int


def _users(kind: str, pairs: Mapping[str, str], _options: Options) -> SourceFactory:
    users = count_in(f"{kind}: users", pairs["users"])
    requests = count_in(f"{kind}: requests", pairs["requests"])
    return concurrency(users, _lengths(kind, pairs), requests, stagger_s=_number(kind, pairs, "stagger", 0.0))


_REQUEST_KEYS = (*SHAPE_KEYS, "cv", *LENGTH_KEYS)

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[str, Mapping[str, str], Options], SourceFactory]]]
KINDS = {
    "poisson": (("rate", "prompt", "output"), _REQUEST_KEYS, _requests),
    "bursty": (("rate", "cv", "prompt", "output"), _REQUEST_KEYS, _requests),
    "sinusoid": (("low", "high", "period", "prompt", "output"), _REQUEST_KEYS, _requests),
    "diurnal": (("low", "high", "prompt", "output"), _REQUEST_KEYS, _requests),
    "ramp": (("rate", "to", "prompt", "output", "duration"), _REQUEST_KEYS, _requests),
    "flash": (("rate", "peak", "prompt", "output", "duration"), _REQUEST_KEYS, _requests),
    "shared": ((), (*SHAPE_KEYS, *SHARED_KEYS), _shared),
    "chat": ((), (*SHAPE_KEYS, *CHAT_KEYS), _chat),
    "agents": ((), (*SHAPE_KEYS, *AGENT_KEYS), _agents),
    "users": (("users", "requests"), ("users", "requests", "stagger", *LENGTH_KEYS), _users),
}
"""Kinds of generators: keys that must be given, all keys, and how it is made."""
