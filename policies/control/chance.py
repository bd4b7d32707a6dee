"""How far the load may be from what is counted, and whether it is another one since the number of replicas last moved.

Of ``n`` requests the load is known to ``sqrt((1 + cv2) / n)``: their number is chance, and so are their lengths.
A fleet that follows chance goes up and down under a steady load, and each turn costs a start. So::

    work     requests per second x seconds an engine works for one, mean with a half-life of HALF_LIFE_S
    error    sqrt((1 + REQUEST_CV2) / requests in that mean)
    fell     work < highest since the number last rose  * (1 - DEVIATIONS * error)
    rose     work > lowest since the number last fell   * (1 + DEVIATIONS * error)

The first change, and going on in the same direction, ask for no more than what is sure. Going back is *by the load*
where it fell (rose), and else must be worth it at a load that is ``TURN_MARGIN`` of what is counted. The fleet model
says how many carry that.
"""

from __future__ import annotations

import math

from policies.control.fleet_model import FleetModel

HALF_LIFE_S = 30.0
"""Half-life of the mean: some start-up times of small models; a step is seen in half of it."""

REQUEST_CV2 = 1.0
"""Squared coefficient of variation of the work of a request, as ``policies/queueing.py`` takes prompts."""

DEVIATIONS = 3.0
"""Standard errors beyond which it is not chance."""

MARGIN_MIN, TURN_MARGIN = 1.1, 1.5
"""Least multiple of the load that fewer replicas must carry; the multiple where only chance speaks for fewer."""


class Chance:
    """Follows the load of one model."""

    def __init__(self) -> None:
        self._last_ns: int | None = None
        self._seconds = self._requests = self._work = 0.0
        """Sums that fade."""
        self._highest = 0.0
        self._lowest = math.inf
        self._direction = 0
        """In which the number moved last: 1 up, -1 down, 0 not yet."""

    def step(self, arrivals_ps: float, work_s: float, now_ns: int) -> None:
        """One tick with a known load."""
        elapsed_s = 1.0 if self._last_ns is None else max(0.0, (now_ns - self._last_ns) / 1e9)
        self._last_ns = now_ns
        keep = 0.5 ** (elapsed_s / HALF_LIFE_S)
        self._seconds = self._seconds * keep + elapsed_s
        self._requests = self._requests * keep + arrivals_ps * elapsed_s
        self._work = self._work * keep + arrivals_ps * work_s * elapsed_s
        if self._seconds >= HALF_LIFE_S:
            self._highest, self._lowest = max(self._highest, self.work), min(self._lowest, self.work)

    def needs(self, model: FleetModel, low: int, high: int, now_ns: int) -> tuple[int | None, int | None]:
        """One tick: replicas below which the number must not stay, and to which it may fall, as ``model`` predicts."""
        load, work_s = model.load, model.work_s
        if load is None or work_s is None:
            return None, None
        self.step(load.arrivals_ps, work_s, now_ns)
        return model.least(low, high, load.times(self.floor)), model.least(low, high, load.times(self.margin))

    @property
    def work(self) -> float:
        """Engines that the load keeps busy by what grows with it, on average."""
        return self._work / self._seconds if self._seconds else 0.0

    @property
    def error(self) -> float:
        """Standard error of that as a share of it, at most 1."""
        return min(1.0, math.sqrt((1 + REQUEST_CV2) / self._requests)) if self._requests > 0 else 1.0

    @property
    def margin(self) -> float:
        """Multiple of the counted load that fewer replicas must carry."""
        surely = max(MARGIN_MIN, min(TURN_MARGIN, 1 + self.error))
        return surely if self._direction <= 0 or self.fell else TURN_MARGIN

    @property
    def fell(self) -> bool:
        """Whether the load is lower than when the number last rose, by more than chance."""
        return self.work < self._highest * (1 - DEVIATIONS * self.error)

    @property
    def rose(self) -> bool:
        """Whether the load is higher than when the number last fell, by more than chance."""
        return self.work > self._lowest * (1 + DEVIATIONS * self.error)

    @property
    def floor(self) -> float:
        """Share of the counted load that must ask for more replicas for the number to rise."""
        return 1.0 if self._direction >= 0 or self.rose else 1 / (1 + self.error)

    def moved(self, before: int, after: int) -> None:
        """Told that the number changed: what comes from now on is compared with the load of now."""
        self._direction = 1 if after > before else -1
        self._highest = self._lowest = self.work
