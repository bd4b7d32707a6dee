"""Small least squares in plain Python: linear with coefficients that must not be negative, and non-linear.

:func:`not_negative` is Lawson and Hanson's active set method (Solving Least Squares Problems, 1974, ch. 23) on the
normal equations: at most a dozen unknowns, any number of rows. :func:`minimise` is Levenberg and Marquardt's method
with finite differences, for functions as costly as a simulation: it calls them once per unknown and round.

It must not know what the numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

Vector: TypeAlias = list[float]
Matrix: TypeAlias = list[list[float]]

_GRADIENT_MIN = 1e-10
"""Gain below which another unknown is not worth freeing, as a share of the targets' square sum."""
_ROUNDS_PER_UNKNOWN = 10


def solve(matrix: Matrix, right: Sequence[float]) -> Vector | None:
    """Solution of a small square system by elimination with pivoting; ``None`` where it has none."""
    n = len(right)
    rows = [[*row, right[i]] for i, row in enumerate(matrix)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(rows[k][i]))
        if abs(rows[pivot][i]) <= 1e-12 * max(1e-300, *(abs(v) for v in rows[pivot][:n])):
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for k in range(i + 1, n):
            factor = rows[k][i] / rows[i][i]
            if factor:
                rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    x = [0.0] * n
    for i in reversed(range(n)):
        x[i] = (rows[i][n] - sum(rows[i][k] * x[k] for k in range(i + 1, n))) / rows[i][i]
    return x


def not_negative(rows: Iterable[Sequence[float]], targets: Iterable[float], unknowns: int) -> Vector:
    """The ``x >= 0`` with the least square sum of ``row . x - target``; unknowns no row speaks of are 0."""
    gram: Matrix = [[0.0] * unknowns for _ in range(unknowns)]
    right, square = [0.0] * unknowns, 0.0
    for row, target in zip(rows, targets, strict=True):
        square += target * target
        for i, value in enumerate(row):
            if value:
                right[i] += value * target
                line = gram[i]
                for k in range(i, unknowns):
                    line[k] += value * row[k]
    scale = [math.sqrt(gram[i][i]) or 1.0 for i in range(unknowns)]
    for i in range(unknowns):
        right[i] /= scale[i]
        for k in range(i, unknowns):
            gram[k][i] = gram[i][k] = gram[i][k] / scale[i] / scale[k]
    x = _active_set(gram, right, _GRADIENT_MIN * math.sqrt(square))
    return [value / s for value, s in zip(x, scale, strict=True)]


def _active_set(gram: Matrix, right: Vector, gradient_min: float) -> Vector:
    unknowns = len(right)
    x, free, barred = [0.0] * unknowns, list[int](), set[int]()
    for _ in range(_ROUNDS_PER_UNKNOWN * unknowns):
        gains = {
            i: right[i] - sum(g * v for g, v in zip(gram[i], x, strict=True))
            for i in range(unknowns)
            if i not in free and i not in barred
        }
        best = max(gains, key=lambda i: gains[i], default=None)
        if best is None or gains[best] <= gradient_min:
            break
        free.append(best)
        while free:
            part = solve([[gram[i][k] for k in free] for i in free], [right[i] for i in free])
            if part is None:
                barred.add(free.pop())
                continue
            if min(part) > 0:
                x = [0.0] * unknowns
                for i, value in zip(free, part, strict=True):
                    x[i] = value
                break
            share = min(x[i] / (x[i] - v) for i, v in zip(free, part, strict=True) if v <= 0)
            for i, value in zip(free, part, strict=True):
                x[i] += share * (value - x[i])
            if free[-1] == best and x[best] <= 0:
                barred.add(best)
            free = [i for i in free if x[i] > 1e-15]
            x = [value if i in free else 0.0 for i, value in enumerate(x)]
    return x


def minimise(
    residuals: Callable[[Vector], Vector], start: Vector, *, rounds_max: int, step: float = 0.02, gain_min: float = 1e-3
) -> tuple[Vector, float]:
    """Unknowns near ``start`` that lessen the square sum of ``residuals``, and that sum.

    ``step``: width of the finite differences and hence the least change that is looked for; ends when a round gains
    less than the share ``gain_min``. Calls ``residuals`` at most ``rounds_max * (len(start) + 5)`` times.
    """
    x, damping = list(start), 1e-2
    now = residuals(x)
    square = sum(v * v for v in now)
    for _ in range(rounds_max):
        slopes = [
            [(b - a) / step for a, b in zip(now, residuals(_moved(x, j, step)), strict=True)] for j in range(len(x))
        ]
        gram = [[sum(a * b for a, b in zip(p, q, strict=True)) for q in slopes] for p in slopes]
        right = [-sum(a * b for a, b in zip(p, now, strict=True)) for p in slopes]
        before = square
        for _ in range(5):
            damped = [[v * (1 + damping) + 1e-9 if i == k else v for k, v in enumerate(r)] for i, r in enumerate(gram)]
            move = solve(damped, right)
            if move is not None:
                there = [v + max(-1.0, min(1.0, m)) for v, m in zip(x, move, strict=True)]
                then = residuals(there)
                total = sum(v * v for v in then)
                if total < square:
                    x, now, square, damping = there, then, total, max(1e-4, damping / 5)
                    break
            damping *= 5
        if before - square < gain_min * before:
            break
    return x, square


def _moved(x: Vector, j: int, step: float) -> Vector:
    return [v + step if i == j else v for i, v in enumerate(x)]
