"""What needs a GPU says so in a sentence where there is none, instead of failing somewhere inside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


COMMANDS = {
    "attention benchmark": ["benchmarks/gpu_kernels.py"],
    "memory benchmark": ["benchmarks/gpu_kernels.py", "--memory"],
    "engine benchmark": ["benchmarks/gpu_engine.py"],
    "conformance": ["-m", "tests.gpu.conformance"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_for_gpus_says_that_there_is_none(name: str) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *COMMANDS[name]], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "torch sees none" in done.stderr and "Traceback" not in done.stderr
