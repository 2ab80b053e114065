from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def order_of_this_test_alone() -> Iterator[None]:
    """The emulation reads its order from the environment, which later tests and their processes would inherit."""
    before = os.environ.pop("GRISTMILL_SIMT_ORDER", None)
    yield
    os.environ.pop("GRISTMILL_SIMT_ORDER", None)
    if before is not None:
        os.environ["GRISTMILL_SIMT_ORDER"] = before
