"""Prometheus and Grafana beside Tidegate: their files name each other and what gateways answer."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.catalogue import TARGET_LABELS
from deployments.endpoints import OWN, scope_needed
from deployments.keys import METRICS

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "dashboards"
PROMTOOL = shutil.which("promtool")


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


COMPOSE = read("compose.yaml")
PROMETHEUS = read("prometheus/prometheus.yml")


def mounts(service: str) -> dict[str, str]:
    """Folder of the project -> where the service sees it."""
    volumes = [text.split(":") for text in COMPOSE["services"][service]["volumes"]]
    return {parts[0]: parts[1] for parts in volumes if parts[0].startswith("./")}


def test_folders_that_are_mounted_are_there_and_volumes_are_declared() -> None:
    for service in COMPOSE["services"]:
        assert all((FOLDER / source).is_dir() for source in mounts(service))
        named = {text.split(":")[0] for text in COMPOSE["services"][service]["volumes"]} - mounts(service).keys()
        assert named <= COMPOSE["volumes"].keys()


def test_images_have_versions_and_both_listen_on_this_machine_only() -> None:
    for service in COMPOSE["services"].values():
        assert service["image"].rpartition(":")[2][-1].isdigit()
        assert service["network_mode"] == "host"
    assert "--web.listen-address=127.0.0.1:9090" in COMPOSE["services"]["prometheus"]["command"]
    assert COMPOSE["services"]["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_grafana_finds_boards_and_prometheus() -> None:
    (provider,) = read("provisioning/dashboards/tidegate.yaml")["providers"]
    seen = mounts("grafana")
    assert seen["./grafana"] == provider["options"]["path"]
    assert seen["./provisioning"] == "/etc/grafana/provisioning"
    home = Path(COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (FOLDER / "grafana" / home.name).is_file()
    (source,) = read("provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["type"] == "prometheus"
    assert (
        f"--web.listen-address={source['url'].removeprefix('http://')}" in COMPOSE["services"]["prometheus"]["command"]
    )
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]


def test_prometheus_scrapes_what_gateways_answer_to_a_key_for_metrics() -> None:
    jobs = {job["job_name"]: job["metrics_path"] for job in PROMETHEUS["scrape_configs"]}
    assert jobs == {"tidegate-gateway": "/metrics", "tidegate-controller": "/control/metrics"}
    assert all(path in OWN and scope_needed(path, "GET") == METRICS for path in jobs.values())
    assert all(name in TARGET_LABELS["job"] for name in jobs)


def test_targets_are_those_of_serve_config() -> None:
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    model = config["applications"][0]["args"]["model"]["name"]
    files = [name for job in PROMETHEUS["scrape_configs"] for name in job["file_sd_configs"][0]["files"]]
    found = {name: json.loads((FOLDER / "prometheus" / name).read_text())[0] for name in files}
    assert all(target["labels"] == {"model": model} for target in found.values())
    front = f"{config['http_options']['host']}:{config['http_options']['port']}"
    assert found["targets/controller.json"]["targets"] == [front]
    # The first port that Serve gives to a replica that is reached directly.
    assert found["targets/gateways.json"]["targets"] == ["127.0.0.1:30000"]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: apt install prometheus)")
def test_prometheus_reads_its_configuration() -> None:
    path = str(FOLDER / "prometheus/prometheus.yml")
    done = subprocess.run(["promtool", "check", "config", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
