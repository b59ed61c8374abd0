"""How often a tenant may call: one token bucket per tenant."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvcache_service.errors import Code, KVCacheError

_BURST_SECONDS = 2.0  # what a tenant may save up while it is silent


class RequestRate:
    """Thread-safe. per_second: calls per tenant; None: as many as come."""

    def __init__(self, per_second: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._left: dict[str, tuple[float, float]] = {}  # calls left, at which time

    def take(self, tenant: str) -> None:
        """Count one call. Raises BUSY with the time until the next one is free."""
        if self._per_second is None:
            return
        most = max(1.0, self._per_second * _BURST_SECONDS)
        with self._lock:
            now = self._clock()
            left, then = self._left.get(tenant, (most, now))
            left = min(most, left + (now - then) * self._per_second)
            if left < 1.0:
                self._left[tenant] = (left, now)
                raise KVCacheError(
                    Code.BUSY,
                    f"more than {self._per_second:g} calls a second",
                    fix="wait as retry-after-ms says, or prefill; raise quota_requests_per_second",
                    retry_after=(1.0 - left) / self._per_second,
                )
            self._left[tenant] = (left - 1.0, now)
