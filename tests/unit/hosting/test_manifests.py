"""Manifests are what those who read them expect, say what the README says, and agree with each other."""

from __future__ import annotations

import gzip
import importlib
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.cluster import MARGIN_S, SERVE_ENVIRONMENT, Ports, cluster_environment
from deployments.settings import Settings

ROOT = Path(__file__).parents[3]
HOSTING = ROOT / "deployments/hosting"
SERVICES = sorted(path.stem for path in (HOSTING / "kuberay").glob("*.yaml") if "kind: RayService" in path.read_text())
OTHERS = sorted(path.stem for path in (HOSTING / "kuberay").glob("*.yaml") if path.stem not in SERVICES)
KUBERNETES = "1.34"
HOST_LOCAL = ("MAXCONN", "NBTHREAD", "PORT", "CONFIG_FILE_LOC", "PATH", "STATE_BASE", "STATE_FILE", "CONNECT_S")
"""What `make serve` sets for one host, and Serve's defaults serve on others."""


def service(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((HOSTING / f"kuberay/{name}.yaml").read_text())
    return loaded


def serve_config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(service(name)["spec"]["serveConfigV2"])
    return loaded


def pods(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    cluster = service(name)["spec"]["rayClusterConfig"]
    yield "head", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield "worker", group["template"]


def settings(name: str) -> Settings:
    if name == "anyscale":
        return Settings.load(yaml.safe_load((HOSTING / "anyscale/service.yaml").read_text())["applications"][0]["args"])
    return Settings.load(serve_config(name)["applications"][0]["args"])


def strict(schema: Any) -> Any:
    """The schema, refusing what Kubernetes would drop without a word."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        # `metadata: {type: object}` of the object itself names nothing and stays open
        found.setdefault("additionalProperties", False)
    return found


@pytest.fixture(scope="module")
def ray_service() -> jsonschema.Draft202012Validator:
    packed = (Path(__file__).parent / "rayservice_v1.json.gz").read_bytes()
    return jsonschema.Draft202012Validator(strict(json.loads(gzip.decompress(packed))))


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVICES)
def test_kuberay_takes_every_key(name: str, ray_service: jsonschema.Draft202012Validator) -> None:
    assert [error.message for error in ray_service.iter_errors(service(name))] == []


@pytest.mark.slow
def test_a_key_that_kuberay_does_not_know_is_found(ray_service: jsonschema.Draft202012Validator) -> None:
    wrong = service("cpu-demo")
    wrong["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["enviroment"] = []
    assert [error.message for error in ray_service.iter_errors(wrong)]
    wrong = service("cpu-demo")
    wrong["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplica"] = 3
    assert [error.message for error in ray_service.iter_errors(wrong)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVICES)
def test_pods_are_what_kubernetes_expects(name: str) -> None:
    for _, template in pods(name):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", **template["metadata"]}}
        assert kubernetes_validate.validate(pod | {"spec": template["spec"]}, KUBERNETES, strict=True) == KUBERNETES


@pytest.mark.parametrize("name", OTHERS)
def test_the_other_objects_are_what_kubernetes_expects(name: str) -> None:
    for found in yaml.safe_load_all((HOSTING / f"kuberay/{name}.yaml").read_text()):
        if found["apiVersion"].partition("/")[0] == "monitoring.coreos.com":  # Prometheus Operator's own, checked below
            continue
        assert kubernetes_validate.validate(found, KUBERNETES, strict=True) == KUBERNETES


@pytest.mark.parametrize("name", SERVICES)
def test_serve_and_tidegate_take_the_application(name: str) -> None:
    config = serve_config(name)
    ServeDeploySchema.model_validate(config)
    found = settings(name)
    assert config["proxy_location"] == "EveryNode", "KubeRay's probe of a worker asks the HAProxy of its own node"
    assert found.gateway.clients == "any"
    assert found.auth.required
    assert found.model.listen == "node"


@pytest.mark.parametrize("name", [*SERVICES, "anyscale"])
def test_the_environment_is_what_make_serve_sets_for_the_same_settings(name: str) -> None:
    wanted = cluster_environment(settings(name), Ports(), "/tmp/x", "run")
    names = {n for n in wanted if n in SERVE_ENVIRONMENT or n.startswith("RAY_SERVE_HAPROXY_")}
    wanted = {n: wanted[n] for n in names if not n.endswith(HOST_LOCAL)}
    assert len(wanted) >= 11
    if name == "anyscale":
        loaded = yaml.safe_load((HOSTING / "anyscale/service.yaml").read_text())
        assert loaded["env_vars"] == wanted
        return
    for _, template in pods(name):
        (container,) = template["spec"]["containers"]
        found = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert {n: found.get(n) for n in wanted} == wanted


@pytest.mark.parametrize("name", SERVICES)
def test_streams_end_before_what_carries_them_does(name: str) -> None:
    found, spec = settings(name), service(name)["spec"]
    assert spec["rayClusterDeletionDelaySeconds"] >= found.gateway.total_timeout_ms / 1000 + MARGIN_S
    for role, template in pods(name):
        if role == "worker":
            (container,) = template["spec"]["containers"]
            command = container["lifecycle"]["preStop"]["exec"]["command"]
            within_s = float(command[command.index("--within-s") + 1])
            assert found.model.drain_s_max < within_s < template["spec"]["terminationGracePeriodSeconds"]
            importlib.import_module(command[command.index("-m") + 1])


@pytest.mark.parametrize("name", SERVICES)
def test_the_cluster_can_grow_to_what_is_asked_for(name: str) -> None:
    found, (group,) = settings(name), service(name)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert float(limits["cpu"]) * group["maxReplicas"] >= found.model.num_cpus * found.scaling.replicas_max
    assert float(limits.get("nvidia.com/gpu", 0)) * group["maxReplicas"] == found.model.num_gpus * (
        found.scaling.replicas_max if found.model.num_gpus else 1
    )


@pytest.mark.parametrize("name", SERVICES)
def test_pods_hold_no_rights_they_do_not_need(name: str) -> None:
    for role, template in pods(name):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] is (role == "head"), "Ray's autoscaler sits in the head's pod"
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["image"].startswith("tidegate:0.1.0-")
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_the_guard_names_the_ports_and_labels_that_pods_have() -> None:
    documents = {f"{d['kind']}/{d['metadata']['name']}": d for d in loads("guard")}
    labels = [template["metadata"]["labels"] for name in SERVICES for _, template in pods(name)]
    policy = documents["NetworkPolicy/tidegate"]["spec"]
    assert all(policy["podSelector"]["matchLabels"].items() <= found.items() for found in labels)
    opened = {port["port"] for rule in policy["ingress"] for port in rule.get("ports", [])}
    assert opened == {8000, 8265, 52365, 8080, 9101, 30000}
    workers = documents["PodDisruptionBudget/tidegate-workers"]["spec"]["selector"]["matchLabels"]
    assert sum(workers.items() <= found.items() for found in labels) == len(SERVICES)


def loads(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((HOSTING / f"kuberay/{name}.yaml").read_text()))


def test_every_secret_is_named_in_the_lines_that_make_it() -> None:
    made = set()
    wanted = set()
    for path in (HOSTING / "kuberay").glob("*.yaml"):
        text = path.read_text()
        made |= set(re.findall(r"kubectl create secret generic (\S+)", text))
        wanted |= set(re.findall(r"secretKeyRef: \{name: ([\w-]+)", text))
        wanted |= set(re.findall(r"secretName: ([\w-]+)", text))
    assert wanted == made


# --- Anyscale ---------------------------------------------------------------------------------------------------------


def anyscale_models() -> Any:
    """Anyscale's models of its files, without the SDK around them, which wants a dozen packages more."""
    import importlib.metadata

    folder = Path(str(importlib.metadata.distribution("anyscale").locate_file("anyscale")))
    for name in ("anyscale", "anyscale.service", "anyscale.compute_config"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.parent / name.replace(".", "/"))]
        sys.modules.setdefault(name, package)
    sys.path += [str(folder / "sdk"), str(folder / "client")]
    try:
        return importlib.import_module("anyscale.service.models")
    finally:
        del sys.path[-2:]


@pytest.mark.slow
def test_anyscales_sdk_takes_the_service() -> None:
    models = anyscale_models()
    loaded = yaml.safe_load((HOSTING / "anyscale/service.yaml").read_text())
    found = models.ServiceConfig.from_dict(loaded)
    assert found.proxy_location == "EveryNode"
    assert (ROOT / found.containerfile).is_file()
    with pytest.raises(TypeError):
        models.ServiceConfig.from_dict(loaded | {"proxy_locations": "EveryNode"})
    with pytest.raises(TypeError):
        models.ServiceConfig.from_dict(loaded | {"compute_config": {"head_node": {"instance": "m6i.2xlarge"}}})


def test_tidegate_takes_anyscales_application_and_lets_nobody_in_without_a_key() -> None:
    found = settings("anyscale")
    assert found.gateway.clients == "any"
    assert found.auth.required
    assert not found.auth.keys
