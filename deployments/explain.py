"""Decisions of the controller in an operator's words: what changed, why, what else, what was predicted, what happened.

Pure functions of the JSON that ``/control/...`` answers; nothing is computed that is not in it. ``None`` is unknown and
is said so. Words for knobs and levers stand here once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

from policies.split import SplitCode
from policies.steering import ANY, Knob, Lever, Verdict

Entry: TypeAlias = Mapping[str, Any]

KNOB_WORDS: Mapping[str, str] = {
    Knob.AFFINITY_STRENGTH: "how far routing trusts that a prompt's beginning is in a replica's cache (0 to 1)",
    Knob.LOAD_BOUND: "how many times the mean load a replica may hold before it takes no more",
    Knob.RUNNING_SEQS_MAX: "how many requests the replica's engine runs at once",
    Knob.STEP_TOKENS_MAX: "how many tokens one engine step may hold; fewer: shorter gaps, slower prompts",
    Knob.SPECULATIVE_DEPTH: "how many tokens the engine drafts ahead; 0: off",
    Knob.FORECAST_SHARE: "how much of the promised time a forecast may take before a request is refused",
    Knob.SHED_FACTOR: "how early less important classes are refused; below 1: earlier than configured",
    Knob.PREFILL_REPLICAS: "how many replicas compute prompts instead of answers",
    Knob.REPLICAS_TARGET: "how many replicas there should be",
    Knob.WARM_REPLICAS: "how many replicas stand by, started and without requests, beside those that serve",
    Knob.RETIRED: "1: the replica leaves and Serve starts another one in its place",
}
"""What each knob is, for people who have not read the code."""

LEVER_WORDS: Mapping[str, str] = {
    Lever.AFFINITY: "routing",
    Lever.BATCH: "batch size",
    Lever.SPECULATION: "speculation",
    Lever.ADMISSION: "admission",
    Lever.ROLES: "prefill and decode roles",
    Lever.REPLICAS: "number of replicas",
    "guard": "guard rails",
}
"""Levers by what they move."""

FIGURE_WORDS: Mapping[str, str] = {
    "successes_per_usd": "successful requests within objectives per dollar",
    "met_share": "requests within their objectives",
    "met_share_expected": "what was to be expected without the change, at this load",
    "ttft_ms": "time to first token",
    "itl_ms": "gap between tokens",
    "usd_per_hour": "cost per hour",
    "decode_tps": "output tokens per second",
    "step_ms": "length of an engine step",
}
"""Predicted and realised figures."""

VERDICT_WORDS: Mapping[str, str] = {
    Verdict.PENDING: "not known yet: its effect is still being measured",
    Verdict.BETTER: "it helped: the objective rose by more than noise",
    Verdict.NEUTRAL: "no difference beyond noise",
    Verdict.WORSE: "it made things worse by more than noise",
    Verdict.OVERTAKEN: "cannot be said: load, fleet or other levers changed too much in the meantime",
}
"""What became of a decision."""

SPLIT_WORDS: Mapping[str, str] = {
    SplitCode.SPLIT: "prompt computed at one replica, answer written at another",
    SplitCode.SHORT: "whole: too few uncached prompt tokens",
    SplitCode.UNSUITED: "whole: its form allows no handing over",
    SplitCode.NO_PREFILL: "whole: no replica that prefills took requests",
    SplitCode.NO_DECODE: "whole: no replica that decodes took requests",
    SplitCode.BUSY: "whole: the prefill replica would have been too late",
    SplitCode.AGAIN: "whole: it tried a replica on probation",
    SplitCode.PREFILL_FAILED: "whole after all: the prefill replica failed",
    SplitCode.PREFILL_TIMEOUT: "whole after all: the prefill replica took too long",
    SplitCode.PULL_FAILED: "whole after all: the decode replica answered the handed over prompt with an error",
    SplitCode.PULL_TIMEOUT: "whole after all: the decode replica gave no byte in time",
    SplitCode.RECOMPUTED: "handed over, but the decode engine could not pull and computed the prompt itself",
}
"""What became of a request where replicas have roles."""

HOLD_WORDS: Mapping[str, str] = {
    "Frozen": "FROZEN",
    "RolledBack": "rests after a roll-back",
    "Foreign": "left alone: somebody else set it",
}
"""Why the guard rails hold a knob."""

BEFORE = "_before"
"""End of the names of figures that were measured before a change."""

EVERYWHERE = (ANY, "all")
"""Targets that need no name."""

LABEL_CHARS = 15


def headline(entry: Entry) -> str:
    """One line: number, time, lever, change, verdict."""
    acted = "  [not acted on: shadow mode]" if _is_shadow(entry) else ""
    verdict = entry.get("verdict") or Verdict.PENDING
    told = "" if verdict == Verdict.PENDING else f"  -> {verdict}"
    return f"#{entry['seq']}  {time_of_day(entry)}  {_about(entry)}: {_change(entry)}{told}{acted}"


def explain(entry: Entry, now_unix_s: float | None = None) -> str:
    """The whole story of one decision, in a dozen lines or so."""
    lines = [f"Decision #{entry['seq']} at {time_of_day(entry)} UTC{_ago(entry, now_unix_s)}: {_about(entry)}", ""]
    for label, texts in (
        ("What changed", list(_changes(entry))),
        ("Why", list(_why(entry))),
        ("Considered", list(_considered(entry))),
        ("Predicted", [_outcome(entry.get("predicted") or {}) or "nothing was predicted for this decision"]),
        ("What happened", list(_happened(entry))),
        ("By hand", list(_by_hand(entry))),
        ("All figures", list(_figures(entry.get("inputs") or {}))),
    ):
        for number, text in enumerate(texts):
            lines.append(f"{label if number == 0 else '':<{LABEL_CHARS}}{text}")
    return "\n".join(lines)


def explain_condition(condition: Entry) -> str:
    """One condition: what it is, how it is judged, and what to do."""
    active = bool(condition.get("active"))
    since = condition.get("since_s")
    state = "ACTIVE" if active else "not active"
    if since is not None:
        state += f" for {span(float(since))}"
    lines = [f"{condition['name']}: {state}", f"{'What':<{LABEL_CHARS}}{condition['title']}"]
    if condition.get("text"):
        lines.append(f"{'Now':<{LABEL_CHARS}}{condition['text']}{_confidence(condition)}")
    if condition.get("targets"):
        lines.append(f"{'Replicas':<{LABEL_CHARS}}{', '.join(condition['targets'])}")
    lines.append(f"{'Begins when':<{LABEL_CHARS}}{condition['begin']}")
    lines.append(f"{'Ends when':<{LABEL_CHARS}}{condition['end']}")
    lines.append(f"{'Next step':<{LABEL_CHARS}}{condition['next_step']}")
    return "\n".join(lines)


def override_line(override: Entry) -> str:
    """One override in force."""
    knob = override.get("knob") or "every knob"
    target = override.get("target") or ANY
    where = "" if target == ANY else f" of {target}"
    mode = override.get("mode")
    what = f"= {number(override.get('value'))}" if mode is None else f"in {mode} mode"
    by = override.get("by") or "nobody named (no keys)"
    why = f", because: {override['why']}" if override.get("why") else ""
    left = span(float(override.get("expires_in_s") or 0))
    return f"{override['id']}  {knob}{where} {what}, {left} left, set by key {by}{why}"


def shadow_line(row: Entry) -> str:
    """Whether decisions about one knob are acted on, and what the guard rails hold of it."""
    left = row.get("expires_in_s")
    ends = "" if left is None else f", {span(float(left))} left"
    acted = "acted on" if row["mode"] == "act" else "SHADOW: written down, not acted on"
    lines = [f"{row['knob']:<18}{acted}  ({row['because']}{ends})"]
    for held in row.get("held") or []:
        where = "" if held["target"] in EVERYWHERE else f" at {held['target']}"
        kind = HOLD_WORDS.get(held["kind"], held["kind"])
        lines.append(f"{'':<18}{kind}{where} for {span(float(held['expires_in_s']))}: {held['reason']}")
    return "\n".join(lines)


# --- parts ------------------------------------------------------------------------------------------------------------


def _about(entry: Entry) -> str:
    lever = str(entry["lever"])
    words = LEVER_WORDS.get(lever, lever)
    return words if entry["target"] in EVERYWHERE else f"{words} of {entry['target']}"


def _change(entry: Entry) -> str:
    before, after = entry.get("before") or {}, entry.get("after") or {}
    moved = [_step(name, before.get(name), value) for name, value in after.items() if before.get(name) != value]
    held = [_step(name, value, value) for name, value in after.items()]
    return ", ".join(moved or held or [str((entry.get("reason") or {}).get("text") or "nothing set")])


def _step(name: str, before: Any, after: Any) -> str:
    return f"{name} stays {_value(after)}" if before == after else f"{name} {_value(before)} -> {_value(after)}"


def _value(value: Any) -> str:
    """A knob's value; ``None``: the control plane has no opinion and the engine's or the configured value holds."""
    return "not set" if value is None else number(value)


def _changes(entry: Entry) -> Iterator[str]:
    before, after = entry.get("before") or {}, entry.get("after") or {}
    for name, value in after.items():
        meaning = KNOB_WORDS.get(name)
        yield _step(name, before.get(name), value) + (f"  ({meaning})" if meaning else "")
    if not after:
        yield "no knob was set"
    if _is_shadow(entry):
        yield "Nothing was really changed: this knob is in shadow mode, the decision was only written down."


def _why(entry: Entry) -> Iterator[str]:
    reason = entry.get("reason") or {}
    yield f"{_sentence(str(reason.get('text') or 'no reason was given'))}  [{reason.get('code', '?')}]"
    details = entry.get("condition_details") or []
    for condition in details:
        since = condition.get("active_s")
        age = "" if since is None else f" (active for {span(float(since))})"
        yield f"- {condition['title']} [{condition['name']}]{age}: {condition['text']}"
        figures = _pairs(condition.get("evidence") or {})
        if figures:
            yield f"  {figures}"
    named = {condition["name"] for condition in details}
    rest = [name for name in entry.get("conditions") or [] if name not in named]
    if rest:
        yield f"- active as well: {', '.join(rest)}"
    if not details and not rest:
        yield "No alarm condition was active at that time."


def _figures(inputs: Mapping[str, Any]) -> Iterator[str]:
    pairs = [f"{name} = {number(value)}" for name, value in inputs.items() if value != ""]
    for start in range(0, len(pairs), 4):
        yield ", ".join(pairs[start : start + 4])


def _considered(entry: Entry) -> Iterator[str]:
    alternatives: Sequence[Entry] = entry.get("alternatives") or []
    for other in alternatives:
        lever = LEVER_WORDS.get(str(other["lever"]), str(other["lever"]))
        predicted = _outcome(other.get("predicted") or {})
        why_not = other.get("why_not")
        yield (
            f"- {lever}: {other['change']}"
            + (f"; predicted: {predicted}" if predicted else "")
            + (f"; not taken: {why_not}" if why_not else "")
        )
    if not alternatives:
        yield "nothing else was weighed against this"


def _happened(entry: Entry) -> Iterator[str]:
    if _is_shadow(entry):
        yield "nothing: it was not acted on"
        return
    verdict = str(entry.get("verdict") or Verdict.PENDING)
    if verdict == Verdict.PENDING and not _moved(entry):
        yield "nothing to judge: no value changed"
        return
    yield VERDICT_WORDS.get(verdict, verdict)
    if entry.get("verdict_text"):
        yield _sentence(str(entry["verdict_text"]))
    realised = _outcome(entry.get("realised") or {})
    if realised:
        ticks = entry.get("judged_tick")
        after = "" if ticks is None else f" (after {int(ticks) - int(entry['tick'])} ticks)"
        yield f"measured: {realised}{after}"


def _by_hand(entry: Entry) -> Iterator[str]:
    """How to set what stood before, where a knob was really moved."""
    if _is_shadow(entry):
        return
    before, after = entry.get("before") or {}, entry.get("after") or {}
    for name, value in after.items():
        old = before.get(name)
        if name in set(Knob) and old is not None and old != value:
            target = f" --target {entry['target']}" if Knob(name).per_replica else ""
            yield f"to go back: override set {name} {number(old).replace(',', '')}{target} --for 30m --why '...'"


def _moved(entry: Entry) -> bool:
    return bool(entry.get("before") != entry.get("after"))


def _is_shadow(entry: Entry) -> bool:
    """Whether a change was decided and not made. A hold changes nothing either way."""
    return _moved(entry) and not entry.get("acted", True)


def _outcome(figures: Mapping[str, Any]) -> str:
    """Figures in words; those of before the change (``NAME_before``) behind the others, as such."""
    told = [(name.removesuffix(BEFORE), name.endswith(BEFORE), value) for name, value in figures.items()]
    return ", ".join(
        f"{FIGURE_WORDS.get(name, name)} {'before ' if past else ''}{_figure(name, value)}"
        for name, past, value in sorted(told, key=lambda figure: figure[1])
    )


def _figure(name: str, value: Any) -> str:
    if value is None:
        return "unknown"
    if name.endswith(("_share", "_share_expected")):
        return f"{float(value):.1%}"
    if name.endswith("_ms"):
        return f"{number(value)} ms"
    return f"{number(value)} USD" if name.startswith("usd") else number(value)


def _pairs(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {number(value)}" for name, value in figures.items())


def _confidence(condition: Entry) -> str:
    confidence = condition.get("confidence")
    return "" if confidence is None or not condition.get("active") else f"  (confidence {float(confidence):.0%})"


def _sentence(text: str) -> str:
    first = text.partition(" ")[0]
    return text if "_" in first else text[:1].upper() + text[1:]


def number(value: Any) -> str:
    """A value for people: four significant digits, thousands apart, ``unknown`` for ``None``."""
    if value is None:
        return "unknown"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def span(seconds: float) -> str:
    """A length of time in its largest two units."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    if whole < 86_400:
        return f"{whole // 3_600} h {whole % 3_600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3_600} h"


def time_of_day(entry: Entry) -> str:
    """``11-30 21:14:05``: when the decision was made, in UTC."""
    at = entry.get("at")
    return "unknown time" if not at else f"{str(at)[5:10]} {str(at)[11:19]}"


def _ago(entry: Entry, now_unix_s: float | None) -> str:
    at = entry.get("at")
    if not at or now_unix_s is None:
        return ""
    return f", {span(now_unix_s - datetime.fromisoformat(str(at)).timestamp())} ago"
