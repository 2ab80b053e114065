"""The conformance suite on the GPU kernels (csrc/**/*.cu), run through a CPU emulation: see docs/simt.md.

python -m tests.kernels.simt [--op rms_norm ...] [--warp 32|64] [--order N] [--asan] [--seed N] [-k label]
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "python")) if path not in sys.path]

import torch  # noqa: E402

from tests.kernels.simt import build, suite  # noqa: E402

SLOW_SECONDS = 1.0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warp", type=int, default=32, choices=(32, 64))
    parser.add_argument("--order", type=int, action="append", help="0 forward, 1 reverse, N random; may be repeated (default: 0)")
    parser.add_argument("--op", action="append", default=[], help="only this op, and only its files are compiled; may be repeated")
    parser.add_argument("--asan", action="store_true", help="under AddressSanitizer and UndefinedBehaviorSanitizer")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="default: a fresh one, printed")
    parser.add_argument("-k", dest="label", default="", help="only cases whose label contains this")
    parser.add_argument("--drawn", type=int, default=0, help="only so many cases of every op and dtype, drawn by the seed")
    parser.add_argument("--library", type=Path, help="a library that is already built")
    parser.add_argument("--json", type=Path, help="where to write how many cases of each op passed")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first failure")
    return parser.parse_args()


def _again_with_sanitizers(library: Path) -> int:
    """A sanitizer's runtime must be in the process before anything else is."""
    environment = {**os.environ, **build.sanitizer_environment()}
    command = [sys.executable, "-m", "tests.kernels.simt", *sys.argv[1:], "--library", str(library)]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _cases(options: argparse.Namespace) -> list:
    from tests.kernels.conformance.test_conformance import CASES

    cases = [case for case in CASES if (not options.op or case.op in options.op) and options.label in case.label]
    return suite.drawn(cases, options.drawn, options.seed) if options.drawn else cases


def _run(options: argparse.Namespace, cases: list) -> list[suite.Outcome]:
    outcomes = []
    for order in options.order or [0]:
        suite.set_order(order)
        for case in cases:
            print(f"# order {order} {case.id}", file=sys.stderr, flush=True) if options.asan else None
            outcomes.append(suite.run_one(case, options.seed))
            if outcomes[-1].status == "failed":
                print(f"FAILED order {order} {case.id}\n    {outcomes[-1].detail.strip()[:1500]}", flush=True)
                if options.fail_fast:
                    return outcomes
    return outcomes


def _report(outcomes: list[suite.Outcome]) -> None:
    reasons = Counter((outcome.op, outcome.detail) for outcome in outcomes if outcome.status == "declined")
    for (op, reason), count in sorted(reasons.items()):
        print(f"declined {op} ({count} cases): {reason}")
    print(suite.table(outcomes))
    for outcome in sorted(outcomes, key=lambda one: -one.seconds)[:8]:
        if outcome.seconds > SLOW_SECONDS:
            print(f"slow: {outcome.seconds:.1f} s {outcome.op}-{outcome.label}")


def main() -> int:
    options = _options()
    reason = build.why_not()
    if reason is not None:
        print(reason)
        return 2
    if options.library is not None:
        return _run_on(options.library, options)
    library = build.build(options.warp, options.asan, options.op)
    try:
        return _again_with_sanitizers(library) if options.asan else _run_on(library, options)
    finally:
        if options.op:
            library.unlink(missing_ok=True)


def _run_on(library: Path, options: argparse.Namespace) -> int:
    faulthandler.enable()
    begin = time.perf_counter()
    torch.set_num_threads(1)
    suite.open_emulated(library)
    print(f"warp={options.warp} order={options.order or [0]} seed={options.seed} asan={options.asan}", flush=True)
    outcomes = _run(options, _cases(options))
    _report(outcomes)
    if options.json is not None:
        options.json.write_text(json.dumps(Counter(outcome.op for outcome in outcomes if outcome.status == "passed")))
    status = Counter(outcome.status for outcome in outcomes)
    print(f"{time.perf_counter() - begin:.0f} s, {status['failed']} failures")
    return 0 if status["passed"] and not status["failed"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except build.BuildError as error:
        print(error)
        sys.exit(3)
