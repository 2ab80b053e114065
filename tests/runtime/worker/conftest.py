"""Model M on disk, and one runner over it that tests of a module share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.direct_runner import DirectRunner
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("worker") / "m")


@pytest.fixture
def driver(model_dir) -> DirectRunner:
    return DirectRunner(model_dir)
