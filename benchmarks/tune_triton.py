"""Time the block sizes of the Triton kernels on the GPU that is here and write the best into the family's tuned.json.

    python benchmarks/tune_triton.py --kernels attention            # a few minutes; prints every time and keeps the best
    python benchmarks/tune_triton.py --kernels attention --dry-run  # prints only

Every candidate is compiled in parallel first, checked once against a float32 computation or the first candidate, and timed with CUDA events
over a flushed L2. A configuration wins by the geometric mean over its problems. A suite is a module `benchmarks/tuning/NAME.py` with
`tables() -> list[Table]`.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "python")) if path not in sys.path]

import torch  # noqa: E402

from benchmarks.tuning import Candidate, Table, Timer  # noqa: E402


def _compile(job: tuple[str, str, int, int, str]) -> str:
    """In a worker process: put one candidate's binaries into Triton's cache. Returns what went wrong, if anything."""
    suite, table, candidate, capability, arch = job
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", capability, 32)
    try:
        for source, options in _table(suite, table).candidates[candidate].sources():
            triton.compile(source, target=target, options=options.as_dict())
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def _table(suite: str, name: str) -> Table:
    return next(table for table in import_module(f"benchmarks.tuning.{suite}").tables() if f"{table.name} {table.size}" == name)


def tune(table: Table, usable: list[Candidate], timer: Timer, deadline: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The winner's entry, and a record of every candidate."""
    records: list[dict[str, Any]] = [{"entry": candidate.entry, "times_us": {}, "problem": ""} for candidate in usable]
    for problem in table.problems():
        expected = None
        for candidate, record in zip(usable, records):
            if record["problem"]:
                continue
            if time.monotonic() > deadline:
                record["problem"] = "out of time"
                continue
            try:
                result = problem.run(candidate)
                torch.cuda.synchronize()
                expected = result if expected is None else expected
                error = (result.float() - expected.float()).norm() / expected.float().norm()
                if not error < 1e-2:
                    record["problem"] = f"wrong: relative error {error:.3g}"
                    continue
                record["times_us"][problem.name] = timer.median_us(partial(problem.run, candidate))
            except Exception as error:
                record["problem"] = f"{type(error).__name__}: {error}"[:200]
        for record in sorted(records, key=lambda record: record["times_us"].get(problem.name, math.inf)):
            if problem.name in record["times_us"]:
                us = record["times_us"][problem.name]
                print(f"  {table.name} {problem.name}: {us:9.1f} us  {problem.rate(us):>14}  {record['entry']}", flush=True)
        problem.release()
    for record in records:
        if record["problem"]:
            print(f"  {table.name} skipped {record['entry']}: {record['problem']}", flush=True)
    finished = [record for record in records if not record["problem"] and record["times_us"]]
    if not finished:
        return {}, records
    return min(finished, key=lambda record: statistics.fmean(map(math.log, record["times_us"].values())))["entry"], records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="attention", help="suites of benchmarks/tuning, separated by commas")
    parser.add_argument("--tables", default="", help="only these tables, separated by commas")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--seconds", type=float, default=170, help="time for measuring; what is left then is skipped")
    parser.add_argument("--out", type=Path, help="also write winners and all times here, as JSON")
    args = parser.parse_args()
    from gristmill_kernels.triton import launch, tables

    arch = launch.facts(torch.device("cuda")).arch
    major, minor = torch.cuda.get_device_capability()
    wanted = set(filter(None, args.tables.split(",")))
    chosen = [(suite, table) for suite in args.kernels.split(",") for table in import_module(f"benchmarks.tuning.{suite}").tables()]
    chosen = [(suite, table) for suite, table in chosen if not wanted or table.name in wanted]
    target = (10 * major + minor, arch)
    jobs = [(suite, f"{table.name} {table.size}", number, *target) for suite, table in chosen for number in range(len(table.candidates))]
    begin = time.monotonic()
    workers = min(len(jobs), os.cpu_count() or 2)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        problems = dict(zip(jobs, pool.map(_compile, jobs)))
    print(f"compiled {len(jobs)} candidates in {time.monotonic() - begin:.0f} s with {workers} processes", flush=True)
    for job, problem in problems.items():
        if problem:
            print(f"  {job[1]} candidate {job[2]} does not compile: {problem}", flush=True)
    timer, deadline = Timer(), time.monotonic() + args.seconds
    tuned = json.loads(tables.TUNED_FILE.read_text()) if tables.TUNED_FILE.is_file() else {}
    everything: dict[str, Any] = {"arch": arch, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "tables": {}}
    for suite, table in chosen:
        usable = [
            candidate
            for number, candidate in enumerate(table.candidates)
            if not problems[(suite, f"{table.name} {table.size}", number, *target)]
        ]
        best, records = tune(table, usable, timer, deadline)
        everything["tables"][f"{table.name} {table.size}"] = {"best": best, "tried": records}
        if best:
            print(f"{table.name} {table.size}: {best}", flush=True)
            tuned.setdefault(arch, {}).setdefault(table.name, {})[str(table.size)] = best
    if not args.dry_run:
        tables.TUNED_FILE.write_text(json.dumps(tuned, indent=1, sort_keys=True) + "\n")
        print(f"wrote {tables.TUNED_FILE}")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "tuned.json").write_text(json.dumps(tuned, indent=1, sort_keys=True) + "\n")
        (args.out / "tuning.json").write_text(json.dumps(everything, indent=1) + "\n")
    print(f"{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
