"""The wheel in an environment with torch and numpy only, used from outside the source tree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test here waits for the wheel to be compiled

ONE_OP = """
import json, sys, torch
import gristmill_kernels
from gristmill_kernels import capabilities, rms_norm
x, w = torch.randn(5, 64), torch.randn(64)
expected = (x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * w.double()).float()
error = (rms_norm(x, w) - expected).abs().max().item()
report = capabilities()
print(json.dumps({"version": gristmill_kernels.__version__, "error": error, "native": report["native"], "file": gristmill_kernels.__file__,
                  "implementation": report["ops"]["rms_norm"]["cpu"][0]["implementation"]}))
"""


def test_pip_finds_nothing_missing(installed) -> None:
    assert installed.pip("check").returncode == 0


def test_the_report_runs_from_anywhere(installed, level: str, tmp_path: Path) -> None:
    done = installed.run("-m", "gristmill_kernels", cwd=tmp_path)
    assert done.returncode == 0
    assert "rms_norm" in done.stdout
    assert level in done.stdout


def test_an_op_runs_natively_and_correctly(installed, root: Path, level: str, tmp_path: Path) -> None:
    done = installed.run("-W", "error", "-c", ONE_OP, cwd=tmp_path, GRISTMILL_KERNELS_STRICT="1")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["file"].startswith(str(installed.site))
    assert report["version"] == (root / "packaging" / "VERSION").read_text().strip()
    assert (report["native"]["isa"], report["implementation"]) == (level, "native")
    assert report["error"] < 1e-5


def test_an_error_of_an_op_library_reaches_python(installed, tmp_path: Path) -> None:
    """Exceptions cross from the statically linked C++ runtime of the library through torch's own."""
    code = (
        "import torch, gristmill_kernels.norm\n"
        "try:\n"
        "    torch.ops.gristmill_native.rms_norm(torch.empty(2, 8), torch.ones(2, 8), torch.ones(3), 1e-6)\n"
        "except RuntimeError as error:\n"
        "    print('refused:', str(error).splitlines()[0])\n"
    )
    done = installed.run("-c", code, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("refused:")


def test_every_module_imports_without_an_accelerator(installed, tmp_path: Path) -> None:
    code = (
        "import gristmill_kernels, importlib, pkgutil\n"
        "for module in pkgutil.walk_packages(gristmill_kernels.__path__, 'gristmill_kernels.'):\n"
        "    if not module.name.endswith('__main__') and not module.name.startswith('gristmill_kernels.triton.'):\n"
        "        importlib.import_module(module.name)\n"
        "import torch, gristmill_kernels.dispatch as dispatch\n"
        "print(dispatch.why_not('rms_norm', 'triton', ('cuda', torch.bfloat16)))\n"
    )
    done = installed.run("-W", "error", "-c", code, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0
    # The environment has no triton, which only an accelerator's torch brings: its kernels are not imported, and the family says so.
    assert done.stdout.startswith("triton cannot be imported")
    for option in ("--help", "--version"):
        assert installed.run("-m", "gristmill_kernels", option, cwd=tmp_path).returncode == 0


def test_importing_takes_no_torch(installed, tmp_path: Path) -> None:
    code = "import sys, gristmill_kernels, gristmill_kernels._host as h; h.RadixTree(4); sys.exit('torch' in sys.modules)"
    assert installed.run("-c", code, cwd=tmp_path).returncode == 0


def test_a_level_that_the_wheel_lacks_is_one_sentence(installed, tmp_path: Path) -> None:
    done = installed.run("-c", "import gristmill_kernels as g; g.capabilities()", cwd=tmp_path, GRISTMILL_KERNELS_ISA="avx9")
    assert done.returncode != 0
    assert "GRISTMILL_KERNELS_ISA is 'avx9', but should be one of" in done.stderr.strip().splitlines()[-1]


def test_two_distributions_at_once_are_refused_at_import(installed, built, new_environment, tmp_path: Path) -> None:
    assert new_environment.pip("install", "--no-deps", built.wheel).returncode == 0
    other = new_environment.site / "kernels_cuda-0.1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels-cuda\nVersion: 0.1.0\n")
    (other / "INSTALLER").write_text("pip\n")
    (other / "RECORD").write_text("gristmill_kernels/__init__.py,,\n")
    done = new_environment.run("-c", "import gristmill_kernels", cwd=tmp_path)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ") and "kernels-cpu 0.1.0" in last and "kernels-cuda 0.1.0" in last and "pip uninstall" in last


def test_uninstalling_leaves_nothing(built, new_environment, tmp_path: Path) -> None:
    before = set(new_environment.site.iterdir())
    assert new_environment.pip("install", "--no-deps", built.wheel).returncode == 0
    assert new_environment.run("-c", "import gristmill_kernels", cwd=tmp_path).returncode == 0
    assert new_environment.pip("uninstall", "-y", "kernels-cpu").returncode == 0
    assert set(new_environment.site.iterdir()) == before


def test_pip_sees_that_torch_is_too_old(built, new_environment) -> None:
    (torch_info,) = new_environment.site.glob("torch-*.dist-info")
    metadata = (torch_info / "METADATA").read_text()
    torch_info.unlink()
    old = new_environment.site / "torch-2.9.0.dist-info"
    old.mkdir()
    version = next(line for line in metadata.splitlines() if line.startswith("Version:"))
    (old / "METADATA").write_text(metadata.replace(version, "Version: 2.9.0", 1))
    (old / "INSTALLER").write_text("pip\n")
    assert new_environment.pip("install", "--no-deps", built.wheel).returncode == 0
    done = new_environment.pip("check")
    assert done.returncode != 0
    assert "kernels-cpu 0.1.0 has requirement torch<3,>=2.10, but you have torch 2.9.0" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("cpu", "expected"), [("Nehalem", None), ("Haswell", "avx2")])
def test_wide_code_stays_closed_on_an_older_cpu(installed, tmp_path: Path, cpu: str, expected: str | None, level: str) -> None:
    """The whole wheel on an emulated CPU: an instruction that it does not have would end the process with SIGILL."""
    qemu = shutil.which("qemu-x86_64")
    if qemu is None or level != "avx2":
        pytest.skip("needs qemu-x86_64 (package qemu-user) on an x86 Linux")
    done = installed.run("-c", ONE_OP, cwd=tmp_path, prefix=(qemu, "-cpu", cpu), OMP_NUM_THREADS="1")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["native"]["isa"] == expected
    assert report["implementation"] == ("native" if expected else "reference")
    assert report["error"] < 1e-5
    if expected is None:
        assert "no library for generic" in done.stderr, "the fall back must be announced with its reason"
