"""``status`` and ``request``: the fleet now, and what became of one request, in a terminal.

Both ask a gateway over HTTP, as ``control_commands.py`` does; ``--json`` prints what it answered. ``status`` shows what
the page at ``/dashboard`` shows, unwell replicas first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deployments.control_client import ControlClient, ControlError
from deployments.control_commands import (
    URL,
    JsonOption,
    KeyFileOption,
    ModelOption,
    UrlOption,
    client_of,
    one_line_errors,
)
from deployments.explain import SPLIT_WORDS, number, span
from deployments.simulation.tables import console_for

WATCH_S = 1.0
"""Time between two looks of ``status --watch``."""
LOOKS = 8
"""With several gateways the one that is asked may not be the one that served: so often it is asked again."""
LOOK_AGAIN_S = 0.2
ROWS = 30
"""Replicas that are listed where ``--all`` is not given."""
DECISIONS = 5
NONE = "-"
_WELL, _UNSURE, _BAD = "green", "yellow", "bold red"
_WORST_FIRST = (_BAD, _UNSURE, _WELL)
_STATES = {"ready": _WELL, "starting": _UNSURE, "draining": _UNSURE}

Row = Mapping[str, Any]


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on once a second until Ctrl-C.")] = False,
    everything: Annotated[bool, typer.Option("--all", help=f"All replicas, not only {ROWS}.")] = False,
    url: UrlOption = URL,
    key_file: KeyFileOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the fleet now: replicas, gateways, conditions, last decisions, cost; with --json --watch one line a look."""
    with one_line_errors():
        client = client_of(url, key_file, model)
        first = client.get("/control/overview")
        if as_json:
            _print_json(client, first, watch)
        elif not watch:
            _console().print(shown(first, everything))
        else:
            _watch(client, first, everything)


def _console() -> Console:
    """What gateways and replicas are called is never read as markup."""
    return console_for(Console(markup=False, highlight=False, emoji=False))


def _print_json(client: ControlClient, found: Row, watch: bool) -> None:
    typer.echo(json.dumps(found, indent=None if watch else 2))
    while watch:
        time.sleep(WATCH_S)
        typer.echo(json.dumps(client.get("/control/overview")))


def _watch(client: ControlClient, found: Row, everything: bool) -> None:
    with Live(shown(found, everything), console=_console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_S)
            try:
                live.update(shown(client.get("/control/overview"), everything), refresh=True)
            except ControlError as error:
                live.update(Text(f"{error} Trying again.", style=_BAD), refresh=True)


def request(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="x-request-id of the answer.")],
    url: UrlOption = URL,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what became of a request: where it went and why, where its time went, how it ended."""
    with one_line_errors():
        if "/" in request_id or not request_id.isprintable():
            raise ControlError(f"{request_id!r} is not the id of a request; x-request-id of its answer is")
        found = _look_up(client_of(url, key_file), request_id)
        if as_json:
            typer.echo(json.dumps(found, indent=2))
            return
        for line in told(found):
            typer.echo(line)


def _look_up(client: ControlClient, request_id: str) -> Row:
    for look in range(LOOKS):
        try:
            found: Row = client.get(f"/control/requests/{request_id}")
        except ControlError as error:
            if error.status != 404 or look == LOOKS - 1:
                raise
            time.sleep(LOOK_AGAIN_S)
        else:
            return found
    raise AssertionError("unreachable")


# --- one request in words ---------------------------------------------------------------------------------------------


def told(found: Row) -> Iterator[str]:
    """Lines on one answer of ``/control/requests/<id>``."""
    attempts = zip(found["replicas"], found["ends"], strict=True)
    hops = ", then ".join(f"{replica} ({end})" for replica, end in attempts)
    parts = [f"{name} {_ms(found[field])}" for name, field in _PARTS if found[field] is not None]
    for label, text in (
        ("Request", f"{found['id']} at {found['endpoint']}{', streamed' if found['stream'] else ''}"),
        ("Ended", f"{found['outcome']}: {found['reason']}, status {found['status'] or 'none sent'}"),
        ("Who", f"tenant {found['tenant']}, class {found['class'] or NONE}, key {found['key_id'] or NONE}"),
        ("Went to", hops or "no replica"),
        ("Because", _because(found["routed"])),
        ("Split", SPLIT_WORDS.get(found.get("disaggregation") or "", "")),
        ("Extra", _extra(found)),
        ("First token", f"{_ms(found['ttft_ms'])} = {' + '.join(parts)}" if found["ttft_ms"] else "none was sent"),
        ("Predicted", _ms(found["predicted_ttft_ms"]) + " from dispatch to first token"),
        ("Whole", _ms(found["e2e_ms"])),
        ("Tokens", _tokens(found)),
        ("Cost", "not charged" if found["usd"] is None else f"{found['usd']} USD"),
        ("Gateway", found["gateway"]),
    ):
        if text:
            yield f"{label:<13}{text}"


_PARTS = (("queue", "queue_ms"), ("route", "route_ms"), ("engine", "engine_ttft_ms"))


def _because(routed: Row | None) -> str:
    return "routing was not asked" if routed is None else f"{routed['text']}  [{routed['code']}]"


def _tokens(found: Row) -> str:
    prompt, cached, output = (number(found[f"{kind}_tokens"]) for kind in ("prompt", "cached", "output"))
    return f"{prompt} prompt, of which {cached} cached; {output} output"


def _extra(found: Row) -> str:
    words = [f"{found['attempts']} attempts"] if found["attempts"] > 1 else []
    words += [f"resumed {found['resumed']} times"] if found["resumed"] else []
    return ", ".join(words + (["hedged"] if found["hedged"] else []))


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{number(value)} ms"


# --- the fleet --------------------------------------------------------------------------------------------------------


def shown(found: Row, everything: bool = False) -> RenderableType:
    """One answer of ``/control/overview`` for a terminal."""
    return Group(
        *_headlines(found), _conditions(found), _replicas(found, everything), _gateways(found), *_decisions(found)
    )


def _headlines(found: Row) -> Iterator[Text]:
    traffic, objective, fleet = found["traffic"], found["objective"], found["fleet"]
    shadowed = [row["knob"] for row in found["knobs"] if row["mode"] != "act"]
    mode = "acting" if not shadowed else "SHADOW" if len(shadowed) == len(found["knobs"]) else f"shadow: {shadowed}"
    others = ", ".join(name for name in found["models"] if name != found["model"])
    model = found["model"] + (f" (--model: {others})" if others else "")
    yield Text(f"{model}  tick {found['tick']}, up {span(found['uptime_s'] or 0)}, {mode}", style="bold")
    if fleet is not None:
        room = f", {fleet['unschedulable']} find no room" if fleet["unschedulable"] else ""
        yield Text(f"replicas   {fleet['replicas_running']} of {fleet['replicas_target']} wanted{room}")
    if traffic is not None:
        ttft, itl = traffic["ttft"], traffic["itl"]
        yield Text(
            f"traffic    {_num(traffic['arrivals_ps'])} requests/s, {traffic['inflight']} in flight, "
            f"{traffic['queued']} queued, {_num(traffic['output_tps'])} output tokens/s"
        )
        yield Text(
            f"latency    first token p50 {_num(ttft['p50_ms'])} p95 {_num(ttft['p95_ms'])} ms, "
            f"token gap p50 {_num(itl['p50_ms'])} p95 {_num(itl['p95_ms'])} ms"
        )
    priced = f"{_num(objective['usd_per_hour'])} USD/h" if objective["priced"] else "no price set: 1 USD a replica-hour"
    yield Text(
        f"cost       {_num(objective['successes_per_usd'])} kept promises per USD ({priced}), "
        f"{_share(objective['met_share'])} kept in the last {span(objective['seconds'] or 0)}"
    )
    for row in found["overrides"]:
        what = f"{row['knob'] or 'every knob'} {'= ' + number(row['value']) if row['mode'] is None else row['mode']}"
        yield Text(f"override   {row['id']} {what}, {span(row['expires_in_s'])} left", style=_UNSURE)


def _conditions(found: Row) -> Text:
    conditions = found["conditions"]
    lines = Text("\n")
    for row in conditions["active"]:
        lines.append(f"{row['name']}", style=_BAD)
        lines.append(f" for {span(row['since_s'] or 0)}: {row['text']}\n  next step: {row['next_step']}\n")
    if not conditions["active"]:
        lines.append(f"no condition is active; {conditions['watched']} are watched", style=_WELL)
    return lines


def _replicas(found: Row, everything: bool) -> RenderableType:
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["replicas"]]
    rows.sort(key=lambda row: (_WORST_FIRST.index(_phase(row)[1]), row["id"]))
    listed = rows if everything else rows[:ROWS]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("replica", "phase", "run", "wait", "KV", "hits", "prompt/s", "output/s", "gap ms", "busy", "bound"):
        table.add_column(title, justify="left" if title in {"replica", "phase", "bound"} else "right")
    table.add_column("seqs/tokens/depth")
    for row in listed:
        phase, style = _phase(row)
        knobs = "/".join(NONE if row[k] is None else str(row[k]) for k in _KNOBS)
        shares = [_share(row[field]) for field in ("kv_share", "hit_share")]
        rates = [_num(row[field]) for field in ("prefill_tps", "decode_tps", "itl_ms")]
        table.add_row(
            row["id"], Text(phase, style=style), str(row["running"]), str(row["waiting"]), *shares, *rates,
            _share(row["busy_share"]), row["bound"] or NONE, knobs,
        )  # fmt: skip
    rest = len(rows) - len(listed)
    return Group(table, Text(f"and {rest} more, none of them worse (--all)")) if rest else table


_KNOBS = ("running_seqs_max", "step_tokens_max", "speculative_depth")


def _phase(row: Row) -> tuple[str, str]:
    if not row["fresh"]:
        return f"silent {span(row['age_s'])}", _BAD
    if row["ejected_by"]:
        return "left alone", _BAD
    if row["retired"]:
        return "retired", _UNSURE
    if row["warm"] and row["state"] == "ready":
        return "warm", _STATES["ready"]
    return row["state"], _STATES.get(row["state"], _BAD)


def _gateways(found: Row) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("gateway", "requests/s", "in flight", "queued", "leaves alone", "heard"):
        table.add_column(title, justify="right" if title in {"requests/s", "in flight", "queued"} else "left")
    for row in found["gateways"]:
        alone = ", ".join(f"{replica} ({why})" for replica, why in row["ejected"].items()) or NONE
        heard = Text(f"{span(row['age_s'])} ago", style=_WELL if row["fresh"] else _BAD)
        table.add_row(
            row["id"], _num(row["arrivals_ps"]), str(row["inflight"]), str(row["queued"]), alone, heard
        )  # fmt: skip
    return table


def _decisions(found: Row) -> Sequence[Text]:
    rows = found["decisions"][:DECISIONS]
    if not rows:
        return [Text("no decision yet: the fleet is steady")]
    return [Text(f"{row['line']}\n    {row['why']}  [{row['code']}]") for row in rows]


def _num(value: float | None) -> str:
    return NONE if value is None else number(value)


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def register(cli: typer.Typer) -> None:
    """Add the commands to ``cli``."""
    for command in (status, request):
        cli.command(command.__name__)(command)
