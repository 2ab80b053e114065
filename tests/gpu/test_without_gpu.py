"""What needs a GPU says so in a sentence where there is none, instead of failing somewhere inside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("options", [[], ["--memory"]], ids=["attention", "memory"])
def test_the_benchmark_says_that_there_is_no_gpu(options: list[str]) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_kernels.py"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "torch sees none" in done.stderr and "Traceback" not in done.stderr
