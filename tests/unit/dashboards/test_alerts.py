"""Alerts: their file is what the code makes, each is tested by promtool both ways, and each has a runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.alerts import BURNS, RUNBOOKS, all_alerts, groups, recordings, text
from dashboards.catalogue import CATALOGUE
from dashboards.expressions import Expression, of_rules
from policies.control.catalogue import SPECS

ROOT = Path(__file__).parents[3]
RULES = ROOT / "dashboards/prometheus/rules.yaml"
TESTS = sorted(Path(__file__).parent.glob("rules*_test.yaml"))
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: apt install prometheus)"
)


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alert_tests() -> Iterator[dict[str, Any]]:
    for path in TESTS:
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            yield from test["alert_rule_test"]


def test_the_file_is_what_the_code_makes() -> None:
    assert RULES.read_text(encoding="utf-8") == text(), "run: tidegate dashboards export"


def test_the_file_says_the_same_as_the_values_it_is_made_of() -> None:
    assert yaml.safe_load(text())["groups"] == groups()


@needs_promtool
def test_prometheus_reads_the_rules() -> None:
    assert f"{len(recordings()) + len(all_alerts())} rules found" in promtool("check", "rules", str(RULES))


@pytest.mark.slow
@needs_promtool
@pytest.mark.parametrize("path", TESTS, ids=lambda p: p.name)
def test_alerts_fire_when_they_should_and_only_then(path: Path) -> None:
    promtool("test", "rules", str(path))


def test_each_alert_is_shown_to_fire_and_not_to_fire() -> None:
    fires = {test["alertname"] for test in alert_tests() if test["exp_alerts"]}
    silent = {test["alertname"] for test in alert_tests() if not test["exp_alerts"]}
    names = {alert.name for alert in all_alerts()}
    assert fires == silent == names


def test_burns_are_the_workbooks() -> None:
    found = [(burn.factor, burn.long, burn.short, burn.severity) for burn in BURNS]
    assert found == [
        (14.4, "1h", "5m", "page"),
        (6, "6h", "30m", "page"),
        (3, "1d", "2h", "ticket"),
        (1, "3d", "6h", "ticket"),
    ]


@pytest.mark.parametrize("rule", list(of_rules()), ids=lambda e: e.place)
def test_a_rule_names_metrics_and_labels_of_the_catalogue_or_series_recorded_before(rule: Expression) -> None:
    recorded = {record["record"] for record in recordings()}
    assert rule.metrics
    assert set(rule.metrics) - CATALOGUE.keys() - recorded == set()
    known = {label for name in rule.metrics if name in CATALOGUE for label in CATALOGUE[name].labels}
    if recorded & set(rule.metrics):
        known |= {"priority", "objective"}
    assert rule.labels - known - {"model"} == set()
    conditions = set(re.findall(r'condition="(\w+)"', rule.text))
    assert conditions <= SPECS.keys()


def test_every_alert_says_what_to_do_and_where_it_is_written() -> None:
    page = (ROOT / RUNBOOKS).read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^## (.+)$", page, re.MULTILINE)
    }
    assert {alert.anchor for alert in all_alerts()} == headings
    for alert in all_alerts():
        assert f"`{alert.name}`" in page
        assert alert.severity in {"page", "ticket"}
        assert alert.summary.endswith(".")
        assert alert.step.endswith(".")
    assert len({alert.name for alert in all_alerts()}) == len(all_alerts())
