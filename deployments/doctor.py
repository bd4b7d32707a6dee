"""What is wrong with a configuration, with this machine, and with what runs: the findings behind ``doctor``.

``examine`` is what ``up`` asks as well, so a start stops for exactly what ``doctor`` calls an error. Nothing is started
or changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployments import run_state
from deployments.auth import check_keys
from deployments.control_client import ControlClient, ControlError
from deployments.explain import span
from deployments.model_check import check_model
from deployments.preflight import Cause, Finding, Level, Needs, Port, by_level, judge, packages_for
from deployments.preflight_looks import measure
from deployments.recording import check_folder
from deployments.settings import Settings, SettingsError
from deployments.settings_models import each_of

SHOWN = 3
"""Replicas or gateways that are named where many have the same fault."""


# --- before a start ---------------------------------------------------------------------------------------------------


def examine(settings: Settings, ports: Sequence[Port], config_file: Path) -> list[Finding]:
    """What stands in the way of a start of ``settings`` on this machine, errors first."""
    needs = Needs(settings, tuple(ports), packages_for(settings))
    keys = settings.auth.keys_file
    files = [config_file] if keys is None else [config_file, Path(keys)]
    return by_level(
        [
            *_folders(settings),
            *_keys(settings),
            *(finding for each in each_of(settings) for finding in check_model(each.model)),
            *judge(measure(needs, Path(run_state.TEMP_ROOT), files), needs),
        ]
    )


def configuration_findings(error: SettingsError) -> list[Finding]:
    """One finding per problem of a configuration."""
    return [Finding(Level.ERROR, Cause.CONFIGURATION, problem) for problem in error.problems]


def _folders(settings: Settings) -> Iterator[Finding]:
    for each in each_of(settings):
        try:
            check_folder(each)
        except SettingsError as error:
            for problem in error.problems:
                yield Finding(Level.ERROR, Cause.FOLDER, problem, "make it writable for this user, or name another")


def _keys(settings: Settings) -> Iterator[Finding]:
    try:
        warning = check_keys(settings.auth)
    except SettingsError as error:
        for problem in error.problems:
            yield Finding(Level.ERROR, Cause.KEY_FILE, problem)
    else:
        if warning is not None:
            yield Finding(Level.WARNING, Cause.KEYS, warning)


def of_run(folder: Path) -> Iterator[Finding]:
    """What the state file in ``folder`` says: a run that lives, or what a dead one left."""
    state = run_state.load(folder)
    if state is None:
        return
    since = time.strftime("%H:%M:%S", time.localtime(state.started_at_s))
    members = run_state.members(state)
    if state.supervised or (members and state.supervisor is None):
        what = f"Tidegate runs already from this folder, since {since} ({len(members)} processes)"
        yield Finding(Level.ERROR, Cause.ALREADY_RUNNING, what, "make stop ends it; doctor --url URL looks at it")
    elif members:
        pid = state.supervisor.pid if state.supervisor is not None else 0
        what = f"make serve of {since} (pid {pid}) is dead and left {len(members)} processes"
        yield Finding(Level.ERROR, Cause.RUN_LEFT_OVER, what, "make stop ends them")
    else:
        what = f"a run of {since} did not end properly; of it only {state.temp_dir} is left"
        yield Finding(Level.NOTE, Cause.RUN_LEFT_OVER, what, "the next start removes it, or now: make stop")


def without_own_ports(findings: Sequence[Finding]) -> list[Finding]:
    """``findings`` without those that a run of this folder explains: its Ray and its ports."""
    known = {finding.cause for finding in findings if finding.level is Level.ERROR}
    if not known & {Cause.ALREADY_RUNNING, Cause.RUN_LEFT_OVER}:
        return list(findings)
    return [f for f in findings if f.cause not in {Cause.PORT_TAKEN, Cause.RAY_RUNNING}]


# --- while it runs ----------------------------------------------------------------------------------------------------


def ask(client: ControlClient) -> list[Finding]:
    """Ask a gateway what it and the controller know of each model, and say what is wrong, errors first."""
    try:
        first = client.get("/control/overview")
        found = list(judge_overview(first))
        for name in first["models"]:
            if name != first["model"]:
                other = judge_overview(client.get("/control/overview", {"model": name}))
                found += [replace(finding, what=f"model {name}: {finding.what}") for finding in other]
        return by_level(found)
    except ControlError as error:
        cause, todo = _UNANSWERED.get(error.status, ("gateway", "look at the gateway's log"))
        return [Finding(Level.ERROR, cause, str(error), todo)]


_UNANSWERED = {
    0: ("gateway_unreachable", ""),  # the client's own words say what to do
    401: ("key", ""),
    403: ("key", ""),
    404: (
        "not_tidegate",
        "what answers there is not Tidegate, or its prefix is missing: --url http://HOST:PORT/PREFIX",
    ),
    503: ("controller_absent", "Serve replaces it within seconds; if it does not, the controller's log says why"),
}
"""Cause and next step where there is no overview, by the status of the answer; 0: there was none."""


def judge_overview(overview: Mapping[str, Any]) -> Iterator[Finding]:
    """What one answer of ``/control/overview`` says is wrong."""
    rows = [dict(zip(overview["columns"], row, strict=True)) for row in overview["replicas"]]
    fleet = overview["fleet"] or {}
    if fleet.get("replicas_target") and not fleet["replicas_running"]:
        what = f"no replica runs, {fleet['replicas_target']} are wanted"
        yield Finding(
            Level.ERROR, "no_replica", what, "`serve status` and the replicas' logs say why they do not start"
        )
    if overview["blind"]:
        what = f"the controller hears too little to decide (tick {overview['tick']}): it holds every knob"
        yield Finding(Level.ERROR, "signals_lost", what, "see `conditions`; replicas' logs say why they do not report")
    if silent := [row for row in rows if not row["fresh"]]:
        oldest = max(row["age_s"] for row in silent)
        what = f"{len(silent)} of {len(rows)} replicas do not report, for up to {span(oldest)}: {_named(silent)}"
        yield Finding(Level.ERROR, "replica_silent", what, "their logs say why; Serve replaces those that are dead")
    if overview["unknown_replicas"]:
        what = f"{overview['unknown_replicas']} replicas run that never reported"
        yield Finding(Level.WARNING, "replica_unknown", what, "they may be starting; else look at their logs")
    if alone := [row for row in rows if row["ejected_by"]]:
        what = f"gateways leave {len(alone)} of {len(rows)} replicas alone: {_named(alone)}"
        yield Finding(Level.WARNING, "replica_left_alone", what, "`status` says why; it is tried again by itself")
    if silent := [row for row in overview["gateways"] if not row["fresh"]]:
        what = f"{len(silent)} of {len(overview['gateways'])} gateways do not report: {_named(silent)}"
        yield Finding(Level.ERROR, "gateway_silent", what, "look at its log; Serve replaces one that is dead")
    if fleet.get("unschedulable"):
        what = f"{fleet['unschedulable']} of {fleet['replicas_target']} replicas find no room on the cluster"
        yield Finding(
            Level.ERROR, "no_room", what, "add nodes, or lower scaling.replicas_max; `ray status` shows what is free"
        )
    for row in overview["conditions"]["active"]:
        what = f"condition {row['name']} for {span(row['since_s'] or 0)}: {row['text']}"
        yield Finding(Level.WARNING, "condition", what, row["next_step"])
    for row in overview["overrides"]:
        what = f"override {row['id']} holds {row['knob'] or 'every knob'} for {span(row['expires_in_s'])} more"
        yield Finding(Level.NOTE, "override", what, f"override clear {row['id']} gives it back")


def _named(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ", ".join(str(row["id"]) for row in rows[:SHOWN])
    return f"{names}{', ...' if len(rows) > SHOWN else ''}"
