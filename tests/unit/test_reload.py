"""``reload``: what is sent back to Serve is what runs, with other objectives and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.cluster import NotReadyError
from deployments.config_file import check_config
from deployments.reload import ReloadError, reload_objectives
from deployments.settings import SettingsError

APP: dict[str, Any] = {
    "name": "tidegate",
    "route_prefix": "/",
    "import_path": "deployments.app:build",
    "args": {"model": {"name": "m", "engine": "emulated"}},
}


class Serve:
    """Stands where Serve's REST interface stands."""

    def __init__(self, *apps: dict[str, Any]) -> None:
        self.applications = {app["name"]: {"status": "RUNNING", "deployed_app_config": app} for app in apps}
        self.sent: list[dict[str, Any]] = []

    def details(self) -> dict[str, Any]:
        return {"proxy_location": "HeadOnly", "http_options": {"port": 8000}, "applications": self.applications}

    def deploy(self, config: dict[str, Any]) -> None:
        self.sent.append(config)


def with_config(user_config: Any, app: dict[str, Any] = APP) -> dict[str, Any]:
    return {**app, "deployments": [{"name": "Gateway", "user_config": user_config}]}


def the_file(folder: Path, *apps: dict[str, Any]) -> Path:
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": list(apps)}), encoding="utf-8")
    return path


def reload(path: Path, serve: Any) -> list[str]:
    return reload_objectives(path, serve)


TIGHT = {"objectives": {"ttft_ms": 500}}


def test_only_the_gateways_user_config_changes(tmp_path: Path) -> None:
    other = {"name": "other", "import_path": "x:y", "deployments": [{"name": "A", "user_config": {"n": 1}}]}
    running = {
        **APP,
        "args": {"model": {"name": "m", "engine": "emulated"}, "auth": {"keys": []}},
        "deployments": [{"name": "Engine", "num_replicas": 2}, {"name": "Gateway", "num_replicas": 3}],
    }
    serve = Serve(other, running)
    assert reload(the_file(tmp_path, with_config(TIGHT)), serve) == ["tidegate"]
    gateway = {"name": "Gateway", "num_replicas": 3, "user_config": TIGHT}
    sent = {**running, "deployments": [{"name": "Engine", "num_replicas": 2}, gateway]}
    assert serve.sent == [{"proxy_location": "HeadOnly", "http_options": {"port": 8000}, "applications": [other, sent]}]


def test_the_same_again_is_not_sent(tmp_path: Path) -> None:
    serve = Serve(with_config(TIGHT))
    assert reload(the_file(tmp_path, with_config(TIGHT)), serve) == []
    assert reload(the_file(tmp_path, with_config(None)), serve) == ["tidegate"]  # taken away
    assert serve.sent[0]["applications"][0]["deployments"][0]["user_config"] == {}


def test_what_a_gateway_would_refuse_is_not_sent(tmp_path: Path) -> None:
    serve = Serve(APP)
    with pytest.raises(SettingsError, match=r"deployments\.0\.user_config\.objectives\.ttft_ms: 0: must be above 0"):
        reload(the_file(tmp_path, with_config({"objectives": {"ttft_ms": 0}})), serve)
    with pytest.raises(SettingsError, match="cannot be read"):
        reload(tmp_path / "absent.yaml", serve)
    assert serve.sent == []


def test_what_does_not_run_is_told(tmp_path: Path) -> None:
    class Away(Serve):
        def details(self) -> dict[str, Any]:
            raise NotReadyError("connection refused")

    path = the_file(tmp_path, with_config(TIGHT))
    with pytest.raises(ReloadError, match="application tidegate does not run; running: other"):
        reload(path, Serve({"name": "other"}))
    with pytest.raises(ReloadError, match="is Tidegate up"):
        reload(path, Away())


@pytest.mark.parametrize(
    ("deployment", "words"),
    [
        ({"name": "Engine", "user_config": TIGHT}, "deployments.0.user_config: has no effect here"),
        ({"name": "Gateway", "user_config": {"scaling": {}}}, "user_config.scaling: only objectives and classes"),
        ({"name": "Gateway", "user_config": {"objectives": {"e2e_ms": 5}}}, "e2e_ms: 5: is below"),
    ],
)
def test_the_file_is_checked_with_its_user_config(deployment: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_config({"applications": [{**APP, "deployments": [deployment]}]})
    assert any(words in problem for problem in caught.value.problems), caught.value.problems
    check_config({"applications": [with_config(TIGHT)]})
