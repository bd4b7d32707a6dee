"""``/metrics`` of the emulated engine: the names of vLLM 0.29.0 that others read, and what tests of aborts need.

Obeys the fault ``signals``: ``stop`` shows nothing, ``freeze`` the last true page, ``nan`` no number at all.
"""

from __future__ import annotations

from deployments.emulation.core import EngineCore


class MetricsPage:
    """The page of one engine."""

    def __init__(self, core: EngineCore, model: str) -> None:
        self._core = core
        self._model = model
        self._last = metrics_text(core, model)

    def text(self) -> bytes:
        """The page as the faults in force let it look."""
        signals = self._core.faults.now.signals
        if signals == "stop":
            return b""
        if signals != "freeze":
            self._last = metrics_text(self._core, self._model, nan=signals == "nan")
        return self._last


def metrics_text(core: EngineCore, model: str, nan: bool = False) -> bytes:
    """The page in Prometheus' text format."""
    gauges, counters = core.gauges(), core.counters
    values: list[tuple[str, str, float]] = [
        ("vllm:num_requests_running", "gauge", gauges.running),
        ("vllm:num_requests_waiting", "gauge", gauges.waiting),
        ("vllm:kv_cache_usage_perc", "gauge", gauges.kv_tokens_used / gauges.kv_tokens_max),
        ("vllm:prefix_cache_queries_total", "counter", gauges.prefix_query_tokens_total),
        ("vllm:prefix_cache_hits_total", "counter", gauges.prefix_hit_tokens_total),
        ("vllm:num_preemptions_total", "counter", gauges.preemptions_total),
        ("vllm:prompt_tokens_total", "counter", counters.prompt_tokens),
        ("vllm:generation_tokens_total", "counter", counters.generated_tokens),
        ("vllm:request_success_total", "counter", counters.finished),
        ("emulated:requests_aborted_total", "counter", counters.aborted),
        ("emulated:tokens_after_abort_total", "counter", counters.tokens_after_abort),
        ("emulated:steps_total", "counter", counters.steps),
    ]
    lines = []
    for name, kind, value in values:
        shown = "NaN" if nan else f"{value:g}"
        family = name.removesuffix("_total") if kind == "counter" else name
        lines += [f"# TYPE {family} {kind}", f'{name}{{engine="0",model_name="{model}"}} {shown}']
    return ("\n".join(lines) + "\n").encode()
