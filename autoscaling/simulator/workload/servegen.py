"""ServeGen's production rates (alibaba/ServeGen, Apache-2.0): of a whole service, or client by client.

A service's file has the rate per 600 s window; the CV in it is a client's, not the sum's, so arrivals are Poisson
unless the caller says otherwise. A client's file has rate and distribution of the gaps (``Gamma`` or ``Weibull``,
``p1`` the shape, ``p2`` the scale) per window. The fitted scale misses the measured rate by up to a factor of 100
where gaps have a long tail, so that only the shape is taken and the scale is set to meet the rate. Windows that are
absent are idle.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from autoscaling.simulator.spec import SimRequest, Source, SourceFactory
from autoscaling.simulator.workload.lengths import Lengths
from autoscaling.simulator.workload.rates import RATE_RPS_MAX, RateCurve
from autoscaling.simulator.workload.trace import Options, TraceError, csv_rows, number_of, stream_of

WINDOW_S = 600.0
RATE_COLUMNS = ("t_s", "rate_rps", "rate_weighted_client_iat_cv", "active_clients")
CLIENT_COLUMNS = ("client", "t_s", "rate_rps", "iat_cv", "pattern", "p1", "p2")
SHAPE_MIN, SHAPE_MAX = 0.01, 1_000.0
"""Shapes of gaps that make sense: below, all requests of an hour would come at once."""


def parse_servegen_rates(lines: Iterable[str], name: str) -> RateCurve:
    """Rate of a whole service, constant within each window. Raises :class:`TraceError`."""
    steps: list[tuple[float, float]] = []
    end_s = 0.0
    for line, row in csv_rows(lines, name, RATE_COLUMNS):
        t_s = number_of(row, "t_s", name, line)
        rate_rps = number_of(row, "rate_rps", name, line, to=RATE_RPS_MAX)
        if t_s < end_s:
            raise TraceError(f"t_s {t_s:g} overlaps the window above, which ends at {end_s:g}", name, line)
        if t_s > end_s:
            steps.append((t_s - end_s, 0.0))
        steps.append((WINDOW_S, rate_rps))
        end_s = t_s + WINDOW_S
    if not steps:
        raise TraceError("no rates in it", name)
    return RateCurve.steps(steps, name)


@dataclass(frozen=True, slots=True)
class Window:
    """One client in one window."""

    t_s: float
    rate_rps: float
    weibull: bool
    shape: float

    def gap(self, rng: Random) -> float:
        """A gap with mean 1."""
        if self.weibull:
            return rng.weibullvariate(1.0 / math.gamma(1.0 + 1.0 / self.shape), self.shape)
        return rng.gammavariate(self.shape, 1.0 / self.shape)

    def first(self, rng: Random) -> float:
        """Time to the first arrival of a process that has run for ever: part of a gap drawn by its length.

        Drawn by their length, Gamma variates have a shape greater by 1, and the power ``shape`` of a Weibull variate is
        a Gamma variate of shape ``1 + 1 / shape``.
        """
        k = self.shape
        if self.weibull:
            by_length = math.pow(rng.gammavariate(1.0 + 1.0 / k, 1.0), 1.0 / k)
            return by_length / math.gamma(1.0 + 1.0 / k) * rng.random()
        return rng.gammavariate(k + 1.0, 1.0 / k) * rng.random()


def parse_servegen_clients(lines: Iterable[str], name: str) -> dict[str, list[Window]]:
    """Windows of each client by growing time. Raises :class:`TraceError`."""
    clients: dict[str, list[Window]] = {}
    for line, row in csv_rows(lines, name, CLIENT_COLUMNS):
        t_s = number_of(row, "t_s", name, line)
        rate_rps = number_of(row, "rate_rps", name, line, to=RATE_RPS_MAX)
        if row["pattern"] not in {"Gamma", "Weibull"}:
            raise TraceError(f"pattern {row['pattern'][:40]!r} is unknown; expected Gamma or Weibull", name, line)
        shape = number_of(row, "p1", name, line, to=1e6)
        if not shape:
            raise TraceError("p1, the shape of the gaps, must be greater than 0", name, line)
        windows = clients.setdefault(row["client"], [])
        if windows and t_s < windows[-1].t_s + WINDOW_S:
            above = f"the one above it, at {windows[-1].t_s:g}"
            raise TraceError(f"window at {t_s:g} s of client {row['client'][:40]} overlaps {above}", name, line)
        windows.append(Window(t_s, rate_rps, row["pattern"] == "Weibull", min(SHAPE_MAX, max(SHAPE_MIN, shape))))
    if not any(w.rate_rps for windows in clients.values() for w in windows):
        raise TraceError("no client with a rate in it", name)
    return clients


class ClientsSource:
    """All clients of a service; each has a stream of its own, so that one more client moves no other."""

    def __init__(
        self, name: str, clients: dict[str, list[Window]], lengths: Lengths, options: Options, rng: Random
    ) -> None:
        self.name = name
        self._clients, self._lengths, self._options = clients, lengths, options
        self._seed = stream_of(rng)

    def arrivals(self) -> Iterator[SimRequest]:
        """Arrivals of all clients by growing time; the client is the tenant."""
        streams = [self._of_client(client, windows) for client, windows in self._clients.items()]
        for index, (at_ns, client, prompt_tokens, output_tokens) in enumerate(heapq.merge(*streams)):
            if index == self._options.limit:
                return
            yield SimRequest(index, at_ns, prompt_tokens, output_tokens, tenant=f"client-{client}")

    def _of_client(self, client: str, windows: Sequence[Window]) -> Iterator[tuple[int, str, int, int]]:
        options = self._options
        lengths = Random(f"{self._seed}/{client}/lengths")
        for at_s in client_times(windows, Random(f"{self._seed}/{client}/arrivals"), options):
            if at_s * 1e9 >= options.end_ns:
                return
            yield (round(at_s * 1e9), client, *self._lengths.draw(lengths))

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:  # noqa: ARG002
        """None: open loop."""
        return ()


def client_times(windows: Sequence[Window], rng: Random, options: Options) -> Iterator[float]:
    """Arrivals of one client in seconds: gaps drawn with the shape of the window they begin in, in operational time."""
    left: float | None = None
    for window in windows:
        begin_s = max(window.t_s, options.start_s)
        length_s = (window.t_s + WINDOW_S - begin_s) / options.compress
        rate_rps = window.rate_rps * options.scale
        if length_s <= 0.0 or rate_rps == 0.0:
            continue
        left = window.first(rng) if left is None else left
        done, area = 0.0, rate_rps * length_s
        while done + left <= area:
            done += left
            yield (begin_s - options.start_s) / options.compress + done / rate_rps
            left = window.gap(rng)
        left -= area - done


def from_clients(
    clients: dict[str, list[Window]], name: str, lengths: Lengths, options: Options | None = None
) -> SourceFactory:
    """Factory of sources that draw every client's arrivals."""
    options = options or Options()
    end_s = max(windows[-1].t_s for windows in clients.values()) + WINDOW_S
    if options.start_s >= end_s:
        raise TraceError(f"start_s {options.start_s:g} is after the end at {end_s:g} s", name)
    if max((w.rate_rps for windows in clients.values() for w in windows), default=0.0) * options.scale > RATE_RPS_MAX:
        raise TraceError(f"scale {options.scale:g} makes a rate above {RATE_RPS_MAX:,.0f} per second", name)

    def source(rng: Random) -> Source:
        return ClientsSource(name, clients, lengths, options, rng)

    return source


def category_of(file_name: str) -> str | None:
    """Category of the length quantiles for a ServeGen file name, e.g. ``language/m-large``; ``None``: not known."""
    for model, category in (
        ("deepseek-r1", "reason/deepseek-r1"),
        ("m-large", "language/m-large"),
        ("m-mid", "language/m-mid"),
        ("m-small", "language/m-small"),
        ("mm-image", "multimodal/mm-image"),
    ):
        if model in file_name:
            return category
    return None
