"""Puts boards into a folder of a Grafana, and tells Prometheus where gateways are.

``grafana-client`` is used for the former (``requirements/dashboards.lock``); it is imported when boards are published
and not before. Boards are replaced by their uids, so publishing twice changes nothing.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_SERVER = re.compile(r"^\s*server \S+-Gateway-\S+ (\S+:\d+) check(?!.* backup)", re.MULTILINE)
TIMEOUT_S = 20.0


class PublishError(Exception):
    """Grafana refuses, or cannot be reached; the message is for people."""


def connect(url: str, token: str) -> Any:
    """A client of the Grafana at ``url``; ``token``: of a service account that may edit boards and folders."""
    try:
        from grafana_client import GrafanaApi
    except ImportError:
        raise PublishError("grafana-client is not installed; run: requirements/install.sh dashboards") from None
    if not url.startswith(("http://", "https://")):
        raise PublishError(f"--url {url}: must begin with http:// or https://")
    return GrafanaApi.from_url(url.rstrip("/") + "/", token, timeout=TIMEOUT_S)


def publish(grafana: Any, documents: Iterable[Mapping[str, Any]], folder: str, title: str) -> list[str]:
    """Write every board into the folder with uid ``folder``, made where it is missing; the boards' addresses.

    Raises:
        PublishError: Grafana refuses, or cannot be reached.
    """
    import requests
    from grafana_client.client import GrafanaException

    try:
        _ensure_folder(grafana, folder, title)
        found = []
        for document in documents:
            body = {
                "dashboard": document,
                "folderUid": folder,
                "overwrite": True,
                "message": "tidegate dashboards publish",
            }
            found.append(str(grafana.dashboard.update_dashboard(body)["url"]))
    except GrafanaException as error:
        raise PublishError(f"Grafana refuses ({error.status_code}): {error.message}") from None
    except (requests.RequestException, LookupError, TypeError, ValueError) as error:
        raise PublishError(f"{grafana.url} cannot be asked: {error}") from None
    return found


def _ensure_folder(grafana: Any, uid: str, title: str) -> None:
    from grafana_client.client import GrafanaClientError

    try:
        grafana.folder.get_folder(uid)
    except GrafanaClientError as error:
        if error.status_code != 404:
            raise
        grafana.folder.create_folder(title, uid)


def newest_config(folder: Path) -> Path:
    """HAProxy's configuration below ``folder``, where Serve keeps one per node, old ones too; the one written last.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(folder.glob("*/haproxy.cfg"), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no */haproxy.cfg below; is Serve up, with HAProxy?", str(folder))
    return found[-1]


def gateways_of(haproxy_config: str) -> list[str]:
    """``host:port`` of every gateway that Serve's HAProxy balances between, from the text of its configuration."""
    return sorted(set(_SERVER.findall(haproxy_config)))


def targets(addresses: Iterable[str], model: str) -> str:
    """A file for Prometheus' ``file_sd_configs``."""
    return json.dumps([{"targets": list(addresses), "labels": {"model": model}}], indent=1) + "\n"
