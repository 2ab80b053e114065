"""The tests of tests/kernels/test_large_offsets.py on a GPU: `python -m tests.gpu.large_offsets --family triton`. There tensors of more
than 2^31 elements are real memory, some 9 GB at a time. Needs what tests/gpu/conformance.py needs; prints one line per test."""

from __future__ import annotations

import argparse
import inspect
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "python")) if path not in sys.path]

import pytest  # noqa: E402
import torch  # noqa: E402

from gristmill_kernels import dispatch  # noqa: E402


def _calls(module: Any, family: str, seed: int) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Every test that takes a family, with each combination of its other parameters."""
    for name, function in vars(module).items():
        if not name.startswith("test_") or "family" not in inspect.signature(function).parameters:
            continue
        axes = {mark.args[0]: mark.args[1] for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"}
        if axes["family"] is not module.FAMILIES and family not in axes["family"]:
            continue
        given = {"family": [family], "seed": [seed]}
        wanted = list(inspect.signature(function).parameters)
        choices = [given.get(parameter) or axes[parameter] for parameter in wanted]
        for values in itertools.product(*choices):
            yield name, function, dict(zip(wanted, values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="triton", choices=dispatch.FAMILIES)
    parser.add_argument("--device", default="cuda", help="torch device (default: cuda)")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="default: a fresh one, printed")
    options = parser.parse_args()
    from tests.kernels import test_large_offsets as module
    from tests.kernels.conformance.harness import key_on
    from tests.kernels.conformance.test_conformance import CASES

    module.generator = lambda seed: torch.Generator(options.device).manual_seed(seed)
    print(f"family={options.family} device={options.device} seed={options.seed}")
    for case in CASES:  # a family may attach its kernels when it is first asked for one
        dispatch.why_not(case.op, options.family, key_on(case, torch.device(options.device).type))
    failures = 0
    for name, function, arguments in _calls(module, options.family, options.seed):
        begin = time.perf_counter()
        try:
            with torch.device(options.device):
                function(**arguments)
            said = "passed"
        except (pytest.skip.Exception, NotImplementedError) as skipped:  # the latter: an op that the family does not have
            said = f"skipped: {str(skipped).splitlines()[0]}"
        except (Exception, pytest.fail.Exception) as error:
            failures += 1
            said = f"FAILED: {type(error).__name__}: {str(error)[:600]}"
        shown = ", ".join(f"{key}={value}" for key, value in arguments.items() if key not in ("family", "seed"))
        print(f"{name}({shown}): {said} ({time.perf_counter() - begin:.1f} s)", flush=True)
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
