"""``dashboards publish|export|check|targets``: boards and alerts from a terminal. A failure is one line, exit code 1.

``publish`` reads the committed files of ``dashboards/``; ``export`` and ``check`` make boards anew and need
``grafana-foundation-sdk`` (``requirements/dashboards.lock``). Grafana's token comes from ``GRAFANA_TOKEN`` or a file,
never from the command line, which everybody on the host can read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dashboards import alerts
from dashboards.expressions import Answer, of_boards, of_rules
from deployments import launch, run_state
from deployments.control_commands import JsonOption
from deployments.dashboard_check import Prometheus, PrometheusError, answers, resolved
from deployments.dashboard_publish import PublishError, connect, gateways_of, newest_config, publish, targets
from deployments.progress import Progress
from deployments.settings import grafana_access

FOLDER = launch.ROOT / "dashboards"
SERVES_HAPROXY = Path("/tmp/haproxy-serve")  # noqa: S108 (Serve's own default)
"""Where Serve keeps HAProxy's files, a folder per node, unless the environment says otherwise."""

dashboards_cli = typer.Typer(help="Grafana boards and Prometheus alerts.", no_args_is_help=True)

FolderOption = Annotated[Path, typer.Option("--folder", help="Where grafana/ and prometheus/ are.")]
UrlOption = Annotated[str | None, typer.Option("--url", help="Grafana's address; else GRAFANA_URL.")]
TokenFileOption = Annotated[
    Path | None, typer.Option("--token-file", help="File whose first line is Grafana's token; else GRAFANA_TOKEN.")
]
HaproxyOption = Annotated[
    Path | None, typer.Option("--haproxy-config", help="HAProxy's configuration, as Serve wrote it on this host.")
]


class _FileError(Exception):
    """A file is missing, broken or stale."""


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (PrometheusError, PublishError, _FileError) as error:
        Progress().fail(str(error))
        raise typer.Exit(1) from None
    except OSError as error:
        Progress().fail(f"{error.filename}: {error.strerror}")
        raise typer.Exit(1) from None


@dashboards_cli.command("publish")
def publish_command(
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    uid: Annotated[str, typer.Option("--folder-uid", help="Folder in Grafana; made where it is missing.")] = "tidegate",
    title: Annotated[str, typer.Option("--folder-title", help="Its title when it is made.")] = "Tidegate",
    folder: FolderOption = FOLDER,
    as_json: JsonOption = False,
) -> None:
    """Write the boards into a folder of a Grafana; those that are there are replaced."""
    with _one_line_errors():
        known_url, token = grafana_access()
        if token_file is not None:
            token = token_file.read_text(encoding="utf-8").partition("\n")[0].strip()
        if not (url or known_url) or not token:
            raise PublishError("give --url or GRAFANA_URL, and --token-file or GRAFANA_TOKEN")
        base = url or known_url or ""
        paths = publish(connect(base, token), _committed(folder).values(), uid, title)
        _say([base.rstrip("/") + path for path in paths], as_json)


@dashboards_cli.command()
def export(folder: FolderOption = FOLDER, as_json: JsonOption = False) -> None:
    """Write the files of all boards and rules from the code."""
    with _one_line_errors():
        wanted = _made(folder)
        for path in _boards_in(folder):
            if path not in wanted:
                path.unlink()
        for path, text in wanted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        _say([str(path) for path in wanted], as_json)


@dashboards_cli.command()
def check(
    folder: FolderOption = FOLDER,
    prometheus: Annotated[
        str | None,
        typer.Option("--prometheus", help="Ask this one for every expression, such as http://127.0.0.1:9090."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Are the files what the code makes; with --prometheus: does every expression have data, or a known reason."""
    with _one_line_errors():
        stale = _stale(folder)
        documents = list(_committed(folder).values())
        found, values = _asked(Prometheus(prometheus), documents) if prometheus else ([], {})
    empty = [name for name, texts in values.items() if not texts]
    _print(stale, found, values, as_json)
    if stale or empty or not all(answer.fine for answer in found):
        raise typer.Exit(1)


@dashboards_cli.command("targets")
def targets_command(
    haproxy_config: HaproxyOption = None,
    model: Annotated[str, typer.Option(help="Label `model` of everything that is scraped.")] = "",
    front: Annotated[
        str, typer.Option(help="HAProxy's own address: the controller is asked there.")
    ] = "127.0.0.1:8000",
    folder: Annotated[Path, typer.Option("--folder", help="Where Prometheus looks.")] = FOLDER / "prometheus/targets",
    as_json: JsonOption = False,
) -> None:
    """Tell Prometheus where each gateway is. Run it again when gateways came or went."""
    with _one_line_errors():
        path = haproxy_config or _haproxy_config()
        addresses = gateways_of(path.read_text(encoding="utf-8"))
        if not addresses:
            raise _FileError(f"{path}: names no gateway; is the application up?")
        folder.mkdir(parents=True, exist_ok=True)
        for name, some in (("gateways", addresses), ("controller", [front])):
            (folder / f"{name}.json").write_text(targets(some, model), encoding="utf-8")
        if as_json:
            typer.echo(json.dumps({"gateways": addresses, "controller": front, "folder": str(folder)}))
        else:
            Progress().say(f"{', '.join(addresses)} in {folder}")


def _say(lines: list[str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(lines))
        return
    for line in lines:
        Progress().say(line)


def register(cli: typer.Typer) -> None:
    """Add the commands to ``cli``."""
    cli.add_typer(dashboards_cli, name="dashboards")


def _haproxy_config() -> Path:
    state = run_state.load(launch.RUN_FOLDER)
    return newest_config(SERVES_HAPROXY if state is None else Path(state.temp_dir))


def _boards_in(folder: Path) -> list[Path]:
    return sorted((folder / "grafana").glob("tidegate-*.json"))


def _committed(folder: Path) -> Mapping[str, dict[str, Any]]:
    paths = _boards_in(folder)
    if not paths:
        raise _FileError(f"{folder / 'grafana'}: there are no boards; run: tidegate dashboards export")
    try:
        return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    except ValueError as error:
        raise _FileError(f"{folder / 'grafana'}: is not JSON: {error}") from None


def _made(folder: Path) -> Mapping[Path, str]:
    try:
        from dashboards import boards
    except ImportError:
        raise _FileError("grafana-foundation-sdk is not installed; run: requirements/install.sh dashboards") from None
    return {**boards.files(folder / "grafana"), folder / "prometheus/rules.yaml": alerts.text()}


def _stale(folder: Path) -> list[str]:
    wanted = _made(folder)
    found = {path: path.read_text(encoding="utf-8") for path in {*wanted, *_boards_in(folder)} if path.is_file()}
    return sorted(str(path) for path in wanted.keys() | found.keys() if wanted.get(path) != found.get(path))


def _asked(prometheus: Prometheus, documents: list[dict[str, Any]]) -> tuple[list[Answer], Mapping[str, list[str]]]:
    return answers(prometheus, [*of_boards(documents), *of_rules()]), resolved(prometheus, documents)


def _print(stale: list[str], found: list[Answer], values: Mapping[str, list[str]], as_json: bool) -> None:
    progress = Progress()
    if as_json:
        rows = [
            {
                "place": a.expression.place,
                "expr": a.expression.text,
                "series": a.series,
                "absence": a.absence,
                "fine": a.fine,
            }
            for a in found
        ]
        typer.echo(json.dumps({"stale": stale, "expressions": rows, "variables": dict(values)}, indent=1))
        return
    for path in stale:
        progress.fail(f"{path}: is not what the code makes; run: tidegate dashboards export")
    for answer in found:
        if not answer.fine:
            progress.fail(f"{answer.expression.place}: no data, and no reason is known: {answer.expression.text}")
    for name, texts in values.items():
        if not texts:
            progress.fail(f"variable {name}: has no value")
    if not stale:
        progress.say("all files are what the code makes")
    if found:
        data = sum(answer.series > 0 for answer in found)
        known = sum(answer.series == 0 and answer.fine for answer in found)
        progress.say(f"of {len(found)} expressions {data} have data, {known} none for a known reason")
        for answer in found:
            if answer.series == 0 and answer.fine:
                progress.say(f"  {answer.expression.place}: {answer.absence}")
