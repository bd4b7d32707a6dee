"""``fit``: an engine profile from an engine's steps, its request log, or what a running service has learned."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from autoscaling.simulator.fit import FitError, StepErrors, batch_knots, fit_steps, law_from_coefficients, parse_steps
from autoscaling.simulator.fit_log import (
    LoggedRequest,
    fit_log,
    law_from_series,
    log_metrics,
    parse_request_log,
    parse_statistics,
    replay_log,
)
from autoscaling.simulator.profile import profile_to_json, with_sources
from autoscaling.simulator.spec import EngineProfile, StepLaw
from deployments.simulation.files import read_lines
from deployments.simulation.profile_files import load_profile, save_profile
from deployments.simulation.running import progress_on_stderr
from policies.types import StepCoefficients

STATE_BYTES_MAX = 64 * 1024 * 1024
STATE_TIMEOUT_S = 10.0
LAW = ("law.a_ms", "law.b_ms", "law.c_ms", "law.d_ms", "law.e_ms", "law.batch")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A profile, and what there is to say about it."""

    profile: EngineProfile
    words: list[str]


def fit(
    source: Annotated[
        str,
        typer.Argument(help="Step records (JSON lines), a request log (CSV), or the URL of a running service."),
    ],
    like: Annotated[
        str, typer.Option(help="Profile, a name or a file, that gives what the source does not know: memory, price.")
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the new profile; default: that of --out, or --like's.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="File for the profile; default: print it.")] = None,
    table: Annotated[
        bool, typer.Option("--table/--no-table", help="Steps: fit a table of batch sizes where there are enough.")
    ] = True,
    statistics: Annotated[
        Path | None, typer.Option(help="Request log: per-second statistics of the engine (CSV), for a better start.")
    ] = None,
    first: Annotated[
        int | None, typer.Option(min=1, help="Request log: fit to so many requests and judge by the others.")
    ] = None,
) -> None:
    """Fit an engine profile to steps, to a request log, or to a running service; print it and how far it is off."""
    base = load_profile(like)
    base = replace(base, name=name or (out.stem if out else base.name))
    progress = progress_on_stderr()
    with progress.step(f"fitting {base.name} to {source}"):
        if source.startswith(("http://", "https://")):
            fitted = from_service(base, source)
        elif Path(source).suffix == ".csv" or source.endswith(".csv.gz"):
            fitted = from_log(base, Path(source), statistics, first)
        else:
            fitted = from_steps(base, Path(source), table=table)
    for line in [*law_words(fitted.profile.law), *fitted.words]:
        progress.say(line)
    if out is None:
        typer.echo(profile_to_json(fitted.profile), nl=False)
    else:
        save_profile(fitted.profile, out)
        progress.say(f"written: {out}")


def from_steps(base: EngineProfile, path: Path, *, table: bool) -> Fitted:
    """Law from step records. Raises ``TraceError`` and ``FitError``."""
    samples = parse_steps(read_lines(path), path.name)
    found = fit_steps(samples, batch_knots(samples) if table else ())
    told = f"fitted to {found.seen.steps:,} steps of {path.name}, mean error {found.seen.mean_share:.1%}"
    words = [_error_words("all steps", found.seen), _error_words("every other step, held out", found.held_out)]
    return _with_law(base, found.law, told, words)


def from_log(base: EngineProfile, path: Path, statistics: Path | None, first: int | None) -> Fitted:
    """Law with which the simulated engine reproduces a request log. Raises ``TraceError`` and ``FitError``."""
    log = parse_request_log(read_lines(path), path.name)
    if first is not None and first >= len(log):
        raise FitError(f"--first {first}: the log has {len(log)} requests, some must be left to judge by")
    if statistics is not None:
        series = parse_statistics(read_lines(statistics), statistics.name)
        knots = [n for n, _ in base.law.batch]
        base = replace(base, law=law_from_series(series, log, base, knots))
    found = fit_log(base, log, first)
    run = replay_log(found.profile, log)
    told = f"fitted to {first or len(log)} of {len(log)} requests of {path.name} with the simulated engine"
    words = [_log_words("all requests", log, run.requests)]
    if first is not None:
        words.append(_log_words("those held out", log[first:], run.requests[first:]))
    return _with_law(found.profile, found.profile.law, told, words)


def from_service(base: EngineProfile, url: str) -> Fitted:
    """Law, memory, limits and cold start that the replicas of a running service report. Raises ``FitError``."""
    replicas = [r for r in _state(url).get("replicas") or () if isinstance(r, dict) and r.get("step_model")]
    if not replicas:
        raise FitError(f"{url}: no replica has told a step model yet")
    models = [_coefficients(r["step_model"], url) for r in replicas]
    law = law_from_coefficients(models)
    steps = sum(m.samples for m in models)
    told = f"learned online by {len(replicas)} replica(s) of {url} from {steps:,} steps"
    errors = [m.error_share for m in models if m.error_share is not None]
    words = [f"{told}; smoothed error {max(errors):.1%} at most" if errors else told]
    changes: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for field, key in (("kv_tokens", "kv_tokens_max"), ("running_seqs_max", "running_seqs_hard"),
                       ("step_tokens_max", "step_tokens_hard"), ("cold_start_ms", "cold_start_ms")):  # fmt: skip
        known = [r[key] for r in replicas if isinstance(r.get(key), int | float) and r[key] > 0]
        if known:
            changes[field] = min(known) if field != "cold_start_ms" else float(max(known))
            sources[field] = f"reported by {url}"
    if models_named := {r["model"] for r in replicas if isinstance(r.get("model"), str)}:
        changes["model"] = min(models_named)
    return _with_law(with_sources(replace(base, **changes), sources), law, told, words)


def law_words(law: StepLaw) -> list[str]:
    """The law on a line, its batch table on another."""
    line = (
        f"step = {law.a_ms:.3g} + {law.b_ms:.3g} x sequences + {law.c_ms:.3g} x KV kilotokens "
        f"+ {law.d_ms:.3g} x prompt tokens + {law.e_ms:.3g} x million pairs, in ms"
    )
    rows = ", ".join(f"{running}: {ms:.3g}" for running, ms in law.batch)
    return [line, f"sequences: ms, in the place of the first two: {rows}"] if rows else [line]


# --- inside -----------------------------------------------------------------------------------------------------------


def _with_law(base: EngineProfile, law: StepLaw, told: str, words: list[str]) -> Fitted:
    """``base`` with ``law``; what nothing was seen of stays ``base``'s and is said."""
    sources = dict.fromkeys(LAW, told)
    if law.d_ms <= 0:
        law = replace(law, d_ms=base.law.d_ms)
        del sources["law.d_ms"]
        words = [*words, f"nothing was learned of prompt tokens: {base.law.d_ms:g} ms each are those of --like"]
    if law.a_ms + law.b_ms <= 0:
        raise FitError("a step law without a time per step: these steps say nothing")
    return Fitted(with_sources(replace(base, law=_rounded(law)), sources), words)


def _rounded(law: StepLaw) -> StepLaw:
    """Five digits: more would claim what no fit knows."""
    a_ms, b_ms, c_ms, d_ms, e_ms = (float(f"{v:.5g}") for v in (law.a_ms, law.b_ms, law.c_ms, law.d_ms, law.e_ms))
    table = tuple((running, float(f"{ms:.5g}")) for running, ms in law.batch)
    return replace(law, a_ms=a_ms, b_ms=b_ms, c_ms=c_ms, d_ms=d_ms, e_ms=e_ms, batch=table)


def _error_words(what: str, errors: StepErrors) -> str:
    return (
        f"{what} ({errors.steps:,}): mean error {errors.mean_share:.1%}, p95 {errors.p95_share:.1%}, "
        f"sum of durations {errors.bias_share:+.1%}"
    )


def _log_words(what: str, log: Sequence[LoggedRequest], made: Sequence[LoggedRequest]) -> str:
    real, simulated = log_metrics(log), log_metrics(made)
    errors = ", ".join(f"{key.removesuffix('_ms').replace('_', ' ')} {simulated[key] / value - 1:+.1%}"
                       for key, value in real.items() if value > 0)  # fmt: skip
    return f"{what} ({len(log):,}), simulated against logged: {errors}"


def _state(url: str) -> Mapping[str, Any]:
    try:
        host = urllib.parse.urlsplit(url).hostname
    except ValueError:
        host = None
    if not host:
        raise FitError(f"{url}: names no host; expected a URL such as http://127.0.0.1:8000")
    address = url if "/control/" in url else url.rstrip("/") + "/control/state"
    try:
        with urllib.request.urlopen(address, timeout=STATE_TIMEOUT_S) as answer:
            text = answer.read(STATE_BYTES_MAX)
        state = json.loads(text)
    except (OSError, urllib.error.URLError, http.client.HTTPException) as error:
        raise FitError(f"{address}: no answer: {getattr(error, 'reason', error)}") from None
    except (ValueError, RecursionError):
        raise FitError(f"{address}: the answer is no JSON") from None
    if not isinstance(state, dict):
        raise FitError(f"{address}: the answer is not the controller's state")
    return state


def _coefficients(model: Mapping[str, Any], url: str) -> StepCoefficients:
    try:
        a_ms, b_ms, c_ms, d_ms = (float(model[key]) for key in ("a_ms", "b_ms", "c_ms", "d_ms"))
        error = model.get("error_share")
        samples, error_share = int(model["samples"]), None if error is None else float(error)
        return StepCoefficients(a_ms, b_ms, c_ms, d_ms, samples, error_share)
    except (KeyError, TypeError, ValueError):
        raise FitError(f"{url}: a step model that cannot be read: {model}") from None
