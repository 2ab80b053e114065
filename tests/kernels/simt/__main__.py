"""The conformance suite over the GPU kernels, run by the CPU emulation: `python -m tests.kernels.simt --warp 64 --order 1 --op rms_norm`.

The emulated library takes the place of the CPU library in this process, as family `native` on the CPU, with the predicates of the GPU.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gristmill_kernels import dispatch, loader, native_cuda
from tests.kernels.simt import build

ROOT = Path(__file__).resolve().parents[3]


class Outcome(NamedTuple):
    op: str
    dtype: str
    label: str
    status: str  # passed, failed, declined
    detail: str
    seconds: float


def open_emulation(path: Path) -> None:
    """Make the emulated kernels the family `native` of this process, and the only one that serves the CPU beside `reference`."""
    os.environ[loader.ISA_VARIABLE] = "reference"  # or the CPU library would take the place of the emulated one
    torch.ops.load_library(str(path))
    dispatch.families_of("rms_norm")  # the built-in families register first
    for name, predicate in native_cuda.PREDICATES.items():
        dispatch.implement(name, "native", _supports(name, predicate), devices=("cpu",))


def _supports(name: str, predicate: Any) -> Any:
    def supports(key: Any) -> str | None:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{dispatch.NAMESPACE}_native::{name}", "CPU"):
            return "not in the emulated library"
        return predicate(key)

    return supports


def cases_of(ops: list[str], label: str) -> list[Any]:
    from tests.kernels.conformance.test_conformance import CASES

    return [case for case in CASES if case.op in native_cuda.PREDICATES and (not ops or case.op in ops) and label in case.label]


def drawn(cases: list[Any], per_group: int, seed: int) -> list[Any]:
    """Some cases of every op and dtype."""
    groups: dict[tuple, list[Any]] = {}
    for case in cases:
        groups.setdefault((case.op, *case.key[1:2]), []).append(case)
    source = random.Random(seed)
    return [case for group in groups.values() for case in source.sample(group, min(per_group, len(group)))]


def run_one(case: Any, seed: int) -> Outcome:
    from tests.kernels.conformance.harness import run_case

    begin = time.perf_counter()
    dtype = "->".join(dict.fromkeys(str(fact).removeprefix("torch.") for fact in case.key if isinstance(fact, torch.dtype))) or "int32"
    reason = dispatch.why_not(case.op, "native", case.key)
    if reason is not None:
        return Outcome(case.op, dtype, case.label, "declined", reason, 0.0)
    try:
        run_case(case, dispatch.overload(case.op, "native"), seed, "native")
        status, detail = "passed", ""
    except Exception as error:
        status, detail = "failed", f"{type(error).__name__}: {error}"
        if not isinstance(error, AssertionError | RuntimeError):
            detail += "\n" + traceback.format_exc(limit=-4)
    return Outcome(case.op, dtype, case.label, status, detail, time.perf_counter() - begin)


def report(outcomes: list[Outcome], quiet: bool) -> None:
    for outcome in [one for one in outcomes if one.status == "failed"][:30]:
        print(f"FAILED {outcome.op}-{outcome.label}\n    {outcome.detail.strip()[:1500]}")
    for (op, reason), count in sorted(Counter((one.op, one.detail) for one in outcomes if one.status == "declined").items()):
        print(f"declined {op} ({count} cases): {reason}")
    rows: dict[tuple[str, str], Counter] = defaultdict(Counter)
    for outcome in outcomes:
        rows[outcome.op, "" if quiet else outcome.dtype][outcome.status] += 1
    for (op, dtype), counts in sorted(rows.items()):
        print(f"{op:<26}{dtype:<26}{counts['passed']:>8}{counts['failed']:>8}{counts['declined']:>10}")
    for outcome in sorted(outcomes, key=lambda one: -one.seconds)[:3]:
        print(f"slow: {outcome.seconds:.1f} s {outcome.op}-{outcome.label}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warp", type=int, choices=(32, 64), default=32)
    parser.add_argument("--order", type=int, default=0, help="of threads and blocks: 0 forward, 1 reverse, more: seed of a random one")
    parser.add_argument("--op", action="append", default=[], help="only this op; may be repeated")
    parser.add_argument("-k", dest="label", default="", help="only cases with this in their label")
    parser.add_argument("--sample", type=int, default=0, help="only so many cases of each op and dtype")
    parser.add_argument("--asan", action="store_true", help="under AddressSanitizer and UndefinedBehaviorSanitizer")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="default: a fresh one, printed")
    parser.add_argument("--quiet", action="store_true", help="one line per op")
    parser.add_argument("--library", type=Path, help="an emulated library that is already built")
    options = parser.parse_args()
    path = options.library or build.library(options.warp, options.asan)
    if options.asan and "libasan" not in os.environ.get("LD_PRELOAD", ""):
        environment = {**os.environ, **build.sanitizer_environment()}
        return subprocess.run(
            [sys.executable, "-m", "tests.kernels.simt", *sys.argv[1:]], cwd=ROOT, env=environment, check=False
        ).returncode
    os.environ["GRISTMILL_SIMT_ORDER"] = str(options.order)
    print(f"warp={options.warp} order={options.order} asan={options.asan} seed={options.seed}", flush=True)
    torch.set_num_threads(1)
    open_emulation(path)
    cases = cases_of(options.op, options.label)
    if options.sample:
        cases = drawn(cases, options.sample, options.seed)
    begin = time.perf_counter()
    outcomes = [run_one(case, options.seed) for case in cases]
    report(outcomes, options.quiet)
    counts = Counter(outcome.status for outcome in outcomes)
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['declined']} declined in {time.perf_counter() - begin:.0f} s")
    return 0 if counts["passed"] and not counts["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
