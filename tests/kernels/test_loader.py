"""Finding and opening the native library: by instruction set, with a clear reason when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill_kernels import _distributions, loader


def touch(directory: Path, *levels: str) -> Path:
    for level in levels:
        loader.library_path(level, directory).touch()
    return directory


@pytest.fixture(autouse=True)
def avx2_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(loader.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(loader, "usable_levels", lambda: ("avx2", "generic"))


def test_the_best_usable_level_is_chosen_and_better_ones_are_not_opened(tmp_path: Path) -> None:
    found = loader.find(touch(tmp_path, "amx", "avx512", "avx2", "generic"))
    assert (found.isa, found.reason) == ("avx2", None)


def test_a_build_without_the_best_level_uses_the_next(tmp_path: Path) -> None:
    assert loader.find(touch(tmp_path, "avx512", "generic")).isa == "generic"


def test_a_build_without_a_usable_level_says_so(tmp_path: Path) -> None:
    found = loader.find(touch(tmp_path, "avx512"))
    assert found.isa is None
    assert "no library for avx2, generic" in str(found.reason)


def test_the_environment_can_ask_for_a_lower_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loader.ISA_VARIABLE, "generic")
    assert loader.find(touch(tmp_path, "avx2", "generic")).isa == "generic"


def test_the_environment_can_ask_for_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loader.ISA_VARIABLE, "reference")
    found = loader.find(touch(tmp_path, "avx2"))
    assert (found.isa, found.reason, found.requested) == (None, "GRISTMILL_KERNELS_ISA=reference", True)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("sse9", "GRISTMILL_KERNELS_ISA is 'sse9', but should be one of"),
        ("avx512", "GRISTMILL_KERNELS_ISA is 'avx512', which this CPU does not have; it can run avx2, generic or reference"),
        ("generic", "this build has no libgristmill_cpu_generic.so"),
    ],
)
def test_a_level_that_cannot_be_had_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, sentence: str) -> None:
    monkeypatch.setenv(loader.ISA_VARIABLE, value)
    with pytest.raises(ValueError, match=sentence):
        loader.find(touch(tmp_path, "avx2"))


def test_an_empty_variable_counts_as_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loader.ISA_VARIABLE, "")
    assert loader.find(touch(tmp_path, "avx2")).isa == "avx2"


def test_a_missing_host_module_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> tuple[str, ...]:
        raise ImportError("no _host here")

    monkeypatch.setattr(loader, "usable_levels", missing)
    assert "no _host here" in str(loader.find(touch(tmp_path, "avx2")).reason)


def test_an_undefined_symbol_names_both_torch_versions(tmp_path: Path) -> None:
    import torch

    def fails(path: str) -> None:
        raise OSError(f"{path}: undefined symbol: aoti_torch_new_thing\nmore")

    opened = loader.open_library(loader.find(touch(tmp_path, "avx2")), fails)
    assert opened.isa is None
    assert f"torch {torch.__version__} is installed" in str(opened.reason)
    assert f"built with torch {loader.built_with_torch()}" in str(opened.reason)
    assert "aoti_torch_new_thing" in str(opened.reason)


def test_a_file_that_is_no_library_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    opened = loader.open_library(loader.find(touch(tmp_path, "avx2")))
    assert "cannot open libgristmill_cpu_avx2.so" in str(opened.reason)


def test_a_fallback_nobody_asked_for_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find", lambda: loader.NativeLibrary(None, None, "it rained"))
    with pytest.warns(RuntimeWarning, match="plain PyTorch, which is slow: it rained"):
        loader.native_library.__wrapped__()


def test_two_variants_in_one_directory_are_refused(tmp_path: Path) -> None:
    for name in ("kernels_cpu-0.1.0.dist-info", "kernels_cuda-0.2.0.dist-info", "kernels_cpu_extra-1.dist-info", "numpy-2.dist-info"):
        (tmp_path / name).mkdir()
    with pytest.raises(ImportError, match=r"pip uninstall -y kernels-cpu kernels-cuda") as refused:
        _distributions.refuse_two_variants(tmp_path)
    assert "kernels-cpu 0.1.0 and kernels-cuda 0.2.0 are both installed" in str(refused.value)


def test_one_variant_is_fine(tmp_path: Path) -> None:
    (tmp_path / "kernels_cpu-0.1.0.dist-info").mkdir()
    _distributions.refuse_two_variants(tmp_path)
    assert _distributions.installed_variants(tmp_path / "absent") == []


def test_a_process_opens_the_library_that_the_environment_names() -> None:
    """End to end in a process of its own, for the best and the plainest level that this build has and this machine can run."""
    _host = pytest.importorskip("gristmill_kernels._host")
    present = [level for level in (*_host.isa_levels(), "generic") if loader.library_path(level).is_file()]
    program = (
        "import gristmill_kernels, torch; from gristmill_kernels import loader; x = torch.ones(1, 8); "
        "gristmill_kernels.rms_norm(x, x[0]); print(loader.native_library().isa)"
    )
    for level in [*present[:1], *present[-1:], "reference"]:
        environment = os.environ | {loader.ISA_VARIABLE: level, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == ("None" if level == "reference" else level)
