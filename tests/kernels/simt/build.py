"""Builds the emulation's libraries (csrc/simt/CMakeLists.txt) under build/simt: GCC or Clang on x86-64 Linux, only what has changed."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build" / "simt"


def why_not() -> str | None:
    """Why this machine cannot build the emulation; None if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the SIMT emulation switches stacks, which it knows how to do on x86-64 Linux only"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "there is no C++ compiler"
    return next((f"{name} is missing" for name in ("cmake", "ninja") if not Path(_tool(name)).is_file()), None)


def library(warp: int, sanitized: bool = False, sources: Path = ROOT / "csrc", directory: Path = BUILD) -> Path:
    """The library for warps of 32 or 64 threads, built from the .cu files below `sources`.

    Raises subprocess.CalledProcessError with the compiler's words on stderr when a file does not compile.
    """
    target = f"gristmill_simt_w{warp}" + ("_asan" if sanitized else "")
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes of a test run may want the same library
        configure = [
            _tool("cmake"),
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
            "-S",
            str(sources / "simt"),
            "-B",
            str(directory),
        ]
        _run([*configure, f"-DGRISTMILL_SIMT_TORCH={Path(torch.__file__).parent}"])
        _run([_tool("ninja"), "-C", str(directory), "-j", str(len(os.sched_getaffinity(0))), target])
    return directory / f"lib{target}.so"


def sanitizer_environment() -> dict[str, str]:
    """What a process needs that opens a sanitized library."""
    compiler = os.environ.get("CXX", "g++")
    runtimes = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    return {
        "LD_PRELOAD": ":".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter itself leaks at exit
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }


def _tool(name: str) -> str:
    """Of this environment; a system's cmake may be too old."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else shutil.which(name) or name


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        print(done.stdout[-6000:], file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command)
