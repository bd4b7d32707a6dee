"""Tasks by when they were last used, and which of them makes room for another.

The tenant that asks for room loses its own task unused for longest when it holds more than an even share of all that
are here, otherwise the tenant that holds most does. So nobody can push out another's tasks by naming many of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
Key: TypeAlias = tuple[str, str]
"""Tenant and task."""


class Recency(Generic[T]):
    """An ordered mapping; every method but the rare :meth:`spare` is O(1)."""

    def __init__(self) -> None:
        self._all: OrderedDict[Key, T] = OrderedDict()
        self._by_tenant: dict[str, OrderedDict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def get(self, key: Key) -> T | None:
        """The value of ``key``."""
        return self._all.get(key)

    def use(self, key: Key, value: T) -> None:
        """``key`` is the one used last."""
        tenant, task = key
        self._all[key] = value
        self._all.move_to_end(key)
        own = self._by_tenant.setdefault(tenant, OrderedDict())
        own[task] = None
        own.move_to_end(task)

    def pop(self, key: Key) -> T | None:
        """Take ``key`` out."""
        value = self._all.pop(key, None)
        if value is not None:
            tenant, task = key
            own = self._by_tenant[tenant]
            del own[task]
            if not own:
                del self._by_tenant[tenant]
        return value

    def oldest(self) -> tuple[Key, T] | None:
        """The one unused for longest."""
        return next(iter(self._all.items()), None)

    def spare(self, tenant: str) -> Key | None:
        """Who makes room for a task of ``tenant``; ``None``: nobody is here."""
        own = self._by_tenant.get(tenant)
        if own is None or len(own) * len(self._by_tenant) <= len(self._all):
            tenant = max(self._by_tenant, key=lambda t: len(self._by_tenant[t]), default="")
            own = self._by_tenant.get(tenant)
        return None if own is None else (tenant, next(iter(own)))

    def newest_first(self) -> Iterator[tuple[Key, T]]:
        """All, the one used last first."""
        return reversed(self._all.items())
