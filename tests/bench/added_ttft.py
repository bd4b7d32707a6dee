"""TTFT that Tidegate adds over the bare engine port at one client, beside what Ray Serve LLM's default ingress adds.

Two phases in one run, each with a fresh cluster and the same engine settings: (1) Tidegate behind HAProxy, (2) Ray
Serve LLM as ``build_openai_app`` makes it, behind Serve's default proxy, its server class extended only by a bare port.
In each, requests alternate between the bare port and the ingress of the same engine; the added TTFT is the difference
of medians.
Bar: at most 5 ms, and at most a quarter of Ray Serve LLM's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys

from tests.bench import harness as h

PAIRS = 60
ADDED_MS_MAX, SHARE_MAX = 5.0, 0.25
MODEL = "smollm2-135m-instruct"


async def measure(bare_url: str, ingress_url: str, bare_headers: dict[str, str]) -> dict[str, float]:
    """Alternate requests between both URLs; return medians in ms."""
    messages = [{"role": "user", "content": "Count: one two three"}]
    bare, ingress = [], []
    async with h.client_session() as session:
        for i in range(PAIRS + 5):
            pair = []
            for url, headers in ((bare_url, bare_headers), (ingress_url, {})):
                result = await h.stream_chat(session, messages, 3, url=url, headers=headers)
                if result.failed or result.ttft_ms is None:
                    raise RuntimeError(f"{url}: {result.status} {result.error}")
                pair.append(result.ttft_ms)
            if i >= 5:
                bare.append(pair[0])
                ingress.append(pair[1])
    return {
        "bare_ms": h.median(bare), "ingress_ms": h.median(ingress),
        "added_ms": h.median(ingress) - h.median(bare),
        "added_paired_ms": h.median([b - a for a, b in zip(bare, ingress, strict=True)]),
    }  # fmt: skip


def bare_address() -> tuple[str, dict[str, str]]:
    """Return URL and gate header of a Tidegate replica's own port."""
    from ray import serve

    handle = serve.get_deployment_handle("Engine", app_name="tidegate")
    metadata = handle.record_replica_metadata.remote().result(timeout_s=30)
    return f"http://{metadata['endpoint']}", {"x-tidegate-gate": str(metadata["gate"])}


def tidegate_phase() -> dict[str, float]:
    """Measure Tidegate."""
    with h.ray_serve(haproxy=True):
        h.deploy(h.default_args(scaling={"replicas_min": 1, "replicas_max": 1}))
        bare_url, headers = bare_address()
        return asyncio.run(measure(bare_url, h.URL, headers))


def ray_serve_llm_phase() -> dict[str, float]:
    """Measure Ray Serve LLM with its default ingress and proxy."""
    with h.ray_serve(haproxy=False):
        from ray import serve
        from ray.serve.llm import LLMConfig, build_openai_app

        from deployments.engine import engine_arguments
        from deployments.model import engine_environment, resolve
        from deployments.settings import Settings
        from tests.bench.bare_port import BarePortServer

        settings = Settings.load(h.default_args())
        source = resolve(settings.model.source)
        config = LLMConfig(
            model_loading_config={"model_id": MODEL, "model_source": source},
            engine_kwargs={k: v for k, v in engine_arguments(settings.model).items() if k != "scheduler_cls"},
            accelerator_config={"kind": "cpu"},
            deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
            runtime_env={"env_vars": engine_environment(settings.model, source)},
            server_cls=BarePortServer,
        )
        serve.run(build_openai_app({"llm_configs": [config]}), name="rayllm", blocking=False)
        names = serve.status().applications["rayllm"].deployments
        name = next(n for n in names if n.startswith("BarePortServer"))
        port = serve.get_deployment_handle(name, app_name="rayllm").port.remote().result()
        return asyncio.run(measure(f"http://127.0.0.1:{port}", h.URL, {}))


def main() -> int:
    """Run both phases in processes of their own, print the table, return the exit status."""
    results = {}
    for phase in ("tidegate", "ray-serve-llm"):
        command = [sys.executable, "-m", "tests.bench.added_ttft", "--phase", phase]
        out = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500, cwd=h.ROOT)
        lines = [line for line in out.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(out.stdout[-2000:], out.stderr[-4000:])
            return 1
        results[phase] = json.loads(lines[-1][7:])
    rows = [[name, r["bare_ms"], r["ingress_ms"], r["added_ms"], r["added_paired_ms"]] for name, r in results.items()]
    h.table(
        f"TTFT in ms at one client, medians of {PAIRS} alternating pairs, same engine settings",
        ["server", "bare engine port", "through the ingress", "added", "added (median of pairs)"],
        rows,
    )
    ours, theirs = results["tidegate"]["added_ms"], results["ray-serve-llm"]["added_ms"]
    ok = h.verdict(ours <= ADDED_MS_MAX, f"added {ours:.2f} ms (bar {ADDED_MS_MAX:g})")
    share = ours / theirs
    return 0 if h.verdict(share <= SHARE_MAX, f"share of Ray Serve LLM's {share:.2f} (bar {SHARE_MAX})") and ok else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase", choices=("tidegate", "ray-serve-llm"))
    chosen = parser.parse_args().phase
    if chosen is None:
        sys.exit(main())
    print("RESULT " + json.dumps(tidegate_phase() if chosen == "tidegate" else ray_serve_llm_phase()))
