"""Prompt and output lengths of generated requests."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Protocol

from autoscaling.simulator.workload.trace import TOKENS_MAX, TraceError, check_number, csv_rows, number_of


class Lengths(Protocol):
    """Draws the lengths of one request."""

    def draw(self, rng: Random) -> tuple[int, int]:
        """Prompt and output tokens, each at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every request alike (ISL and OSL of benchmarks)."""

    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        check_number("prompt_tokens", self.prompt_tokens, at_least=1, to=TOKENS_MAX)
        check_number("output_tokens", self.output_tokens, at_least=1, to=TOKENS_MAX)

    def draw(self, rng: Random) -> tuple[int, int]:  # noqa: ARG002
        """The two lengths."""
        return self.prompt_tokens, self.output_tokens


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Independent log-normal lengths with these means and coefficients of variation."""

    prompt_mean: float
    output_mean: float
    prompt_cv: float = 1.0
    output_cv: float = 1.0
    tokens_max: int = 100_000

    def __post_init__(self) -> None:
        for what in ("prompt_mean", "output_mean"):
            check_number(what, getattr(self, what), at_least=1, to=TOKENS_MAX)
        for what in ("prompt_cv", "output_cv"):
            check_number(what, getattr(self, what), to=20.0)
        check_number("tokens_max", self.tokens_max, at_least=1, to=TOKENS_MAX)

    def draw(self, rng: Random) -> tuple[int, int]:
        """Both lengths, in 1..``tokens_max``."""
        prompt = log_normal(rng, self.prompt_mean, self.prompt_cv)
        output = log_normal(rng, self.output_mean, self.output_cv)
        return tuple(max(1, min(self.tokens_max, round(x))) for x in (prompt, output))  # type: ignore[return-value]


def log_normal(rng: Random, mean: float, cv: float) -> float:
    """Log-normal variate with this mean and coefficient of variation; ``mean`` itself for ``cv`` 0."""
    if cv == 0.0 or mean == 0.0:
        return mean
    variance = math.log1p(cv * cv)
    return rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


@dataclass(frozen=True, slots=True)
class Empirical:
    """Pairs as recorded, drawn with replacement: keeps what joins prompt and output."""

    pairs: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        if not self.pairs:
            raise TraceError("no lengths to draw from")

    def draw(self, rng: Random) -> tuple[int, int]:
        """One recorded pair."""
        return self.pairs[int(rng.random() * len(self.pairs))]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Independent lengths by their quantiles ``(share, tokens)``, linear in between; cut at the outermost ones."""

    prompt: tuple[tuple[float, float], ...]
    output: tuple[tuple[float, float], ...]

    def draw(self, rng: Random) -> tuple[int, int]:
        """Both lengths, at least 1."""
        prompt, output = _inverse(self.prompt, rng.random()), _inverse(self.output, rng.random())
        return max(1, round(prompt)), max(1, round(output))


def _inverse(quantiles: tuple[tuple[float, float], ...], u: float) -> float:
    i = bisect_right(quantiles, (u, math.inf))
    if i == 0:
        return quantiles[0][1]
    if i == len(quantiles):
        return quantiles[-1][1]
    (u0, x0), (u1, x1) = quantiles[i - 1], quantiles[i]
    return x0 + (x1 - x0) * (u - u0) / (u1 - u0)


def parse_quantiles(lines: Iterable[str], name: str) -> Mapping[str, Quantiles]:
    """ServeGen length quantiles by category, e.g. ``reason/deepseek-r1``: ``category,field,mean,p0.5,p1,...``.

    Categories with only one of ``input_tokens`` and ``output_tokens`` are left out. Raises :class:`TraceError`.
    """
    found: dict[str, dict[str, tuple[tuple[float, float], ...]]] = {}
    text = list(lines)
    header = text[0].strip().split(",") if text else []
    columns = [c for c in header if c.startswith("p") and _is_share(c[1:])]
    for line, row in csv_rows(text, name, ("category", "field", "mean", *(columns or ["p50"]))):
        field = row["field"]
        if field not in {"input_tokens", "output_tokens"}:
            raise TraceError(f"field {field[:40]!r} is unknown; expected input_tokens or output_tokens", name, line)
        points = [(float(c[1:]) / 100, number_of(row, c, name, line, to=TOKENS_MAX)) for c in columns]
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(points)):
            raise TraceError("quantiles must grow from left to right", name, line)
        found.setdefault(row["category"], {})[field] = tuple(points)
    if not found:
        raise TraceError("no quantiles in it", name)
    return {c: Quantiles(f["input_tokens"], f["output_tokens"]) for c, f in found.items() if len(f) == 2}


def _is_share(text: str) -> bool:
    try:
        return 0.0 <= float(text) <= 100.0
    except ValueError:
        return False
