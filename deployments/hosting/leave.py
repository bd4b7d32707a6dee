"""``python -m deployments.hosting.leave``: the host of this Ray node is about to go, so Serve moves what it runs here.

A pod that is deleted, or a host that a cloud takes back, would cut every stream of its replicas: Ray's node ends with
its first signal. Run as a pod's preStop hook (or by whatever hears a preemption notice), this tells Ray that the node
drains. Serve then starts the node's replicas elsewhere, takes the old ones out of routing, lets them finish, and stops
them. The command returns once none is left here, or when the time is over; what is still open then goes on at another
replica where that is exact (README, "Under load, and when replicas fail").

Exit codes: 0, no replica is left here, or no Ray node runs here; 1, the time is over or Ray took no notice.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Annotated

import psutil
import typer

REPLICA_TITLE = "ray::ServeReplica:"
"""How Ray entitles the processes of Serve's replicas; then come application and deployment."""
LOOK_S = 0.5
ASK_S = 30.0
"""Longest time Ray may take to note that the node drains."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A Ray node of this host."""

    pid: int
    """Of its raylet."""
    node_id: str
    gcs_address: str


def nodes_here() -> list[RayNode]:
    """Every Ray node whose raylet runs on this host (in a pod: the pod's)."""
    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        options = dict(part.lstrip("-").split("=", 1) for part in process.info["cmdline"] or () if "=" in part)
        if process.info["name"] == "raylet" and options.get("node_id"):
            # The raylet's own address of the control store stands inside the command it starts workers with.
            words = " ".join(process.info["cmdline"]).split()
            address = next((w.partition("=")[2] for w in words if w.startswith("--gcs-address=")), "")
            found.append(RayNode(process.pid, options["node_id"], address))
    return found


def replicas_of(node: RayNode) -> list[str]:
    """``application:deployment`` of each Serve replica whose process runs on ``node``."""
    try:
        processes = psutil.Process(node.pid).children()
    except psutil.NoSuchProcess:
        return []
    titles = []
    for process in processes:
        try:
            titles.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
    return sorted(title.removeprefix(REPLICA_TITLE).strip() for title in titles if title.startswith(REPLICA_TITLE))


def drain(node: RayNode, within_s: float) -> str | None:
    """Tell Ray that ``node`` goes within ``within_s``; what went wrong, else ``None``."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", node.node_id]
    if node.gcs_address:
        command += ["--address", node.gcs_address]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the host is about to go"]
    command += ["--deadline-remaining-seconds", str(int(within_s))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {ASK_S:.0f} s"
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip().splitlines()[-1]


def leave(
    within_s: Annotated[float, typer.Option(min=1, help="Seconds until the host goes.")] = 660.0,
    node_id: Annotated[str | None, typer.Option(help="Ray's id of the node, where several run on this host.")] = None,
) -> None:
    """Have Serve move this node's replicas elsewhere, and wait until none is left."""
    end_s = time.monotonic() + within_s
    nodes = [node for node in nodes_here() if node_id in (None, node.node_id)]
    if not nodes:
        typer.echo("no Ray node runs here: nothing to move")
        return
    if len(nodes) > 1:
        typer.echo(f"error: {len(nodes)} Ray nodes run here: choose one with --node-id", err=True)
        raise typer.Exit(1)
    if why := drain(nodes[0], within_s):
        typer.echo(f"error: Ray took no notice: {why}", err=True)
        raise typer.Exit(1)
    while (left := replicas_of(nodes[0])) and time.monotonic() < end_s:
        time.sleep(LOOK_S)
    if left:
        typer.echo(f"error: the time is over, still here: {', '.join(left)}", err=True)
        raise typer.Exit(1)
    typer.echo("no replica is left on this node")


if __name__ == "__main__":
    typer.run(leave)
