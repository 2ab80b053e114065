"""What `_host` says about the CPU: it agrees with the kernel's own list, and asking needs no torch."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill_kernels import _host

CPUINFO_NAMES = {  # ours -> Linux's, where they differ
    "lzcnt": "abm",
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
}
LEVEL_NEEDS = {"avx2": ["avx2", "fma", "f16c"], "avx512": ["avx512f", "avx512vl"], "avx512bf16": ["avx512bf16"], "amx": ["amx_bf16"]}


def test_every_feature_that_linux_lists_is_found() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        pytest.skip("reads the flags line of an x86 Linux")
    flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")).split(":")[1].split()
    found = _host.cpu_features()
    for name, usable in found.items():
        if name.startswith("amx"):  # Linux lists tiles that it may still refuse to this process
            assert not usable or name in flags
        else:
            assert usable == (CPUINFO_NAMES.get(name, name) in flags), name


def test_levels_are_usable_and_nested() -> None:
    features, levels = _host.cpu_features(), _host.isa_levels()
    order = ["amx", "avx512bf16", "avx512", "avx2"]
    assert levels == order[len(order) - len(levels) :]
    for level in levels:
        assert all(features[name] for name in LEVEL_NEEDS[level])


def test_the_build_says_what_it_is() -> None:
    info = _host.build_info()
    assert {"version", "platform", "architecture", "compiler", "cpp_standard"} <= set(info)
    assert info["cpp_standard"] >= 202002


def test_host_is_importable_without_torch() -> None:
    code = "import sys; from gristmill_kernels import _host; _host.cpu_features(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
