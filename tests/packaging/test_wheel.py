"""What is inside the wheel, and that the checks which say so would notice the opposite."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

pytestmark = pytest.mark.timeout(900)  # the first test here waits for the wheel to be compiled


@pytest.fixture
def checks(backend_path):
    from gristmill_build import wheel_checks

    return wheel_checks


def test_the_wheel_passes_every_check(built, checks) -> None:
    assert checks.check_wheel(built.wheel) == []


def test_the_tag_names_this_python_and_an_old_enough_glibc(built, checks) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{python}-{python}-" in built.wheel.name
    if sys.platform == "linux":
        promised = checks.promised_glibc(built.wheel.name)
        assert promised is not None, "the wheel has no manylinux tag"
        assert promised <= (2, 34), "a symbol of a newer C library came in"


def test_the_metadata_says_what_the_wheel_needs(built, root: Path) -> None:
    (name,) = [name for name in built.names() if name.endswith(".dist-info/METADATA")]
    with zipfile.ZipFile(built.wheel) as archive:
        metadata = email.message_from_bytes(archive.read(name))
    assert (metadata["Name"], metadata["Version"]) == ("kernels-cpu", (root / "packaging" / "VERSION").read_text().strip())
    assert sorted(metadata.get_all("Requires-Dist")) == ["numpy>=1.26", "torch<3,>=2.10"]
    assert metadata["License-Expression"] == "Apache-2.0"


def test_every_python_file_of_the_package_is_in_the_wheel(built, root: Path) -> None:
    package = root / "python" / "gristmill_kernels"
    expected = {path.relative_to(package.parent).as_posix() for path in package.rglob("*.py*") if path.suffix in (".py", ".pyi")}
    assert expected - {"gristmill_kernels/_build_info.py"} <= set(built.names())


def test_the_runtime_accepts_this_version(root: Path) -> None:
    version = (root / "packaging" / "VERSION").read_text().strip()
    for name in ("kernels-cpu", "kernels-cuda"):
        (requirement,) = re.findall(rf'"{name}(.+)"', (root / "runtime" / "pyproject.toml").read_text())
        assert version in SpecifierSet(requirement)


def test_no_build_file_asks_for_the_building_machine_or_for_fast_math(root: Path) -> None:
    files = [root / "CMakeLists.txt", *(root / "packaging").rglob("*.cmake"), *(root / "packaging").rglob("*.toml")]
    for path in files:
        assert not re.search(r"-m(?:arch|cpu|tune)=native|-ffast-math|-Ofast", path.read_text()), path


def tampered(wheel: Path, target: Path, add: dict[str, bytes], drop: str = "") -> Path:
    """A copy of the wheel with files added, and those that match `drop` left out."""
    copy = target / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(copy, "w") as archive:
        for name in source.namelist():
            if not (drop and re.search(drop, name)):
                archive.writestr(name, source.read(name))
        for name, data in add.items():
            archive.writestr(name, data)
    return copy


@pytest.fixture
def compile_library(tmp_path: Path) -> Callable[..., bytes]:
    def compile_(source: str, *flags: str) -> bytes:
        compiler = shutil.which("cc") or shutil.which("gcc")
        assert compiler, "a C compiler is needed to build the kernels"
        (tmp_path / "x.c").write_text(source)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(tmp_path / "x.so"), str(tmp_path / "x.c"), *flags], check=True)
        return (tmp_path / "x.so").read_bytes()

    return compile_


HIDDEN = '__attribute__((visibility("hidden"))) '


@pytest.mark.parametrize(
    ("source", "flags", "fault"),
    [
        (HIDDEN + "int f(void) { return 1; }", ["-Wl,-rpath,/opt/torch/lib"], "has RUNPATH /opt/torch/lib"),
        (
            "extern int _ZN2at5emptyEv(void);" + HIDDEN + "int (*f)(void) = _ZN2at5emptyEv;",
            [],
            "uses what is not in the stable ABI: _ZN2at",
        ),
        (HIDDEN + 'const char* f = "/home/someone/csrc/ops.cpp"; ', [], "contains the build path /home/someone/csrc/ops.cpp"),
        ("int leaked(void) { return 1; }", [], "exports leaked"),
        (HIDDEN + "int f(void) { return 1; }", ["-Wl,--no-as-needed", "-lstdc++"], "needs libstdc++.so.6"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
def test_the_checks_notice_a_bad_library(
    built, checks, compile_library, tmp_path: Path, level: str, source: str, flags: list[str], fault: str
) -> None:
    name = f"gristmill_kernels/_native/libgristmill_cpu_{level}.so"
    bad = tampered(built.wheel, tmp_path, {name: compile_library(source, *flags)}, drop=re.escape(name))
    faults = checks.check_wheel(bad)
    assert any(fault in found for found in faults), faults


def test_the_checks_notice_a_tag_that_promises_too_much(built, checks, tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("manylinux tags")
    honest = tampered(built.wheel, tmp_path, {})
    boastful = honest.rename(tmp_path / re.sub(r"manylinux\w+", "manylinux_2_5_x86_64", honest.name))
    assert any("but the tag promises 2.5" in fault for fault in checks.check_wheel(boastful))


def test_the_checks_notice_stray_and_missing_files(built, checks, tmp_path: Path) -> None:
    bad = tampered(built.wheel, tmp_path, {"tests/test_x.py": b"", "gristmill_kernels/notes.txt": b""}, drop="/_native/")
    faults = checks.check_wheel(bad)
    assert {"tests/test_x.py: does not belong into a wheel", "gristmill_kernels/notes.txt: does not belong into a wheel"} <= set(faults)
    assert any("promises levels" in fault for fault in faults)
