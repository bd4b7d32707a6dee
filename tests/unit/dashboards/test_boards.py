"""Boards: their files are what the code makes, and they name nothing that nobody exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dashboards import promql
from dashboards.boards import BOARDS, all_boards, files
from dashboards.catalogue import CATALOGUE, LABELS, TARGET_LABELS, Source
from dashboards.expressions import Expression, of_boards, variables
from dashboards.panels import TAG, VALUES, board, graph, query

GRAFANA = Path(__file__).parents[3] / "dashboards/grafana"
DOCUMENTS = all_boards()
EXPRESSIONS = list(of_boards(DOCUMENTS.values()))
PROMTOOL = shutil.which("promtool")
GOOD = query(promql.rate("routed_total", ("reason",)))


def panels(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def test_the_files_are_what_the_code_makes() -> None:
    wanted = files(GRAFANA)
    found = {path: path.read_text(encoding="utf-8") for path in GRAFANA.iterdir()}
    stale = [path.name for path in wanted.keys() | found.keys() if wanted.get(path) != found.get(path)]
    assert stale == [], "run: tidegate dashboards export"


def test_there_are_six_boards_with_names_of_their_own() -> None:
    assert len(DOCUMENTS) == len(BOARDS) == 6
    assert len({document["title"] for document in DOCUMENTS.values()}) == 6
    assert all(document["tags"] == [TAG] and len(document["uid"]) <= 40 for document in DOCUMENTS.values())


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda e: e.place)
def test_an_expression_names_metrics_and_labels_of_the_catalogue_only(expression: Expression) -> None:
    assert expression.metrics
    assert set(expression.metrics) - CATALOGUE.keys() == set()
    own = {label for name in expression.metrics for label in CATALOGUE[name].labels}
    assert expression.labels - own - TARGET_LABELS.keys() == set()


def test_every_metric_is_on_a_board() -> None:
    assert CATALOGUE.keys() - {name for expression in EXPRESSIONS for name in expression.metrics} == set()


def test_every_label_of_a_legend_is_kept_by_its_expression() -> None:
    found = []
    for document in DOCUMENTS.values():
        for panel in panels(document):
            for target in panel["targets"]:
                shown = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
                kept = {n.strip() for names in re.findall(r"by \(([^)]*)\)", target["expr"]) for n in names.split(",")}
                found += [f"{panel['title']}: {label}" for label in shown - kept]
    assert found == []


@pytest.mark.parametrize("uid", sorted(DOCUMENTS))
def test_variables_that_are_named_are_there_and_have_all(uid: str) -> None:
    document = DOCUMENTS[uid]
    named = set(re.findall(r"\$\{?(?!__)(\w+)", str(document["panels"]) + str(document["annotations"])))
    given = {variable["name"]: variable for variable in document["templating"]["list"]}
    assert named <= given.keys()
    assert given.keys() - named == set()
    for name in given.keys() - {"datasource"}:
        assert given[name]["includeAll"] is True
        assert given[name]["allValue"] == ".*"
        assert given[name]["multi"] is True


def test_all_variables_are_in_use_and_have_values_of_a_label_that_is_exported() -> None:
    found = variables(DOCUMENTS.values())
    assert found.keys() == VALUES.keys() == {"model", "instance", "class", "tenant", "replica"}
    for series, label in found.values():
        (name,) = Expression("", series).metrics
        assert label in {*CATALOGUE[name].labels, *TARGET_LABELS}
        assert "$" not in series


@pytest.mark.parametrize("uid", sorted(DOCUMENTS))
def test_a_panel_says_what_it_means_and_has_a_place(uid: str) -> None:
    places = []
    for panel in panels(DOCUMENTS[uid]):
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == [*"ABCDEF"[: len(letters)]], "Grafana tells answers apart by them"
        assert panel["description"].endswith("."), panel["title"]
        place = panel["gridPos"]
        assert 0 < place["w"] + place["x"] <= 24, panel["title"]
        places.append((place["x"], place["y"]))
        assert panel["datasource"]["uid"] == "${datasource}"
    assert len(set(places)) == len(places)
    ids = [panel["id"] for panel in DOCUMENTS[uid]["panels"]]
    assert len(set(ids)) == len(ids)


def test_decisions_are_annotations_of_the_control_plane() -> None:
    (annotation,) = DOCUMENTS["tidegate-control"]["annotations"]["list"]
    assert "tidegate_control_decisions_total" in annotation["expr"]
    assert annotation["titleFormat"] == "{{lever}}: {{reason}}"


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: apt install prometheus)")
def test_prometheus_can_parse_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"x:{number}", "expr": e.concrete()} for number, e in enumerate(EXPRESSIONS)]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    command = ["promtool", "check", "rules", str(tmp_path / "rules.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- the rules can fail -----------------------------------------------------------------------------------------------


def test_a_name_or_label_that_nobody_exports_cannot_be_built() -> None:
    with pytest.raises(KeyError):
        promql.total("no_such_metric")
    with pytest.raises(ValueError, match="no label"):
        promql.total("open_tasks", ("planet",))
    with pytest.raises(ValueError, match="no label"):
        promql.select("open_tasks", reason="x")
    with pytest.raises(ValueError, match="does not fit"):
        promql.select("ttft_seconds")
    with pytest.raises(ValueError, match="does not fit"):
        promql.select("open_tasks", "_sum")


def test_a_selector_is_narrowed_by_the_variables_its_metric_has_labels_for() -> None:
    assert promql.select("tenant_met_share") == 'tidegate_tenant_met_share{tenant=~"$tenant",model=~"$model"}'
    assert promql.select("open_tasks") == 'tidegate_open_tasks{model=~"$model",instance=~"$instance"}'
    assert promql.bare("replicas", state="!known") == 'tidegate_replicas{state!="known"}'
    assert CATALOGUE["tidegate_open_tasks"].source is Source.GATEWAY
    assert promql.VARIABLES.keys() <= {*LABELS, *TARGET_LABELS}


def test_a_board_has_no_variable_that_it_does_not_name() -> None:
    made = board("tidegate-x", "X", "One.", graph("One", "One.", "short", GOOD))
    assert [variable["name"] for variable in made["templating"]["list"]] == ["datasource", "model", "instance"]
