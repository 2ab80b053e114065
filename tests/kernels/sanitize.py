"""Builds one native library with AddressSanitizer and UndefinedBehaviorSanitizer and runs the core checks on it (GCC on Linux; minutes).

python -m tests.kernels.sanitize [avx2|avx512|avx512bf16|amx|generic|host] [--seed 0] [--cases 2]

`host` is the torch-free module; its checks are the tests of the radix tree.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).parent
AVX512 = ["-march=x86-64-v4", "-mprefer-vector-width=512"]
LEVEL_FLAGS = {
    "generic": [],
    "avx2": ["-march=x86-64-v3"],
    "avx512": AVX512,
    "avx512bf16": [*AVX512, "-mavx512bf16", "-mavx512vnni"],
    "amx": [*AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"],
}
NUMERIC_FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
COMMON_FLAGS = ["-std=c++20", "-O1", "-g1", "-fPIC", "-fno-omit-frame-pointer", *NUMERIC_FLAGS]
SANITIZERS = "-fsanitize=address,undefined"


def build(level: str, compiler: str) -> Path:
    directory = ROOT / "build" / "sanitize" / level
    directory.mkdir(parents=True, exist_ok=True)
    sources = [ROOT / "csrc/torch_cpu.cpp", *sorted((ROOT / "csrc").glob("*/*_cpu.cpp"))]
    defines = [f"-DGRISTMILL_ISA_{level.upper()}", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    includes = ["-I", str(ROOT / "csrc"), "-isystem", str(TORCH / "include")]

    def compile_one(source: Path) -> str:
        target = directory / f"{source.parent.name}_{source.stem}.o"
        subprocess.run(
            [compiler, *COMMON_FLAGS, SANITIZERS, *LEVEL_FLAGS[level], *defines, *includes, "-c", str(source), "-o", str(target)],
            check=True,
        )
        return str(target)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, sources))
    library = directory / f"libgristmill_cpu_{level}.so"
    subprocess.run([compiler, "-shared", SANITIZERS, *objects, "-L", str(TORCH / "lib"), "-ltorch_cpu", "-o", str(library)], check=True)
    return directory


def build_host(compiler: str) -> Path:
    directory = ROOT / "build" / "sanitize" / "host"
    directory.mkdir(parents=True, exist_ok=True)
    includes = subprocess.run([sys.executable, "-m", "pybind11", "--includes"], capture_output=True, text=True, check=True).stdout.split()
    library = directory / f"_host{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = [str(source) for source in sorted((ROOT / "csrc/host").glob("*.cpp"))]
    flags = [*COMMON_FLAGS, "-fvisibility=hidden", "-D_GLIBCXX_ASSERTIONS", SANITIZERS, *includes]
    subprocess.run([compiler, *flags, "-shared", *sources, "-o", str(library)], check=True)
    return library


# Puts the sanitized module where every later import finds it.
RUN_HOST = """
import importlib.util, pytest, sys
spec = importlib.util.spec_from_file_location("gristmill_kernels._host", sys.argv[1])
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", nargs="?", default="avx2", choices=[*LEVEL_FLAGS, "host"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2, help="conformance cases of each op and dtype (default: %(default)s)")
    parser.add_argument("--compiler", default="g++")
    arguments = parser.parse_args()
    if arguments.level == "host":
        tests = map(str, sorted((ROOT / "tests/kernels/host").glob("test_radix_tree*.py")))
        command = [sys.executable, "-c", RUN_HOST, str(build_host(arguments.compiler)), *tests]
    else:
        libraries = build(arguments.level, arguments.compiler)
        command = [sys.executable, "-m", "tests.kernels.native_core", str(arguments.seed), str(libraries), str(arguments.cases)]
    runtimes = [
        subprocess.run([arguments.compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter itself leaks at exit
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    if arguments.level != "host":
        environment["GRISTMILL_KERNELS_ISA"] = arguments.level
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
