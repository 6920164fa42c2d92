"""Whose turn it is: keys that wait for a place, by tenant, so that one with ten thousand of them delays no other.

Tenants take turns, one key each; within a tenant the key that became due first goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Turns(Generic[K]):
    """Keys and the times at which they became due.

    Args:
        tenant_of: whose a key is.
    """

    def __init__(self, tenant_of: Callable[[K], Hashable]) -> None:
        self._tenant_of = tenant_of
        self._tenants: dict[Hashable, dict[K, float]] = {}  # the next one first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: K) -> bool:
        return key in self._tenants.get(self._tenant_of(key), ())

    def put(self, key: K, due: float) -> None:
        """Have a key wait that does not wait yet."""
        self._tenants.setdefault(self._tenant_of(key), {})[key] = due
        self._count += 1

    def drop(self, key: K) -> None:
        """Let a key wait no longer, if it does."""
        tenant = self._tenant_of(key)
        waiting = self._tenants.get(tenant, {})
        if waiting.pop(key, None) is not None:
            self._count -= 1
            if not waiting:
                del self._tenants[tenant]

    def take(self, may: Callable[[Hashable], bool]) -> tuple[K, float] | None:
        """The next key of the next tenant that may have a place, with its due time; ``None``: there is none."""
        tenant = next((tenant for tenant in self._tenants if may(tenant)), None)
        if tenant is None:
            return None
        waiting = self._tenants.pop(tenant)
        key = next(iter(waiting))
        due = waiting.pop(key)
        self._count -= 1
        if waiting:
            self._tenants[tenant] = waiting  # behind all others
        return key, due

    def oldest(self, may: Callable[[Hashable], bool]) -> float | None:
        """The earliest due time of those that wait, of the tenants that may have a place."""
        firsts = (next(iter(waiting.values())) for tenant, waiting in self._tenants.items() if may(tenant))
        return min(firsts, default=None)
