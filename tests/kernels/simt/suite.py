"""The conformance cases on an emulated library, which takes the place of the CPU library as family `native` of this process."""

from __future__ import annotations

import functools
import os
import random
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gristmill_kernels import dispatch, loader, native_cuda
from gristmill_kernels.schema import OPS
from tests.kernels.conformance.harness import Case, run_case


class Outcome(NamedTuple):
    op: str
    dtype: str
    label: str
    status: str  # passed, failed, declined
    detail: str
    seconds: float


def hide_cpu_library() -> None:
    """Listing the cases asks every family what it takes, which would open the CPU library, and its ops would stay in this process."""
    state = loader.NativeLibrary(None, None, "the emulation takes its place", requested=True)
    loader.native_library = functools.cache(lambda: state)


def open_emulated(library: Path) -> None:
    """From now on `native` on the CPU is this library; the ops that it lacks are declined."""
    hide_cpu_library()
    torch.ops.load_library(str(library))
    state = loader.NativeLibrary("simt", library, None)
    loader.native_library = functools.cache(lambda: state)
    dispatch.families_of("rms_norm")  # the built-in families register before they are replaced
    for name in OPS:
        dispatch.implement(name, "native", _supports(name), devices=("cpu",))


def _supports(name: str) -> Callable[[Any], str | None]:
    predicate = native_cuda.PREDICATES.get(name)
    there = torch._C._dispatch_has_kernel_for_dispatch_key(f"{dispatch.NAMESPACE}_native::{name}", "CPU")

    def supports(key: Any) -> str | None:
        if not there:
            return "not in this library"
        if predicate is None:
            return "native_cuda.py has no predicate for it"
        return predicate(key)

    return supports


def drawn(cases: list[Case], per_group: int, seed: int) -> list[Case]:
    """Some cases of every op and dtype."""
    groups: dict[tuple, list[Case]] = {}
    for case in cases:
        groups.setdefault((case.op, *case.key[1:2]), []).append(case)
    source = random.Random(seed)
    return [case for group in groups.values() for case in source.sample(group, min(per_group, len(group)))]


def _dtype_of(key: tuple) -> str:
    names = [str(fact).removeprefix("torch.") for fact in key if isinstance(fact, torch.dtype)]
    return "->".join(dict.fromkeys(names)) or "int32"


def run_one(case: Case, seed: int) -> Outcome:
    begin = time.perf_counter()
    dtype = _dtype_of(case.key)
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


def table(outcomes: list[Outcome]) -> str:
    rows: dict[tuple[str, str], Counter] = defaultdict(Counter)
    for outcome in outcomes:
        rows[outcome.op, outcome.dtype][outcome.status] += 1
    lines = [f"{'op':<26}{'dtype':<26}{'passed':>8}{'failed':>8}{'declined':>10}"]
    for (op, dtype), counts in sorted(rows.items()):
        lines.append(f"{op:<26}{dtype:<26}{counts['passed']:>8}{counts['failed']:>8}{counts['declined']:>10}")
    total = Counter(outcome.status for outcome in outcomes)
    lines.append(f"{'all':<52}{total['passed']:>8}{total['failed']:>8}{total['declined']:>10}")
    return "\n".join(lines)


def set_order(order: int) -> None:
    """Read by the emulation at every launch."""
    os.environ["GRISTMILL_SIMT_ORDER"] = str(order)
