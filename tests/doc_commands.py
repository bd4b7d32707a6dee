"""The commands and programs that the documentation shows, and where each is executed.

Shell blocks are fenced with ``sh``, programs with ``python``. Every command has exactly one place: run without a
service (``unit/test_docs.py``), run beside a live one (``serve/test_docs_live.py``), or a reason why it cannot run
here. Words in capitals, such as ``FOLDER``, stand for what a reader puts there; the tests put something there too.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "./tidegate "


class Place(Enum):
    """Where a command is executed."""

    UNIT = "unit/test_docs.py"
    LIVE = "serve/test_docs_live.py"
    NOWHERE = "nowhere"


NOT_HERE = {
    r"^make serve": "starts real vLLM; serve/test_make_serve.py runs what it calls, bench/startup.py itself",
    r"^make model": "fetches a model from the package index; the suite itself begins with it (make engine)",
    r"^requirements/install\.sh": "installs packages; the suite itself begins with it (make dev)",
    r"^export RAY|^ray |^serve ": "needs a cluster and ports of its own; tried by hand, see deployments/README.md",
    r"docker compose": "there is no Docker here; tests/unit/dashboards checks the file",
    r"dashboards publish": "there is no Grafana here; unit/dashboards tests it against one on a socket",
    r"dashboards check --prometheus": "there is no Prometheus beside it; bench/boards.py runs a real one",
    r"^kubectl |Bearer \$KEY": "there is no Kubernetes here; unit/hosting checks manifests against KubeRay's schema",
    r"^\./tidegate doctor$": "what it finds is this machine's; unit/test_doctor.py breaks it in many ways",
    r"^grep tg-": "reads a log of the reader's own; serve/gateway/test_gateway_accounting.py reads the same line",
}
"""Commands that cannot run here, and why; else what is run in their place."""
LIVE = (
    r"^curl http://127\.0\.0\.1:8000",
    r"^\./tidegate (conditions|decisions|explain|override|shadow|reload|status|request|tenants|dashboards targets)\b",
    r"^\./tidegate doctor --url",
    r"^make stop",
)
UNIT = (
    r"^\./tidegate (keys|sim|plan|replay|dashboards export|dashboards check$)",
    r"^python -m deployments\.cli keys",
    r"^make sim",
    r"^head -c 32 /dev/urandom",
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    file: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """File and line, for people."""
        return f"{self.file.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a shell block, without its comment."""

    where: str
    text: str

    def words(self, values: Mapping[str, str]) -> list[str]:
        """What the program is given, with ``values`` in place of what a reader would put there."""
        text = self.text.removeprefix(PROGRAM).removeprefix("python -m deployments.cli ")
        for name, value in values.items():
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", value, text)
        return shlex.split(text)


def documents() -> list[Path]:
    """Every page of documentation."""
    tops = ("policies", "autoscaling", "dashboards", "deployments", "tests")
    return [ROOT / "README.md", *sorted(path for top in tops for path in (ROOT / top).rglob("*.md"))]


def blocks(path: Path) -> Iterator[Block]:
    """Fenced blocks of one page."""
    found = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    text = path.read_text(encoding="utf-8")
    for match in found.finditer(text):
        yield Block(path, text.count("\n", 0, match.start()) + 1, match[1], match[2])


def commands(block: Block) -> Iterator[Command]:
    """Commands of a shell block: a line, or several that a backslash or an open quote joins."""
    joined = ""
    for line in block.text.splitlines():
        joined += line + "\n"
        if line.endswith("\\"):
            continue
        try:
            bare = shlex.join(shlex.split(joined, comments=True))
        except ValueError:  # a quote is open
            continue
        if bare:
            yield Command(block.where, _without_comment(joined))
        joined = ""
    assert not joined.strip(), f"{block.where}: ends inside a command: {joined}"


def _without_comment(text: str) -> str:
    """Whatever follows ``  #``, where that is outside quotes; lines joined by a backslash become one."""
    text = re.sub(r"\\\n\s*", "", text)
    kept, quote = "", ""
    for index, letter in enumerate(text):
        if letter in "'\"" and quote in {"", letter}:
            quote = "" if quote else letter
        if letter == "#" and not quote and text[index - 1 : index] in {" ", ""}:
            break
        kept += letter
    return kept.strip()


def place(command: Command) -> tuple[Place, str]:
    """Where ``command`` is executed, or why it is not. Raises ``LookupError`` for none or more than one place."""
    found = [(Place.NOWHERE, why) for pattern, why in NOT_HERE.items() if re.search(pattern, command.text)]
    if not found:
        for where, patterns in ((Place.LIVE, LIVE), (Place.UNIT, UNIT)):
            found += [(where, "") for pattern in patterns if re.search(pattern, command.text)]
    if len(found) != 1:
        raise LookupError(f"{command.where}: {command.text!r} has {len(found)} places")
    return found[0]


def all_commands(wanted: Place | None = None) -> list[Command]:
    """Commands of all pages that are executed at ``wanted``; all where it is ``None``."""
    found = [c for path in documents() for b in blocks(path) if b.language == "sh" for c in commands(b)]
    return [command for command in found if wanted is None or place(command)[0] is wanted]


def programs() -> list[Block]:
    """Python programs of all pages."""
    return [block for path in documents() for block in blocks(path) if block.language == "python"]
