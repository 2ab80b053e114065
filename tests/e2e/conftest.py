"""Servers of the end-to-end tests: the tiny model M behind the real processes, started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.served import Served, served
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[Served]:
    """Model M with small chunks and the default pool; tests leave it idle."""
    with served(tiny, "--chunk-tokens=32", "--pool-tokens=4096", "--threads=1") as running:
        yield running
