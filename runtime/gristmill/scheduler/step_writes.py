"""The table entries that a step adds, as they are collected while it is planned."""

from __future__ import annotations

import numpy as np

from gristmill.messages import Write


class StepWrites:
    """Becomes Step.writes and Step.write_slots. Pool 0 is the full pool, 1 that of the sliding-window layers."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self._slots: list[np.ndarray] = []

    def add(self, req_slot: int, start: int, slots: np.ndarray, pool: int = 0) -> None:
        self.writes.append(Write(pool, req_slot, start, len(slots)))
        self._slots.append(slots)

    def add_blocks(self, req_slots: np.ndarray, starts: np.ndarray, blocks: np.ndarray) -> None:
        """One block of equally many slots per request."""
        n = blocks.shape[1]
        self.writes += [Write(0, req_slot, start, n) for req_slot, start in zip(req_slots.tolist(), starts.tolist())]
        self._slots.append(blocks.reshape(-1))

    def slots(self) -> np.ndarray:
        return np.concatenate(self._slots) if self._slots else np.empty(0, dtype=np.int32)
