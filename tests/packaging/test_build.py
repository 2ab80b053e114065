"""Which platform a build is of, and that every way in says so in one sentence when it cannot be."""

from __future__ import annotations

import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test here waits for the wheel to be compiled


@pytest.fixture
def staging(backend_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GRISTMILL_PLATFORM", raising=False)
    from gristmill_build import staging

    return staging


@pytest.fixture
def tree_of(staging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes staging look at a tree with the project files of these platforms; `fixed` turns it into an sdist."""

    def make(*platforms: str, fixed: str | None = None) -> None:
        (tmp_path / "packaging").mkdir()
        for name in platforms:
            (tmp_path / "packaging" / f"pyproject_{name}.toml").touch()
        if fixed:
            (tmp_path / staging.MARKER).write_text(fixed + "\n")
        monkeypatch.setattr(staging, "ROOT", tmp_path)
        monkeypatch.setattr(staging, "DETECT", {name: (lambda: False) for name in ("metal", "rocm", "cuda")})

    return make


def test_the_config_setting_wins_over_the_environment(staging, tree_of, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_of("cpu", "cuda", "rocm")
    monkeypatch.setenv("GRISTMILL_PLATFORM", "rocm")
    assert staging.choose_platform({"platform": "cuda"}) == "cuda"
    assert staging.choose_platform({}) == "rocm"
    monkeypatch.setenv("GRISTMILL_PLATFORM", "")
    assert staging.choose_platform({}) == "cpu"


def test_the_machine_decides_when_nobody_says(staging, tree_of, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_of("cpu", "cuda")
    monkeypatch.setattr(staging, "DETECT", {"rocm": lambda: True, "cuda": lambda: True})
    assert staging.choose_platform({}) == "cuda", "rocm has no project file here"


def test_an_sdist_remembers_its_platform(staging, tree_of) -> None:
    tree_of("cpu", "cuda", fixed="cuda")
    assert staging.choose_platform({}) == "cuda"
    with pytest.raises(SystemExit, match="this source distribution builds kernels-cuda, not kernels-cpu"):
        staging.choose_platform({"platform": "cpu"})


def test_an_unknown_platform_is_named_with_its_origin(staging, tree_of, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_of("cpu", "cuda")
    with pytest.raises(SystemExit, match=r"^config setting platform: 'tpu' is not a platform of this tree; choose from cpu, cuda$"):
        staging.choose_platform({"platform": "tpu"})
    monkeypatch.setenv("GRISTMILL_PLATFORM", "CPU")
    with pytest.raises(SystemExit, match=r"^GRISTMILL_PLATFORM: 'CPU' is not a platform"):
        staging.choose_platform({})


@pytest.mark.parametrize("key", ["plaform", "variant_", "cmake-args", "--build-option"])
def test_an_unknown_setting_is_refused(staging, key: str) -> None:
    with pytest.raises(SystemExit, match=f"config setting '{key}' is not known; use platform="):
        staging.check_settings({key: "x"})


def test_settings_of_the_build_tool_pass(staging) -> None:
    staging.check_settings({"platform": "cpu", "cmake.define.GRISTMILL_ISAS": "avx2", "build-dir": "b", "cmake.build-type": "Debug"})


def test_pip_ends_with_the_sentence(run, root: Path, tmp_path: Path) -> None:
    done = run(
        sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", tmp_path, "-C", "platform=tpu", root, cwd=tmp_path
    )
    assert done.returncode != 0
    assert "config setting platform: 'tpu' is not a platform of this tree; choose from cpu" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_an_unknown_level_is_refused_by_cmake(run, root: Path, tmp_path: Path) -> None:
    cmake = Path(sys.executable).parent / "cmake"
    done = run(
        cmake, "-S", root, "-B", tmp_path, "-G", "Ninja", "-DGRISTMILL_ISAS=avx1024", f"-DPython_EXECUTABLE={sys.executable}",
        env={**os.environ, "PATH": f"{cmake.parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode != 0
    assert re.search(r"GRISTMILL_ISAS: 'avx1024' is not a level of\s+\S+; choose from", done.stderr)


def test_a_wheel_straight_from_the_tree(run, root: Path, tmp_path: Path) -> None:
    """`pip wheel . -C platform=cpu`, with no op libraries to keep it short."""
    done = run(
        sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", tmp_path, "-C", "platform=cpu", ".",
        cwd=root, env={**os.environ, "GRISTMILL_ISAS": "none"},
    )  # fmt: skip
    assert done.returncode == 0
    (wheel,) = tmp_path.glob("kernels_cpu-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        information = archive.read("gristmill_kernels/_build_info.py").decode()
    assert not [name for name in names if "_native" in name]
    assert "ISA_LEVELS: tuple[str, ...] = ()" in information


def test_the_sdist_holds_what_a_rebuild_needs_and_no_build_products(built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    needed = {"pyproject.toml", "PKG-INFO", "LICENSE", "CMakeLists.txt", "csrc/torch_cpu.cpp", "csrc/host/radix_tree.cpp"}
    needed |= {"packaging/backend.py", "packaging/PLATFORM", "packaging/VERSION", "python/gristmill_kernels/__init__.py"}
    assert needed <= names
    assert not [
        name for name in names if name.endswith((".so", ".pyc", "_build_info.py")) or name.startswith(("build/", "tests/", "runtime/"))
    ]


def test_an_editable_wheel_points_at_the_tree(backend_path, tmp_path: Path) -> None:
    from gristmill_build import editable

    def prepare(directory: Path) -> str:
        info = directory / "kernels_cpu-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels-cpu\nVersion: 9.9\n")
        return info.name

    name = editable.editable_wheel(tmp_path, prepare)
    with zipfile.ZipFile(tmp_path / name) as archive:
        assert archive.read("kernels_cpu_editable.pth").decode() == f"{editable.ROOT / 'python'}\n"
        record = archive.read("kernels_cpu-9.9.dist-info/RECORD").decode().splitlines()
        assert {line.split(",")[0] for line in record} == set(archive.namelist())
