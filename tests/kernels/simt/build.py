"""Builds the emulation's libraries (csrc/simt/CMakeLists.txt) into build/simt, recompiling only what changed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "simt"
COMPILER = os.environ.get("CXX", "g++")
JOBS = 2


class BuildError(RuntimeError):
    """A kernel did not compile or link."""


def _tool(name: str) -> str | None:
    """Tools that requirements/build.txt installs lie beside the interpreter."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def why_not() -> str | None:
    """None if this machine can build and run the emulation, else the reason it cannot."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return "the emulation switches stacks on x86-64 Linux only"
    for tool in (COMPILER, "cmake", "ninja"):
        if _tool(tool) is None:
            return f"{tool} is not installed"
    return None


def suffix_of(warp: int, asan: bool) -> str:
    return f"w{warp}_asan" if asan else f"w{warp}"


def _instruction_set() -> str:
    flags = Path("/proc/cpuinfo").read_text().split()
    return "-march=x86-64-v3" if {"avx2", "fma", "f16c", "bmi2", "movbe"} <= set(flags) else ""


@contextlib.contextmanager
def _alone(build: Path) -> Iterator[None]:
    """One build in a directory at a time, whoever starts it."""
    build.mkdir(parents=True, exist_ok=True)
    with (build / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        text = done.stdout + done.stderr
        errors = [line for line in text.splitlines() if "error" in line.lower()]
        raise BuildError("\n".join([f"{' '.join(command[:6])} ... failed", text[-6000:], *errors[:20]]))


def _configure(csrc: Path, build: Path) -> None:
    selftest = Path(__file__).parent / "kernels.cu" if csrc == CSRC else ""
    command = [str(_tool("cmake")), "-S", str(csrc / "simt"), "-B", str(build), "-G", "Ninja", f"-DCMAKE_CXX_COMPILER={_tool(COMPILER)}"]
    command += [f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", f"-DGRISTMILL_SIMT_TORCH={Path(torch.__file__).parent}"]
    command += [f"-DGRISTMILL_SIMT_ARCH={_instruction_set()}", f"-DGRISTMILL_SIMT_SELFTEST={selftest}"]
    stamp = build / "configured"
    if stamp.is_file() and stamp.read_text() == " ".join(command):
        return
    _run([*command, "--fresh"] if stamp.is_file() else command)
    stamp.write_text(" ".join(command))


def kernel_files(csrc: Path = CSRC) -> list[Path]:
    return sorted(csrc.glob("*/*.cu"))


def ops_of(file: Path) -> list[str]:
    """The ops that a .cu file registers."""
    return re.findall(r'm\.impl\(\s*"(\w+)"', file.read_text())


def files_of(ops: Iterable[str], csrc: Path = CSRC) -> list[Path]:
    """The files that register these ops, and what lies beside them without registering any."""
    wanted, files = set(ops), kernel_files(csrc)
    chosen = [file for file in files if wanted & set(ops_of(file))]
    folders = {file.parent for file in chosen}
    return chosen + [file for file in files if file.parent in folders and not ops_of(file)]


def _object_target(file: Path, suffix: str) -> str:
    return f"simt_{suffix}_{file.parent.name}_{file.stem}"


def build(warp: int, asan: bool = False, ops: Iterable[str] = (), csrc: Path = CSRC, build: Path = BUILD) -> Path:
    """The library with every kernel, or with those of `ops` only (a file that does not compile then hinders nobody else).

    Raises BuildError with the compiler's words.
    """
    suffix = suffix_of(warp, asan)
    ninja = [str(_tool("ninja")), "-C", str(build), f"-j{JOBS}"]
    with _alone(build):
        _configure(csrc, build)
        if not ops:
            _run([*ninja, f"gristmill_simt_{suffix}"])
            return build / f"libgristmill_simt_{suffix}.so"
        targets = [f"simt_{suffix}_emulator", *(_object_target(file, suffix) for file in files_of(ops, csrc))]
        _run([*ninja, *targets])
        return _link(build, suffix, targets, asan)


def build_selftest(warp: int, asan: bool = False) -> Path:
    """The library of kernels.cu, which tests the emulation itself."""
    suffix = suffix_of(warp, asan)
    with _alone(BUILD):
        _configure(CSRC, BUILD)
        _run([str(_tool("ninja")), "-C", str(BUILD), f"-j{JOBS}", f"simt_selftest_{suffix}"])
    return BUILD / f"libsimt_selftest_{suffix}.so"


def _link(build: Path, suffix: str, targets: list[str], asan: bool) -> Path:
    objects = [str(path) for target in targets for path in (build / "CMakeFiles" / f"{target}.dir").rglob("*.o")]
    library = build / f"libgristmill_simt_{suffix}_{os.getpid()}.so"
    sanitizers = ["-fsanitize=address,undefined"] if asan else []
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    _run([str(_tool(COMPILER)), "-shared", *sanitizers, *objects, str(torch_library), "-o", str(library)])
    return library


def sanitizer_environment() -> dict[str, str]:
    """What a process needs to open a sanitized library."""
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    find = [subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True) for name in names]
    return {
        "LD_PRELOAD": ":".join(one.stdout.strip() for one in find),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter itself leaks at exit
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
