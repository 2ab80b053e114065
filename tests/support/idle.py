"""Reading an engine when it has nothing left to do."""

from __future__ import annotations

import time
from typing import Any

WAIT_S = 5.0


def idle_stats(engine: Any) -> Any:
    """The engine's statistics once it is idle: the last answer arrives a moment before the scheduler has taken back what it used.

    What is still held after WAIT_S is for the caller's assertions to find.
    """
    deadline = time.monotonic() + WAIT_S
    while (stats := engine.stats).running + stats.waiting + stats.pool_locked and time.monotonic() < deadline:
        time.sleep(0.01)
    return stats
