"""Start, watch and end one Tidegate on this machine: what ``make serve`` and ``make stop`` do.

The order is: check the configuration, check the machine, get the model, start Ray, hand the configuration to Serve,
wait for a real answer, stay until told to go. Whatever fails or interrupts, everything started is ended and its
temporary folder removed; logs stay in ``.run/``.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from deployments import model, run_state
from deployments.cluster import NotReadyError, Ports, RefusedError, ServeApi, start_ray
from deployments.config_file import IMPORT_PATH, check_config, load_yaml
from deployments.controller_actor import OWNER_DEPLOYMENT
from deployments.doctor import examine
from deployments.keys import INFERENCE, new_key, values_of
from deployments.preflight import Finding, Level
from deployments.progress import Progress, Step
from deployments.run_state import Identity, RunState
from deployments.settings import Settings, SettingsError
from deployments.settings_models import deployments_of, each_of
from policies.config import DEFAULT_TENANT

ROOT = Path(__file__).resolve().parent.parent
RUN_FOLDER = ROOT / ".run"
RAY_START_S_MAX = 90.0
POLL_S = 0.5
WATCH_S = 1.0
END_GRACE_S = 20.0
"""Ray and its processes are asked to end for this long, then forced."""
SUPERVISOR_END_S_MAX = END_GRACE_S + 40.0
PROBE_TIMEOUT_S = 120.0
PROBE_KEY_MARGIN_S = RAY_START_S_MAX + PROBE_TIMEOUT_S
_WORDS_MAX = 500
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StartError(RuntimeError):
    """The start failed; the message says what to do."""


class Interrupted(Exception):  # noqa: N818 (not an error)
    """Ctrl-C, or a signal to end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be started."""

    config: dict[str, Any]
    app: str
    prefix: str
    settings: Settings
    ports: Ports
    probe_key: str = field(default="", repr=False)
    """API key of the first request; empty where none is needed."""

    @property
    def url(self) -> str:
        """Address of the application on this machine."""
        return f"http://127.0.0.1:{self.ports.http}{self.prefix.rstrip('/')}"


def read_plan(config_file: Path, ports: Ports) -> Plan:
    """Check ``config_file`` and return what it asks for.

    Raises:
        SettingsError: the configuration is wrong.
    """
    try:
        config = load_yaml(config_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"{config_file}: cannot be read: {error}"]) from None
    found = check_config(config)
    name, settings = next(iter(found.items()))
    entry = next(app for app in config["applications"] if app.get("import_path") == IMPORT_PATH)
    http = int((config.get("http_options") or {}).get("port", ports.http))
    return Plan(config, name, str(entry.get("route_prefix", "/")), settings, replace(ports, http=http))


def findings_of(plan: Plan, config_file: Path) -> list[Finding]:
    """What stands in the way of ``plan`` on this machine, errors first."""
    return examine(plan.settings, plan.ports.listed(), config_file)


def with_probe_key(plan: Plan, lifetime_s: float) -> Plan:
    """``plan`` with a key for the first request, valid for ``lifetime_s``, where keys are needed.

    Only its hash goes to Serve, beside the keys of the configuration; the key stays in this process.
    """
    if not plan.settings.auth.required:
        return plan
    now_s = time.time()
    key, record = new_key(DEFAULT_TENANT, [INFERENCE], now_s, now_s + lifetime_s)
    config = copy.deepcopy(plan.config)
    app = next(app for app in config["applications"] if app.get("import_path") == IMPORT_PATH)
    app["args"] = app.get("args") or {}
    auth = app["args"].setdefault("auth", {})
    auth["keys"] = [*auth.get("keys", []), values_of(record)]
    return replace(plan, config=config, probe_key=key)


# --- up ---------------------------------------------------------------------------------------------------------------


def up(config_file: Path, ports: Ports, *, detach: bool, wait: bool, timeout_s: float, progress: Progress) -> None:
    """Start Tidegate; return when it was told to end, or when it is up and ``detach`` is set.

    Raises:
        StartError, SettingsError, ModelError: with one line that says what to do. Nothing is left running.
        Interrupted: it was told to end before it was up. Nothing is left running.
    """
    with signals_as_interrupts(), _only_one():
        _refuse_second()
        plan = read_plan(config_file, ports)
        _check_machine(plan, config_file, progress)
        for each in each_of(plan.settings):
            _get_model(each, progress)
        plan = with_probe_key(plan, timeout_s + PROBE_KEY_MARGIN_S)
        state = run_state.new_run(plan.ports.dashboard, None if detach else Identity.of(os.getpid()))
        keep = False
        try:
            run_state.save(RUN_FOLDER, state)
            process, state = _start(plan, state, progress)
            _deploy(plan, process, progress)
            if wait:
                plan = _wait_until_ready(plan, process, timeout_s, progress)
                _tell_ready(plan, state, progress, detach=detach)
            keep = detach
            if not detach:
                with contextlib.suppress(Interrupted):
                    _watch(process)
        finally:
            if not keep:
                end(state, progress)


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Raise ``Interrupted`` at a signal to end, so that everything is cleaned up on the way out."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name)

    # Under nohup a closed terminal stays ignored. SIGINT is taken even where a script's background job ignores it.
    hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in _END_SIGNALS if not (hangup_ignored and number == signal.SIGHUP)]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _only_one() -> Iterator[None]:
    RUN_FOLDER.mkdir(parents=True, exist_ok=True)
    with (RUN_FOLDER / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError("Tidegate is already running or starting from this folder; to end it: make stop") from None
        yield


def _refuse_second() -> None:
    state = run_state.load(RUN_FOLDER)
    if state is None:
        return
    if run_state.members(state):
        started = time.strftime("%H:%M:%S", time.localtime(state.started_at_s))
        raise StartError(f"Tidegate runs already (since {started}); to end it: make stop")
    run_state.forget(RUN_FOLDER, state)


def _check_machine(plan: Plan, config_file: Path, progress: Progress) -> None:
    with progress.step("checking the machine"):
        findings = findings_of(plan, config_file)
        errors = [finding.text for finding in findings if finding.level is Level.ERROR]
        if errors:
            raise StartError("\n".join(errors))
    for finding in findings:
        if finding.level is Level.WARNING:
            progress.warn(finding.text)


def _get_model(settings: Settings, progress: Progress) -> None:
    if settings.model.engine != "vllm":
        return
    source = settings.model.source
    with progress.step(f"model {source}") as step:
        if source in model.CATALOGUE:
            model.ensure(source, step.note)
        model.resolve(source)


def _start(plan: Plan, state: RunState, progress: Progress) -> tuple[subprocess.Popen[bytes], RunState]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with progress.step("starting Ray") as step:
        process = start_ray(ROOT, RUN_FOLDER / "ray.log", state, plan.settings, plan.ports)
        state = replace(state, ray=Identity.of(process.pid))
        run_state.save(RUN_FOLDER, state)
        api, deadline = ServeApi(plan.ports.dashboard), time.monotonic() + RAY_START_S_MAX
        while True:
            _must_live(process)
            try:
                api.details()
                return process, state
            except NotReadyError as error:
                if time.monotonic() > deadline:
                    raise StartError(
                        f"Ray did not answer within {RAY_START_S_MAX:.0f} s ({error}); see .run/ray.log"
                    ) from None
            except RefusedError as error:
                raise StartError(f"Ray's dashboard refused: {error}; see .run/ray.log") from None
            step.note("waiting for its dashboard")
            time.sleep(POLL_S)


def _must_live(process: subprocess.Popen[bytes]) -> None:
    code = process.poll()
    if code is not None:
        text = (RUN_FOLDER / "ray.log").read_text(encoding="utf-8", errors="replace")
        raise StartError(f"Ray ended by itself with exit code {code}: {failure_line(text)}; see .run/ray.log")


def _deploy(plan: Plan, process: subprocess.Popen[bytes], progress: Progress) -> None:
    with progress.step("handing the configuration to Serve"):
        try:
            ServeApi(plan.ports.dashboard).deploy(plan.config)
        except (NotReadyError, RefusedError) as error:
            _must_live(process)
            (RUN_FOLDER / "deploy_error.log").write_text(str(error), encoding="utf-8")
            raise StartError(
                f"Serve did not take the configuration: {failure_line(str(error))}; see .run/deploy_error.log"
            ) from None


def _wait_until_ready(plan: Plan, process: subprocess.Popen[bytes], timeout_s: float, progress: Progress) -> Plan:
    """Wait for the first answer; ``plan`` as seen from the first model that is up."""
    api, deadline = ServeApi(plan.ports.dashboard), time.monotonic() + timeout_s
    with progress.step("starting gateway and engine") as step:
        while (up := _models_up(plan, api, step)) is None:
            _must_live(process)
            if time.monotonic() > deadline:
                raise StartError(f"not ready after {timeout_s:.0f} s; see .run/logs, or wait longer with --timeout-s")
            time.sleep(POLL_S)
    for name in deployments_of(plan.settings):
        if name not in up:
            progress.warn(f"the model {name} did not start; see .run/deploy_error.log. The others are served")
    plan = replace(plan, settings=plan.settings.of(up[0]))
    with progress.step("asking for a first answer") as step:
        while True:
            _must_live(process)
            problem = probe(plan)
            if problem is None:
                return plan
            if time.monotonic() > deadline:
                raise StartError(f"the gateway gave no answer within {timeout_s:.0f} s: {problem}; see .run/logs")
            step.note(problem)
            time.sleep(POLL_S)


def _models_up(plan: Plan, api: ServeApi, step: Step) -> list[str] | None:
    """Models that are served, once every one is or cannot be; ``None``: not yet."""
    try:
        app = (api.details().get("applications") or {}).get(plan.app)
    except (NotReadyError, RefusedError) as error:
        step.note(f"Serve does not answer ({failure_line(str(error))})")
        return None
    if app is None:
        step.note("Serve is starting")
        return None
    if app.get("status") == "DEPLOY_FAILED":
        (RUN_FOLDER / "deploy_error.log").write_text(failure_text(app), encoding="utf-8")
        states = {name: item.get("status") for name, item in (app.get("deployments") or {}).items()}
        up = models_up(plan.settings, states)
        if up is None or up:
            return up
        raise StartError(f"the application did not start: {failure_line(failure_text(app))}; see .run/deploy_error.log")
    step.note(describe(app))
    return list(deployments_of(plan.settings)) if app.get("status") == "RUNNING" else None


def models_up(settings: Settings, states: Mapping[str, str | None]) -> list[str] | None:
    """Models that are served although a deployment failed: Serve starts the others all the same.

    ``states``: status of each deployment. ``None``: some are still starting; empty: nothing is served.
    """
    gateway = states.get(OWNER_DEPLOYMENT)
    found = {name: states.get(deployment) for name, deployment in deployments_of(settings).items()}
    if gateway == "DEPLOY_FAILED" or len(found) == 1:
        return []
    if not {gateway, *found.values()} <= {"HEALTHY", "DEPLOY_FAILED"}:
        return None
    return [name for name, state in found.items() if state == "HEALTHY"]


def failure_text(app: Mapping[str, Any]) -> str:
    """Return everything Serve says about an application that did not start."""
    parts = [str(app.get("message", ""))]
    parts += [str(item.get("message", "")) for item in (app.get("deployments") or {}).values()]
    return "\n".join(part for part in parts if part)


def describe(app: Mapping[str, Any]) -> str:
    """Return one line on what Serve is doing, such as ``Engine 0/1 replicas running, Gateway ready``.

    A deployment whose replicas fail to start (Serve tries again for a while) shows their last error.
    """
    words = []
    for name, item in (app.get("deployments") or {}).items():
        replicas = item.get("replicas") or []
        running = sum(replica.get("state") == "RUNNING" for replica in replicas)
        target = max(int(item.get("target_num_replicas") or 0), len(replicas), 1)
        if item.get("status") == "HEALTHY":
            words.append(f"{name} ready")
            continue
        message = str(item.get("message") or "")
        trouble = f" ({failure_line(message)})" if "Error" in message else ""
        words.append(f"{name} {running}/{target} replicas running{trouble}")
    return ", ".join(words) or "building the application"


def failure_line(text: str) -> str:
    """Return the line that says most: the last that looks like ``SomeError: why``, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if _names_an_error(line.partition(":")[0]) and line.partition(":")[2].strip()]
    return ((telling or lines or ["no reason given"])[-1])[:_WORDS_MAX]


def _names_an_error(word: str) -> bool:
    return word.replace(".", "").replace("_", "").isalnum() and word.endswith(("Error", "Exception"))


def probe(plan: Plan) -> str | None:
    """Ask the gateway for a short completion; return ``None`` when it came, else what came instead."""
    body = {"model": plan.settings.model.name, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    headers = {"content-type": "application/json"}
    if plan.probe_key:
        headers["authorization"] = f"Bearer {plan.probe_key}"
    request = urllib.request.Request(f"{plan.url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as answer:
            choices = json.load(answer).get("choices")
            return None if choices else "an answer without choices"
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}: {error.read(300).decode(errors='replace').strip()}"
    except (OSError, ValueError, AttributeError) as error:
        return str(error) or type(error).__name__


def _tell_ready(plan: Plan, state: RunState, progress: Progress, *, detach: bool) -> None:
    body = {
        "model": plan.settings.model.name,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    key = '-H "authorization: Bearer $TIDEGATE_API_KEY" ' if plan.settings.auth.required else ""
    progress.say(
        f"""
Tidegate is ready ({time.time() - state.started_at_s:.0f} s).
  API        {plan.url}/v1    model {plan.settings.model.name}
  control    {plan.url}/control/state    {plan.url}/control/decisions
  Ray        http://127.0.0.1:{plan.ports.dashboard}    (token: .venv/bin/ray get-auth-token)
  logs       {state.temp_dir}/session_latest/logs/serve

Try it:
  curl {plan.url}/v1/chat/completions -H 'content-type: application/json' {key}\\
    -d '{json.dumps(body)}'

{"To end it: make stop" if detach else "To end it: Ctrl-C here, or make stop in another shell"}"""
    )


def _watch(process: subprocess.Popen[bytes]) -> None:
    while True:
        _must_live(process)
        time.sleep(WATCH_S)


# --- down -------------------------------------------------------------------------------------------------------------


def end(state: RunState, progress: Progress) -> None:
    """End everything the run of ``state`` started, keep its logs, remove its files.

    Raises:
        StartError: a process could not be ended.
    """
    state = run_state.load(RUN_FOLDER) or state
    with _no_interrupts(), progress.step("ending everything that was started"):
        left = run_state.end_all(state, END_GRACE_S)
        _keep_logs(state)
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            raise StartError(f"these processes did not end: {pids}; end them with kill -9, then run make stop again")
        run_state.forget(RUN_FOLDER, state)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _keep_logs(state: RunState) -> None:
    source, target = Path(state.temp_dir, "session_latest", "logs", "serve"), RUN_FOLDER / "logs"
    if source.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(source, target)


def down(progress: Progress) -> bool:
    """End the run of this folder, whoever started it; return False when there is none.

    Raises:
        StartError: something could not be ended.
    """
    state = run_state.load(RUN_FOLDER)
    if state is None:
        return False
    supervisor = state.supervisor.process() if state.supervisor is not None else None
    if supervisor is not None:
        supervisor.send_signal(signal.SIGTERM)
        with progress.step("asking the running make serve to end"):
            deadline = time.monotonic() + SUPERVISOR_END_S_MAX
            while state.supervised and time.monotonic() < deadline:
                time.sleep(POLL_S)
    if (left_over := run_state.load(RUN_FOLDER)) is not None:
        end(left_over, progress)
    return True
