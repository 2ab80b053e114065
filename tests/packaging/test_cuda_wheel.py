"""kernels-cuda: what is inside, how it behaves on a machine without a GPU, and beside kernels-cpu."""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test here waits for the wheel to be compiled

GPU_LIBRARY = "gristmill_kernels/_native/libgristmill_cuda.so"
DESCRIPTION = "gristmill_kernels/_native/libgristmill_cuda.json"

USE = """
import json, torch
import gristmill_kernels
from gristmill_kernels import _build_info, capabilities, dispatch, rms_norm
x, w = torch.randn(5, 64), torch.randn(64)
expected = (x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * w.double()).float()
error = (rms_norm(x, w) - expected).abs().max().item()
report = capabilities()
try:
    dispatch.select("rms_norm", ("cuda", torch.bfloat16))
    refusal = None
except dispatch.NoImplementationError as problem:
    refusal = str(problem)
print(json.dumps({"build": _build_info.DISTRIBUTION, "error": error, "native": report["native"], "gpu": report["native_gpu"],
                  "why": dispatch.why_not("rms_norm", "native", ("cuda", torch.bfloat16)), "refusal": refusal,
                  "implementation": report["ops"]["rms_norm"]["cpu"][0]["implementation"], "devices": report["devices"]}))
"""


@pytest.fixture
def checks(backend_path):
    from gristmill_build import wheel_checks

    return wheel_checks


@pytest.fixture
def installed_cuda(built_cuda, new_environment):
    """The CUDA wheel in an environment of its own."""
    assert new_environment.pip("install", built_cuda.wheel).returncode == 0
    return new_environment


def test_the_wheel_passes_every_check(built_cuda, checks) -> None:
    assert checks.check_wheel(built_cuda.wheel) == []
    assert checks.promised_glibc(built_cuda.wheel.name) <= (2, 34)


def test_the_wheel_holds_the_libraries_of_both_devices_and_the_triton_kernels(built_cuda, level: str) -> None:
    names = set(built_cuda.names())
    wanted = {f"gristmill_kernels/_native/libgristmill_cpu_{level}.so", GPU_LIBRARY, DESCRIPTION, "gristmill_kernels/triton/mla.py"}
    assert wanted <= names
    with zipfile.ZipFile(built_cuda.wheel) as archive:
        (name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
        described = json.loads(archive.read(DESCRIPTION))
    assert metadata["Name"] == "kernels-cuda"
    assert sorted(metadata.get_all("Requires-Dist")) == ["numpy>=1.26", "torch<3,>=2.10"]
    assert described["archs"] == ["sm_90a"]
    assert re.fullmatch(r"1[3-9]\.\d", described["cuda"])


def test_the_sdist_holds_the_gpu_sources(built_cuda) -> None:
    with tarfile.open(built_cuda.sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"csrc/common/gpu.h", "csrc/common/gpu_launch.cu", "csrc/norm/norm.cu", "packaging/cmake-modules/cuda_ops.cmake"} <= names


def test_without_a_gpu_it_computes_on_the_cpu_and_says_why(installed_cuda, level: str, tmp_path: Path) -> None:
    """Strict, and with warnings as errors: the CPU part is whole, and nobody asked for a GPU."""
    done = installed_cuda.run("-W", "error", "-c", USE, cwd=tmp_path, GRISTMILL_KERNELS_STRICT="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert (report["build"], report["implementation"], report["native"]["isa"]) == ("kernels-cuda", "native", level)
    assert report["error"] < 1e-5
    assert report["devices"] == ["cpu"]
    assert report["gpu"]["archs"] == ["sm_90a"]
    assert re.fullmatch(r"torch \S+ is built without CUDA|no NVIDIA (GPU is visible|driver is installed).*", report["gpu"]["reason"])
    assert report["why"] == report["gpu"]["reason"]
    assert report["gpu"]["reason"] in report["refusal"]
    table = installed_cuda.run("-m", "gristmill_kernels", cwd=tmp_path)
    assert table.returncode == 0
    assert f"GPU library       none: {report['gpu']['reason']}" in table.stdout


def tampered(wheel: Path, target: Path, change: dict[str, bytes | None]) -> Path:
    """A copy of the wheel with files replaced, or left out."""
    copy = target / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(copy, "w") as archive:
        for name in source.namelist():
            if name not in change:
                archive.writestr(name, source.read(name))
        for name, data in change.items():
            if data is not None:
                archive.writestr(name, data)
    return copy


def test_the_checks_notice_other_code_than_promised(built_cuda, checks, tmp_path: Path) -> None:
    promise = json.dumps({"archs": ["sm_80", "sm_90a"], "cuda": "13.0"}).encode()
    faults = checks.check_wheel(tampered(built_cuda.wheel, tmp_path, {DESCRIPTION: promise}))
    assert faults == [f"{GPU_LIBRARY}: no source file was compiled for sm_80, sm_90a, as libgristmill_cuda.json promises"]


def test_the_checks_notice_a_missing_library(built_cuda, checks, tmp_path: Path) -> None:
    assert checks.check_wheel(tampered(built_cuda.wheel, tmp_path, {GPU_LIBRARY: None})) == [f"{GPU_LIBRARY}: is missing"]


def test_the_checks_notice_gpu_code_in_the_cpu_wheel(built, built_cuda, checks, tmp_path: Path) -> None:
    with zipfile.ZipFile(built_cuda.wheel) as archive:
        library = archive.read(GPU_LIBRARY)
    faults = checks.check_wheel(tampered(built.wheel, tmp_path, {GPU_LIBRARY: library}))
    assert faults == [f"{GPU_LIBRARY}: does not belong into a wheel"]


def test_the_checks_notice_a_library_that_needs_the_cuda_runtime(built_cuda, checks, tmp_path: Path) -> None:
    for library in ("libcudart.so.13", "libc10_cuda.so", "libcuda.so.1"):
        (tmp_path / "stub.c").write_text("int gristmill_stub;")
        (tmp_path / "x.c").write_text('extern int gristmill_stub; __attribute__((visibility("hidden"))) int* f = &gristmill_stub;')
        for command in (
            ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", "stub.so", "stub.c"],
            ["cc", "-shared", "-fPIC", "-o", "x.so", "x.c", "stub.so"],
        ):
            subprocess.run(command, cwd=tmp_path, check=True)
        faults = checks.check_wheel(tampered(built_cuda.wheel, tmp_path, {GPU_LIBRARY: (tmp_path / "x.so").read_bytes()}))
        assert f"{GPU_LIBRARY}: needs {library}" in faults
        assert any(fault.startswith(f"{GPU_LIBRARY}: uses what is not in the stable ABI") and "gristmill_stub" in fault for fault in faults)


def test_the_checks_notice_a_wheel_that_is_too_large(built_cuda, checks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_BYTES", 1000)
    assert any("has to stay below" in fault for fault in checks.check_wheel(built_cuda.wheel))


def test_an_unknown_gpu_generation_is_refused_by_cmake(built_cuda, run, root: Path, tmp_path: Path) -> None:
    cmake = Path(sys.executable).parent / "cmake"
    done = run(
        cmake, "-S", root, "-B", tmp_path, "-G", "Ninja", "-DGRISTMILL_PLATFORM=cuda", "-DGRISTMILL_ISAS=none",
        "-DGRISTMILL_CUDA_ARCHS=90a,999", f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={cmake.parent / 'ninja'}",
    )  # fmt: skip
    assert done.returncode != 0
    assert "GRISTMILL_CUDA_ARCHS: '999' is not a GPU generation of this build; choose from 80, 86" in " ".join(done.stderr.split())


# Two variants own the same files, so one of them must say so; the runtime lives beside either.


def recorded(wheel: Path) -> set[str]:
    """Files that a wheel installs, by its RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        return {line.split(",")[0] for line in archive.read(name).decode().splitlines()}


def test_wheels_that_live_together_share_no_file(built, built_cuda, run: Callable, root: Path, tmp_path: Path) -> None:
    command = ["-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", tmp_path, root / "runtime"]
    assert run(sys.executable, *command, cwd=tmp_path).returncode == 0
    (runtime,) = tmp_path.glob("gristmill-*.whl")
    for kernels in (built, built_cuda):
        assert not recorded(runtime) & recorded(kernels.wheel)
    assert "gristmill_kernels/__init__.py" in recorded(built.wheel) & recorded(built_cuda.wheel)


@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_variants_refuse_each_other_in_either_order(built, built_cuda, new_environment, tmp_path: Path, first: str) -> None:
    wheels = [built.wheel, built_cuda.wheel]
    for wheel in wheels if first == "cpu" else reversed(wheels):
        assert new_environment.pip("install", "--no-deps", wheel).returncode == 0
    done = new_environment.run("-c", "import gristmill_kernels", cwd=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0
    assert last.startswith("ImportError: kernels-cpu ") and "kernels-cuda" in last and "pip uninstall -y kernels-cpu kernels-cuda" in last
    # The advice works, although uninstalling the first one removes the files of both.
    assert new_environment.pip("uninstall", "-y", "kernels-cpu", "kernels-cuda").returncode == 0
    assert new_environment.pip("install", "--no-deps", built_cuda.wheel).returncode == 0
    assert new_environment.run("-c", "import gristmill_kernels.rope", cwd=tmp_path).returncode == 0
