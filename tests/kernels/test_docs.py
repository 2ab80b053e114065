"""The examples of docs/kernels.md and of the docstrings run, and the page names every op and every variable."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import gristmill_kernels
from gristmill_kernels import dispatch, loader
from gristmill_kernels.__main__ import format_platforms

PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_of_the_page_run(number: int) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, "-c", EXAMPLES[number]], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", ["norm", "gemm", "moe", "quant", "_plan"])
def test_the_examples_of_the_docstrings_run(module: str) -> None:
    results = doctest.testmod(import_module(f"gristmill_kernels.{module}"))
    assert results.attempted and not results.failed


def test_the_page_names_every_function_and_variable() -> None:
    variables = [dispatch.IMPL_VARIABLE, dispatch.STRICT_VARIABLE, loader.ISA_VARIABLE]
    functions = [name for name in gristmill_kernels.__all__ if name not in ("DecodePlan", "PackedLinear", "packed_weight_size")]
    for name in [*variables, *functions, *loader.ISA_NAMES]:
        assert name in PAGE, f"docs/kernels.md does not mention {name}"


def test_the_table_of_platforms_is_what_the_registry_says() -> None:
    table = (Path(__file__).parents[2] / "docs" / "kernels-table.md").read_text()
    want = format_platforms(gristmill_kernels.capabilities())
    assert want in table, "python -m gristmill_kernels --platforms prints what belongs into docs/kernels-table.md"


@pytest.mark.parametrize("name", [name for name in gristmill_kernels.__all__ if name[0].islower()])
def test_every_public_function_tells_arguments_and_results(name: str) -> None:
    text = getattr(gristmill_kernels, name).__doc__ or ""
    assert len(text.splitlines()[0]) > 20
    if name not in ("capabilities", "decode_workspace_size", "packed_weight_size"):
        assert "Args:" in text and "Raises:" in text
