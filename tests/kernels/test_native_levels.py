"""Every native library that this CPU can run passes the core checks, and depends on nothing but torch's stable ABI and the C library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill_kernels import loader

ROOT = Path(__file__).resolve().parents[2]
LEVELS = [level for level in loader.ISA_NAMES if loader.library_path(level).is_file()]

# Undefined symbols that a library may have: torch's stable C interface, the C library and the unwinder. Weak ones may stay unresolved.
ALLOWED_SYMBOL = re.compile(r"(aoti_torch_\w+|torch_\w+)$|.+@(GLIBC|GCC)_[\d.]+$")


@pytest.mark.skipif(not LEVELS, reason="this build has no native library")
@pytest.mark.parametrize("level", LEVELS)
def test_a_library_passes_the_core_checks(level: str, seed: int) -> None:
    if level not in loader.usable_levels():
        pytest.skip(f"this CPU cannot run {level}")
    environment = {**os.environ, loader.ISA_VARIABLE: level, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "tests.kernels.native_core", str(seed)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stdout}\n{done.stderr}"
    assert done.stdout.startswith(f"{level}: ")


@pytest.mark.skipif(not LEVELS, reason="this build has no native library")
@pytest.mark.skipif(shutil.which("nm") is None, reason="binutils' nm is not installed")
@pytest.mark.parametrize("level", LEVELS)
def test_a_library_needs_only_the_stable_abi_and_the_c_library(level: str) -> None:
    command = ["nm", "-D", "--undefined-only", str(loader.library_path(level))]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    strong = [line.split()[-1] for line in lines if line.split()[-2] == "U"]
    assert any(symbol.startswith("torch_library_impl") for symbol in strong)
    assert [symbol for symbol in strong if not ALLOWED_SYMBOL.match(symbol)] == []
