"""Finding and opening the GPU library: every machine on which it is of no use gets one sentence and the next family."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gristmill_kernels import dispatch, loader_gpu, native_cuda
from gristmill_kernels.loader_gpu import GpuFacts, GpuLibrary, image_for, why_unusable

WHEEL = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "compute_100")
LIBRARY = GpuLibrary(Path("libgristmill_cuda.so"), WHEEL, (13, 0))
H200 = GpuFacts("2.11.0+cu130", "13.0", None, (13, 0), 0, (("NVIDIA H200", "sm_90"),))


@pytest.fixture(autouse=True)
def visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("arch", "image"),
    [
        ("sm_80", "sm_80"),
        ("sm_86", "sm_86"),
        ("sm_87", "sm_86"),  # the same major version, a later minor one
        ("sm_89", "sm_89"),
        ("sm_90", "sm_90a"),
        ("sm_100", "sm_100"),
        ("sm_103", "sm_100"),
        ("sm_120", "compute_100"),  # compiled by its driver
        ("sm_999", "compute_100"),
        ("sm_75", None),
        ("sm_70", None),
        ("sm_", None),
        ("banana", None),
        ("gfx1151", None),
        ("gfx9999", None),
    ],
)
def test_which_code_runs_on_a_device(arch: str, image: str | None) -> None:
    assert image_for(arch, WHEEL) == image


def test_hopper_code_runs_on_hopper_alone() -> None:
    assert image_for("sm_90", ("sm_90a",)) == "sm_90a"
    for other in ("sm_80", "sm_91", "sm_100", "sm_999"):
        assert image_for(other, ("sm_90a",)) is None, other
    assert image_for("sm_100", ("compute_90a",)) is None


def test_code_for_a_family_of_devices_needs_the_same_major_version() -> None:
    assert image_for("sm_103", ("sm_100f",)) == "sm_100f"
    assert image_for("sm_120", ("compute_100f",)) is None


def test_amd_names_must_be_equal() -> None:
    assert image_for("gfx942:sramecc+:xnack-", ("gfx90a", "gfx942")) == "gfx942"
    for other in ("gfx1151", "gfx9999", "gfx94"):
        assert image_for(other, ("gfx90a", "gfx942")) is None, other


def test_a_device_of_the_wheel_is_served() -> None:
    assert why_unusable(LIBRARY, H200) is None
    newer = replace(H200, driver=(13, 2), torch="2.12.0+cu132", torch_cuda="13.2")
    assert why_unusable(LIBRARY, newer) is None


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (GpuFacts("2.13.0+cpu", None), "torch 2.13.0+cpu is built without CUDA"),
        (GpuFacts("2.11.0+rocm7.1", None, "7.1"), "torch 2.11.0+rocm7.1 is built for ROCm, and libgristmill_cuda.so for CUDA"),
        (replace(H200, driver=None, devices=()), "no NVIDIA driver is installed (libcuda.so.1 is not found)"),
        (
            replace(H200, driver=(12, 4), devices=()),
            "the NVIDIA driver supports CUDA 12.4, but torch 2.11.0+cu130 needs 13.0: install driver 580 or newer",
        ),
        (replace(H200, refusal=100, devices=()), "no NVIDIA GPU is visible"),
        (replace(H200, refusal=803, devices=()), "the NVIDIA driver does not start: CUDA error 803"),
        (
            replace(H200, torch="2.10.0+cu128", torch_cuda="12.8", driver=(12, 8)),  # torch itself can use this one
            "the NVIDIA driver supports CUDA 12.8, but libgristmill_cuda.so needs 13.0: install driver 580 or newer",
        ),
        (
            replace(H200, devices=(("NVIDIA H200", "sm_90"), ("Tesla T4", "sm_75"))),
            "libgristmill_cuda.so has code for sm_80, sm_86, sm_89, sm_90a, sm_100, compute_100, which Tesla T4 (sm_75) cannot run",
        ),
    ],
)
def test_a_machine_that_cannot_use_it_gets_a_sentence(facts: GpuFacts, sentence: str) -> None:
    assert why_unusable(LIBRARY, facts) == sentence


def test_a_driver_older_than_the_compiler_cannot_compile_its_ptx() -> None:
    built = replace(LIBRARY, toolkit=(13, 2))
    assert why_unusable(built, H200) is None, "compiled code needs the major version alone"
    newer = replace(H200, devices=(("NVIDIA GeForce RTX 5090", "sm_120"),))
    assert why_unusable(built, newer) == (
        "the NVIDIA driver supports CUDA 13.0, but libgristmill_cuda.so needs 13.2: install a newer driver"
    )


def test_hidden_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert why_unusable(LIBRARY, replace(H200, refusal=100, devices=())) == "no NVIDIA GPU is visible (CUDA_VISIBLE_DEVICES is '')"


def test_a_build_without_the_library_says_which_build_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_gpu, "_distribution", lambda: "kernels-cpu")
    found = loader_gpu.find(tmp_path)
    assert found.reason == "this build (kernels-cpu) has no GPU library"
    opened = loader_gpu.open_library(found, H200, lambda path: pytest.fail("there is nothing to open"))
    assert opened.reason == found.reason


@pytest.mark.parametrize("text", [None, "", "{}", '{"archs": 3, "cuda": "13.0"}', '{"archs": ["sm_90a"], "cuda": "x"}'])
def test_a_library_of_unknown_content_is_not_opened(tmp_path: Path, text: str | None) -> None:
    (tmp_path / loader_gpu.LIBRARY).touch()
    if text is not None:
        (tmp_path / "libgristmill_cuda.json").write_text(text)
    opened = loader_gpu.open_library(loader_gpu.find(tmp_path), H200, lambda path: pytest.fail("opened"))
    assert str(opened.reason).startswith("libgristmill_cuda.json, which tells what libgristmill_cuda.so was compiled for, cannot be read")


def library_in(directory: Path) -> GpuLibrary:
    (directory / loader_gpu.LIBRARY).write_bytes(b"not an ELF file")
    (directory / "libgristmill_cuda.json").write_text(json.dumps({"archs": ["sm_90a"], "cuda": "13.0"}))
    return loader_gpu.find(directory)


def test_the_library_is_opened_where_it_can_be_used_and_only_there(tmp_path: Path) -> None:
    found, opened = library_in(tmp_path), []
    assert loader_gpu.open_library(found, H200, opened.append).reason is None
    assert opened == [str(tmp_path / loader_gpu.LIBRARY)]
    without = loader_gpu.open_library(found, GpuFacts("2.13.0+cpu", None), lambda path: pytest.fail("opened"))
    assert without.reason == "torch 2.13.0+cpu is built without CUDA"


def test_a_file_that_is_no_library_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    assert "cannot open libgristmill_cuda.so" in str(loader_gpu.open_library(library_in(tmp_path), H200).reason)


def test_a_library_for_another_device_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = library_in(tmp_path)
    monkeypatch.setattr(loader_gpu, "find", lambda: found)
    monkeypatch.setattr(loader_gpu, "facts_of_this_machine", lambda: replace(H200, devices=(("NVIDIA A100", "sm_80"),)))
    with pytest.warns(RuntimeWarning, match=r"does not use its C\+\+ kernels on the GPU: .* which NVIDIA A100 \(sm_80\) cannot run"):
        loader_gpu.gpu_library.__wrapped__()


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.families_of("rms_norm")  # registered
    monkeypatch.setattr(loader_gpu, "gpu_library", lambda: GpuLibrary(None, reason="this build (kernels-cpu) has no GPU library"))


@pytest.mark.parametrize("name", native_cuda.PREDICATES)
def test_every_gpu_op_gives_the_library_s_reason(without_library: None, name: str) -> None:
    key = next((key for key in KEYS if len(key) == len(dispatch.OPS[name].key_type._fields)), None)
    assert key is not None
    assert dispatch.families_of(name, "cuda")[0] == "native"
    assert dispatch.why_not(name, "native", key) == "this build (kernels-cpu) has no GPU library"


_BF16 = torch.bfloat16
KEYS = [("cuda", *[_BF16] * min(count, 2), *[128] * max(0, count - 2)) for count in range(7)]


def test_strict_mode_refuses_the_next_family_with_the_reason(without_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.STRICT_VARIABLE, "1")
    monkeypatch.setitem(dispatch.PREFERENCE, "cuda", ("native", "reference"))
    dispatch.reset()
    try:
        with pytest.raises(
            dispatch.NoImplementationError, match=r"refuses the fallback to .*native: this build \(kernels-cpu\) has no GPU"
        ):
            dispatch.select("rms_norm", ("cuda", _BF16))
    finally:
        dispatch.reset()


def test_an_op_that_the_open_library_lacks_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_gpu, "gpu_library", lambda: GpuLibrary(Path("x"), WHEEL, (13, 0)))
    assert dispatch.why_not("rms_norm", "native", ("cuda", _BF16)) == "the native GPU library was built without rms_norm; build it again"
