"""The Triton kernels on the CPU, interpreted: the conformance suite in float32 and float16, one process per module of kernels, because
TRITON_INTERPRET is read when a kernel is decorated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill_kernels import triton as family
from tests.kernels.triton.processes import ROOT, environment

pytestmark = pytest.mark.skipif(family.missing() is not None, reason=str(family.missing()))


@pytest.mark.slow
@pytest.mark.parametrize("module", family.modules())
def test_interpreted_kernels_agree_with_the_definition(module: str, seed: int, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.gpu.conformance", "--family", "triton", "--device", "cpu", "--jobs", "1", "--seed", str(seed)]
    ops = [word for op in family.ops_of(module) for word in ("--op", op)]
    result = subprocess.run(
        [*command, "--json", str(report), *ops],
        cwd=ROOT,
        env=environment(TRITON_INTERPRET="1", GRISTMILL_KERNELS_STRICT="1"),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    passed = json.loads(report.read_text())["passed"]
    missing = [op for op in family.ops_of(module) if op not in passed]
    assert not missing, f"no case of {', '.join(missing)} ran"


@pytest.mark.slow
def test_what_only_the_interpreter_can_show() -> None:
    """Checks of tests/kernels/triton/interpreted.py, which pytest does not collect by itself."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/triton/interpreted.py"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment(TRITON_INTERPRET="1", GRISTMILL_KERNELS_STRICT="1"), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
