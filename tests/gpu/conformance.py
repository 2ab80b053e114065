"""The whole conformance suite on a GPU, for one family: `python -m tests.gpu.conformance --family triton`.

Needs torch, numpy, pytest and (for that family) triton, and this source tree with `python/` on PYTHONPATH; nothing built. Cases are drawn
and judged on the CPU and run on the device. Prints a table of op and dtype, and writes every failure to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "python")) if path not in sys.path]
warnings.filterwarnings("ignore", message="gristmill_kernels computes in plain PyTorch")

import torch  # noqa: E402

from gristmill_kernels import dispatch  # noqa: E402


class Outcome(NamedTuple):
    op: str
    dtype: str
    label: str
    status: str  # passed, failed, declined
    detail: str
    seconds: float


def _cases(ops: list[str]) -> list[Any]:
    from tests.kernels.conformance.test_conformance import CASES

    return [case for case in CASES if not ops or case.op in ops]


def _dtype_of(key: tuple) -> str:
    names = [str(fact).removeprefix("torch.") for fact in key if isinstance(fact, torch.dtype)]
    return "->".join(dict.fromkeys(names)) or "int32"


def _run_one(case: Any, family: str, device: str, seed: int) -> Outcome:
    from tests.kernels.conformance.harness import key_on, run_case

    begin = time.perf_counter()
    dtype = _dtype_of(case.key)
    reason = dispatch.why_not(case.op, family, key_on(case, torch.device(device).type))
    if reason is not None:
        return Outcome(case.op, dtype, case.label, "declined", reason, 0.0)
    try:
        with dispatch.using(family):
            chosen = dispatch.select(case.op, key_on(case, torch.device(device).type))  # in strict mode, what strict mode gives
        run_case(case, chosen, seed, family, device)
        status, detail = "passed", ""
    except Exception as error:
        status, detail = "failed", f"{type(error).__name__}: {error}"
        if not isinstance(error, AssertionError):
            detail += "\n" + traceback.format_exc(limit=-4)
    return Outcome(case.op, dtype, case.label, status, detail, time.perf_counter() - begin)


def _work(part: int, parts: int, options: argparse.Namespace) -> list[Outcome]:
    torch.set_num_threads(1)
    cases = _cases(options.op)[part::parts]
    return [_run_one(case, options.family, options.device, options.seed) for case in cases]


def _table(outcomes: list[Outcome]) -> str:
    rows: dict[tuple[str, str], Counter] = defaultdict(Counter)
    for outcome in outcomes:
        rows[outcome.op, outcome.dtype][outcome.status] += 1
    lines = [f"{'op':<26}{'dtype':<26}{'passed':>8}{'failed':>8}{'declined':>10}"]
    for (op, dtype), counts in sorted(rows.items()):
        lines.append(f"{op:<26}{dtype:<26}{counts['passed']:>8}{counts['failed']:>8}{counts['declined']:>10}")
    total = Counter(outcome.status for outcome in outcomes)
    lines.append(f"{'all':<52}{total['passed']:>8}{total['failed']:>8}{total['declined']:>10}")
    return "\n".join(lines)


def _environment(options: argparse.Namespace) -> dict[str, Any]:
    found = {"torch": torch.__version__, "python": sys.version.split()[0], "family": options.family, "seed": options.seed}
    if torch.device(options.device).type == "cuda":
        found["device"] = torch.cuda.get_device_name()
    if options.family == "triton":
        import triton

        found["triton"] = triton.__version__
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="triton", choices=dispatch.FAMILIES)
    parser.add_argument("--device", default="cuda", help="torch device (default: cuda)")
    parser.add_argument("--op", action="append", default=[], help="only this op; may be repeated")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="default: a fresh one, printed")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)), help="processes (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu_conformance.json", help="default: %(default)s")
    options = parser.parse_args()
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("tests.gpu.conformance runs kernels on a GPU, and torch sees none (--device cpu tests the CPU)")
    environment, begin = _environment(options), time.perf_counter()
    print(" ".join(f"{name}={value}" for name, value in environment.items()), flush=True)
    if options.jobs == 1:
        outcomes = _work(0, 1, options)
    else:
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            parts = options.jobs * 4
            waiting = [pool.apply_async(_work, (part, parts, options)) for part in range(parts)]
            outcomes = [outcome for one in waiting for outcome in one.get()]
    failures = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failures[:30]:
        print(f"FAILED {outcome.op}-{outcome.label}\n    {outcome.detail.strip()[:1500]}")
    reasons = Counter((outcome.op, outcome.detail) for outcome in outcomes if outcome.status == "declined")
    for (op, reason), count in sorted(reasons.items()):
        print(f"declined {op} ({count} cases): {reason}")
    print(_table(outcomes), f"\n{time.perf_counter() - begin:.0f} s, {len(failures)} failures")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "environment": environment,
        "table": _table(outcomes).splitlines(),
        "failures": [one._asdict() for one in failures],
    }
    report["passed"] = Counter(outcome.op for outcome in outcomes if outcome.status == "passed")
    report["slowest"] = [one._asdict() for one in sorted(outcomes, key=lambda one: -one.seconds)[:10]]
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["passed"] and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
