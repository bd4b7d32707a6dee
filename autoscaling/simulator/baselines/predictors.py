"""Load predictors of a Dynamo-style planner: the next interval's value from those before.

Source: ai-dynamo 1.6.1, ``dynamo/planner/core/load/predictors.py``. ``constant``: the last value. ``arima``: Dynamo
lets ``pmdarima.auto_arima`` choose an order; here a straight autoregression of order 2 on the last :data:`WINDOW`
values by least squares stands for it (a sinusoid obeys one exactly), from :data:`POINTS_MIN` values on, and the last
value where the fit has no sense. Zeros before the first value that is none are skipped, as there; so is ``prophet``.

What this must not do: know what the values mean.
"""

from __future__ import annotations

from collections import deque

WINDOW = 50
"""Values remembered (Dynamo's ``prophet_window_size``)."""

POINTS_MIN = 5
"""Values before a model is fitted; until then the last one is the prediction."""

PREDICTORS = ("constant", "arima")
"""Names."""


class Predictor:
    """One series. Raises ``ValueError`` for an unknown name."""

    def __init__(self, name: str) -> None:
        if name not in PREDICTORS:
            raise ValueError(f"predictor: must be one of {', '.join(PREDICTORS)}, is {name!r}")
        self._fits = name == "arima"
        self._values: deque[float] = deque(maxlen=WINDOW)

    def add(self, value: float) -> None:
        """The value of the interval that just ended."""
        if value or self._values:
            self._values.append(value)

    def predict(self) -> float:
        """The value expected of the next interval; 0 before any."""
        if not self._values:
            return 0.0
        last = self._values[-1]
        if not self._fits or len(self._values) < POINTS_MIN or len(set(self._values)) == 1:
            return last
        fitted = _autoregression(list(self._values))
        return last if fitted is None else max(0.0, fitted)


def _autoregression(values: list[float]) -> float | None:
    """Next value of ``x[t] = mean + p (x[t-1] - mean) + q (x[t-2] - mean)``; ``None`` where it is not determined."""
    mean = sum(values) / len(values)
    d = [v - mean for v in values]
    triples = list(zip(d, d[1:], d[2:], strict=False))
    s11 = sum(b * b for _, b, _ in triples)
    s22 = sum(a * a for a, _, _ in triples)
    s12 = sum(a * b for a, b, _ in triples)
    y1 = sum(b * c for _, b, c in triples)
    y2 = sum(a * c for a, _, c in triples)
    determinant = s11 * s22 - s12 * s12
    if determinant <= 1e-9 * max(1e-12, s11 * s22):
        return None
    p, q = (y1 * s22 - y2 * s12) / determinant, (y2 * s11 - y1 * s12) / determinant
    return mean + p * d[-1] + q * d[-2]
