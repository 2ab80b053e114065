"""Shared pytest set-up: the repository root is importable as `tests.support.*`, and every test prints the seed it drew."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import pytest

# Spinning OpenMP threads make tests many times slower wherever something else runs beside them; read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# before torch is loaded: threads that spin while they wait make tests on a shared machine ten times slower
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

# A shell starts what runs in the background with Ctrl-C ignored, and children inherit that: the servers of the tests must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed per test run, shown when the test fails; GRISTMILL_TEST_SEED repeats one."""
    value = int(os.environ.get("GRISTMILL_TEST_SEED") or random.SystemRandom().randrange(2**31))
    request.node.add_report_section("setup", "seed", f"GRISTMILL_TEST_SEED={value}")
    return value
