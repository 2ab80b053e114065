"""A sample of what mutate.py does in full: the suite notices when a barrier or a wait is deleted from a kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kernels.simt import build, mutate

pytestmark = [
    pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not())),
    pytest.mark.timeout(600),
]


def test_sites_are_found_and_named_by_their_function() -> None:
    names = [mutant.name for file in mutate.mutable_files() for mutant in mutate.mutants_of(file)]
    assert "common/gpu_rows.h block_sum 1" in names
    assert len(set(names)) == len(names)
    assert not [name for name in names if name.split()[1] == "?"]


def test_listed_survivors_exist_and_are_explained() -> None:
    names = {mutant.name for file in mutate.mutable_files() for mutant in mutate.mutants_of(file)}
    for name, reason in mutate.explained().items():
        assert name in names, f"survivors.txt: {name} is no barrier or wait of the kernels"
        assert reason, f"survivors.txt: {name} has no reason"


def test_the_suite_notices_a_deleted_barrier(seed: int) -> None:
    command = [sys.executable, "-m", "tests.kernels.simt.mutate", "attention/merge.cu", "--sample=1", f"--seed={seed}"]
    done = subprocess.run(command, cwd=build.ROOT, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0 and "1 killed" in done.stdout, done.stdout + done.stderr
