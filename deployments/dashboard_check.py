"""Asks a Prometheus for everything that boards and rules read: which expression has no data, and is that a fault.

An expression without data is fine where ``dashboards/expressions.py`` says why a healthy system may have none; then
the reason is shown. Else nobody exports its name, a target is not scraped, or its two sides never match.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from dashboards.expressions import Answer, Expression, judge, variables, with_value

TIMEOUT_S = 30.0
ANSWER_BYTES_MAX = 64_000_000


class PrometheusError(Exception):
    """Prometheus cannot be asked, or does not understand; the message is for people."""


class Prometheus:
    """One Prometheus by its address, such as ``http://127.0.0.1:9090``."""

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise PrometheusError(f"--prometheus {url}: must begin with http:// or https://")
        self._url = url.rstrip("/")

    def values(self, expr: str) -> list[float]:
        """The values ``expr`` has now, one per series."""
        data = self._ask("/api/v1/query", {"query": expr})
        if data["resultType"] == "scalar":
            return [float(data["result"][1])]
        return [float(sample["value"][1]) for sample in data["result"]]

    def label_values(self, series: str, label: str) -> list[str]:
        """The values of ``label`` in ``series``."""
        found: list[str] = self._ask(f"/api/v1/label/{label}/values", {"match[]": series})
        return found

    def _ask(self, path: str, query: Mapping[str, str]) -> Any:
        url = f"{self._url}{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                return json.loads(answer.read(ANSWER_BYTES_MAX))["data"]
        except urllib.error.HTTPError as error:
            said = error.read(100_000).decode(errors="replace")
            raise PrometheusError(f"{self._url} answers {error.code} to {dict(query)}: {said}") from None
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            raise PrometheusError(f"{self._url} cannot be asked: {getattr(error, 'reason', None) or error}") from None


def answers(prometheus: Prometheus, expressions: Iterable[Expression]) -> list[Answer]:
    """What became of each expression, in order."""
    data: dict[str, bool] = {}

    def has_data(metric: str) -> bool:
        if metric not in data:
            # A histogram has no series of its own name.
            names = (metric, f"{metric}_count")
            data[metric] = any(with_value(prometheus.values(name)) for name in names)
        return data[metric]

    found = []
    for expression in expressions:
        values = prometheus.values(expression.concrete())
        series = with_value(values)
        known = {} if series else {metric: has_data(metric) for metric in expression.metrics}
        found.append(judge(expression, series, known, len(values) - series))
    return found


def resolved(prometheus: Prometheus, documents: Iterable[Mapping[str, Any]]) -> Mapping[str, list[str]]:
    """The values that each variable of the boards has now."""
    wanted = variables(documents).items()
    return {name: prometheus.label_values(series, label) for name, (series, label) in wanted}
