"""docs/cli.md says what the command line does."""

from __future__ import annotations

from pathlib import Path

from gristmill.cli.reference import render
from gristmill.options import FIELDS, env_name, flag

PAGE = Path(__file__).parents[3] / "docs/cli.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render(), "run: python -m gristmill.cli.reference > docs/cli.md"


def test_every_option_is_on_the_page_with_its_variable() -> None:
    text = PAGE.read_text()
    assert all(f"`{flag(name)}`" in text and f"`{env_name(name)}`" in text for name in FIELDS if name != "model")
