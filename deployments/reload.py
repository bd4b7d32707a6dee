"""``reload``: hands the objectives of a file's ``user_config`` to the running application; nothing restarts.

Serve restarts every deployment of an application when anything else of it changes, the ``args`` above all. So what runs
is sent back as it was deployed, with another ``user_config`` of the gateway and nothing else. The file is checked:
objectives that a gateway would refuse are not sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.cluster import NotReadyError, RefusedError, ServeApi
from deployments.config_file import IMPORT_PATH, check_config, load_yaml
from deployments.controller_actor import OWNER_DEPLOYMENT
from deployments.settings import SettingsError

SERVE_WIDE = ("proxy_location", "http_options", "grpc_options")
"""What of Serve's own state goes back as it is."""


class ReloadError(Exception):
    """Nothing was changed; the message is for people."""


def reload_objectives(config: Path, api: ServeApi) -> list[str]:
    """Hand over the ``user_config`` in ``config``; the names of the applications that got another one.

    Raises:
        SettingsError: the file is wrong.
        ReloadError: Serve cannot be asked, or does not run what the file describes.
    """
    try:
        content = load_yaml(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"{config}: cannot be read: {error}"]) from None
    check_config(content)
    try:
        details = api.details()
        body, changed = merged(details, content)
        if changed:
            api.deploy(body)
    except (NotReadyError, RefusedError) as error:
        raise ReloadError(f"Serve cannot be asked: {error}; is Tidegate up? (--dashboard-port)") from None
    return changed


def merged(details: Mapping[str, Any], content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What runs with the ``user_config`` of ``content``, and the applications for which that is another one.

    Raises:
        ReloadError: an application of ``content`` does not run.
    """
    running = details.get("applications") or {}
    wanted = {
        str(app.get("name", "default")): user_config_of(app)
        for app in content.get("applications") or []
        if app.get("import_path") == IMPORT_PATH
    }
    apps, changed = [], []
    for name, state in running.items():
        app = dict(state.get("deployed_app_config") or {})
        if name in wanted and user_config_of(app) != wanted[name]:
            app["deployments"] = _with_user_config(app.get("deployments") or [], wanted[name])
            changed.append(name)
        apps.append(app)
    missing = sorted(set(wanted) - set(running))
    if missing:
        raise ReloadError(f"application {', '.join(missing)} does not run; running: {', '.join(running) or 'none'}")
    serve_wide = {name: details[name] for name in SERVE_WIDE if details.get(name) is not None}
    return {**serve_wide, "applications": apps}, changed


def user_config_of(app: Mapping[str, Any]) -> Any:
    """The gateway's ``user_config`` in an application's configuration; none is an empty one."""
    for deployment in app.get("deployments") or []:
        if deployment.get("name") == OWNER_DEPLOYMENT:
            return deployment.get("user_config") or {}
    return {}


def _with_user_config(deployments: list[dict[str, Any]], user_config: Any) -> list[dict[str, Any]]:
    rest = [deployment for deployment in deployments if deployment.get("name") != OWNER_DEPLOYMENT]
    own = next((d for d in deployments if d.get("name") == OWNER_DEPLOYMENT), {"name": OWNER_DEPLOYMENT})
    return [*rest, {**own, "user_config": user_config}]
