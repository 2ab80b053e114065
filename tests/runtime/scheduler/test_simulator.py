"""The protocol under random schedules: nothing breaks, everything happens, and every planted fault is noticed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.runtime.scheduler.faults import FAULTS, NOTICED, planted
from tests.runtime.scheduler.simulator import run_schedule

N_SCHEDULES = 1000
N_BLOCKS = 4


@pytest.mark.parametrize("block", range(N_BLOCKS))
def test_random_schedules_keep_every_rule(block: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(block * N_SCHEDULES // N_BLOCKS, (block + 1) * N_SCHEDULES // N_BLOCKS):
        try:
            totals += run_schedule(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    for happened in (
        "retractions",
        "preemptions",
        "prefix_waits",
        "cached_tokens",
        "chunks",
        "zombie_rows",
        "aborts",
        "evicted",
        "duplicates",
        "flushes",
        "stale prefixes kept over a flush",
        "masked rows",
        "penalized",
        "with a window pool",
        "window slots freed below a live window",
        "pauses",
        "KV events",
        "scored prompts",
        "closed by stop",
        "closed by length",
        "closed by invalid_distribution",
        "closed by pool_exceeded",
        "closed by queue_full",
        "closed by context_length_exceeded",
        "depth 1",
        "depth 2",
        "depth 3",
    ):
        assert totals[happened] > 0, f"no schedule of block {block} had any {happened}"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str) -> None:
    with planted(fault):
        for seed in range(400):
            try:
                run_schedule(seed)
            except NOTICED:
                return
    pytest.fail(f"400 schedules did not notice that {fault}")
