"""Deletes each barrier and each wait of the GPU kernels in turn and sees whether the conformance suite notices.

python -m tests.kernels.simt.mutate [norm/norm.cu ...] [--sample N] [--seed N] [--list]

A mutant is one sync_block(), sync_warp() or copy_async_wait<N>() less, in a copy of csrc under build/. It is killed when a case fails, in
any of several thread orders at either warp width. Those that survive for a reason are listed with it in survivors.txt; the exit status says
whether every other one was killed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "python")) if path not in sys.path]

import torch  # noqa: E402

from tests.kernels.simt import build, suite  # noqa: E402

WORK = build.BUILD / "mutation"
COPY = WORK / "csrc"
SURVIVORS = Path(__file__).parent / "survivors.txt"
ORDERS = (0, 1, 2, 3, 4, 5)
SITE = re.compile(r"\b(?:sync_block|sync_warp)\(\)|\bcopy_async_wait<[^<>]*>\(\)")
# Definitions begin at the left margin, those of members two columns further in, where only they are followed by a block without being a
# statement; one whose launch bounds fill the line has its name on the next.
FUNCTION = re.compile(r"^(?!namespace|using|template|struct|class|GRISTMILL)[A-Za-z_].*?\b(?!__launch_bounds__|requires)(\w+)\(")
MEMBER = re.compile(r"^  (?!for|if|while|switch|do|return|static_assert|template|struct|class)[A-Za-z_][^=]*?\b(\w+)\(.*\{$")
ONLY_BOUNDS = re.compile(r"^[A-Za-z_].*__launch_bounds__\([^()]*\)\s*$")
NAME_BELOW = re.compile(r"^\s+(\w+)\(")
TIMEOUT_S = 120
HAS_PASSED, HAS_FAILED, RAN_NOTHING = 0, 1, 2


class Mutant(NamedTuple):
    file: str  # below csrc
    function: str
    number: int  # among the sites of the function, from 1
    begin: int
    end: int
    line: int
    text: str

    @property
    def name(self) -> str:
        """Stays the same while other functions change."""
        return f"{self.file} {self.function} {self.number}"


def mutants_of(file: str, csrc: Path = build.CSRC) -> list[Mutant]:
    text, position, function, previous = (csrc / file).read_text(), 0, "?", ""
    found: list[Mutant] = []
    for line_number, line in enumerate(text.splitlines(keepends=True), 1):
        start = NAME_BELOW.match(line) if ONLY_BOUNDS.match(previous) else FUNCTION.match(line) or MEMBER.match(line)
        if start is not None:
            function = start[1]
        for site in SITE.finditer(line.split("//")[0]):
            number = 1 + sum(one.function == function for one in found)
            found.append(Mutant(file, function, number, position + site.start(), position + site.end(), line_number, site[0]))
        position, previous = position + len(line), line
    return found


def mutable_files() -> list[str]:
    """Kernel files and the headers that they share; common/gpu.h only defines what is deleted."""
    files = [file for pattern in ("*/*.cu", "*/*.h", "*/*.cuh") for file in build.CSRC.glob(pattern)]
    names = sorted(str(file.relative_to(build.CSRC)) for file in files)
    return [name for name in names if not name.startswith(("simt/", "host/")) and name != "common/gpu.h" and mutants_of(name)]


def includes_of(file: Path) -> set[Path]:
    """The file and what it includes of csrc, directly or not."""
    seen, waiting = set(), [file]
    while waiting:
        one = waiting.pop()
        if one not in seen and one.is_file():
            seen.add(one)
            waiting += [build.CSRC / name for name in re.findall(r'#include "([^"]+)"', one.read_text())]
    return seen


def ops_that_use(file: str) -> list[str]:
    return [op for kernel in build.kernel_files() if build.CSRC / file in includes_of(kernel) for op in build.ops_of(kernel)]


def _write(path: Path, text: str) -> None:
    """Only a change touches the file, and always makes it new to ninja."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def copy_sources() -> None:
    wanted = {path.relative_to(build.CSRC): path for path in build.CSRC.rglob("*") if path.is_file()}
    for relative, path in wanted.items():
        _write(COPY / relative, path.read_text())
    for path in [path for path in COPY.rglob("*") if path.is_file() and path.relative_to(COPY) not in wanted]:
        path.unlink()


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    path = COPY / mutant.file
    original = path.read_text()
    _write(path, f"{original[: mutant.begin]}static_cast<void>(0){original[mutant.end :]}")
    try:
        yield
    finally:
        _write(path, original)


def _suite_fails(library: Path, ops: list[str], orders: tuple[int, ...], seed: int) -> int:
    from tests.kernels.conformance.test_conformance import CASES

    suite.open_emulated(library)
    status = RAN_NOTHING
    for order in orders:
        suite.set_order(order)
        for case in (case for case in CASES if case.op in ops):
            outcome = suite.run_one(case, seed)
            if outcome.status == "failed":
                print(f"    order {order} {case.id}: {outcome.detail.splitlines()[0][:150]}", flush=True)
                return HAS_FAILED
            status = HAS_PASSED if outcome.status == "passed" else status
    return status


def in_child(library: Path, ops: list[str], orders: tuple[int, ...], seed: int) -> str:
    """What becomes of the suite in a process of its own, since a mutant may crash it or never end: passed, or how it failed."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os._exit(_suite_fails(library, ops, orders, seed))
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return {HAS_PASSED: "passed", HAS_FAILED: "failed", RAN_NOTHING: "ran nothing"}.get(code, f"ended with {code}")
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "timed out"
        time.sleep(0.02)


def run_file(ops: list[str], warp: int, orders: tuple[int, ...], seed: int) -> str:
    try:
        library = build.build(warp, ops=ops, csrc=COPY, build=WORK / "build")
    except build.BuildError as error:
        return f"does not compile: {str(error)[-1500:]}"
    try:
        return in_child(library, ops, orders, seed)
    finally:
        library.unlink()


def is_killed(mutant: Mutant, seed: int) -> bool:
    ops = ops_that_use(mutant.file)
    with mutated(mutant):
        for warp in (32, 64):
            outcome = run_file(ops, warp, ORDERS, seed)
            if outcome.startswith("does not compile"):
                raise build.BuildError(f"{mutant.name}: {outcome}")
            if outcome not in ("passed", "ran nothing"):
                if outcome != "failed":
                    print(f"    warp {warp}: {outcome}", flush=True)
                return True
    return False


def explained() -> dict[str, str]:
    """Survivors by name, with the reason: `file function number: reason` on each line."""
    lines = [line for line in SURVIVORS.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return {name.strip(): reason.strip() for name, _, reason in (line.partition(":") for line in lines)}


def prepare() -> None:
    """What every mutant needs: the copied sources, and torch and the cases in the memory that its process inherits."""
    suite.hide_cpu_library()
    import tests.kernels.conformance.test_conformance  # noqa: F401

    torch.set_num_threads(1)
    copy_sources()


def _check_originals(files: list[str], seed: int) -> None:
    for file in files:
        outcome = run_file(ops_that_use(file), 32, (0,), seed)
        if outcome != "passed":
            raise SystemExit(f"{file} fails without any mutation: {outcome}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="*", help="files below csrc (default: all that have barriers)")
    parser.add_argument("--sample", type=int, default=0, help="only so many mutants, drawn by the seed")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="default: a fresh one, printed")
    parser.add_argument("--list", action="store_true", help="only list the mutants")
    return parser.parse_args()


def main() -> int:
    options = _options()
    files = options.file or mutable_files()
    mutants = [mutant for file in files for mutant in mutants_of(file)]
    if options.sample:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    if options.list:
        print("\n".join(f"{mutant.name} (line {mutant.line}: {mutant.text})" for mutant in mutants))
        return 0
    print(f"seed={options.seed} {len(mutants)} mutants of {len(files)} files", flush=True)
    prepare()
    _check_originals(sorted({mutant.file for mutant in mutants}), options.seed)
    reasons, survived, begin = explained(), [], time.perf_counter()
    for mutant in mutants:
        killed = is_killed(mutant, options.seed)
        print(f"{'killed' if killed else 'SURVIVED'} {mutant.name} (line {mutant.line}: {mutant.text})", flush=True)
        if killed and mutant.name in reasons:
            print(f"    though survivors.txt says: {reasons[mutant.name]}")
        if not killed:
            survived.append(mutant)
    unexplained = [mutant for mutant in survived if mutant.name not in reasons]
    seconds = time.perf_counter() - begin
    print(f"{seconds:.0f} s: {len(mutants) - len(survived)} killed, {len(survived)} survived, {len(unexplained)} of them unexplained")
    for mutant in survived:
        print(f"  {mutant.name}: {reasons.get(mutant.name, 'UNEXPLAINED')}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    if not shutil.which(build.COMPILER):
        raise SystemExit(f"{build.COMPILER} is not installed")
    sys.exit(main())
