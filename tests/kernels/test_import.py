"""Importing without torch, without an accelerator, and the command line report."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import gristmill_kernels

WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch was imported")
sys.meta_path.insert(0, NoTorch())
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    full = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run([sys.executable, *arguments], env=full, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "statement",
    [
        "import gristmill_kernels; gristmill_kernels.__version__; dir(gristmill_kernels)",
        "import gristmill_kernels.schema, gristmill_kernels.loader",
        "from gristmill_kernels import _host; _host.cpu_features(); _host.RadixTree(1)",
    ],
)
def test_the_package_needs_no_torch(statement: str) -> None:
    if "_host" in statement and not list(Path(gristmill_kernels.__file__).parent.glob("_host.*.so")):
        pytest.skip("this source tree has no built _host")
    result = run("-c", WITHOUT_TORCH + statement)
    assert result.returncode == 0, result.stderr


def test_the_first_use_of_a_function_says_when_torch_is_missing() -> None:
    result = run("-c", WITHOUT_TORCH + "import gristmill_kernels; gristmill_kernels.rms_norm")
    assert "ImportError: torch was imported" in result.stderr


def test_every_submodule_imports_on_a_machine_without_an_accelerator() -> None:
    found = pkgutil.walk_packages(gristmill_kernels.__path__, "gristmill_kernels.")
    names = [module.name for module in found if not module.name.endswith("__main__")]
    if importlib.util.find_spec("triton") is None:
        names = [name for name in names if not name.startswith("gristmill_kernels.triton.")]
    assert "gristmill_kernels.reference.attention" in names
    result = run("-c", "import importlib\nfor name in " + repr(names) + ": importlib.import_module(name)")
    assert result.returncode == 0, result.stderr


def test_help_needs_no_torch() -> None:
    program = "import runpy; sys.argv = ['x', '--help']; runpy.run_module('gristmill_kernels', run_name='__main__')"
    result = run("-c", WITHOUT_TORCH + program)
    assert (result.returncode, "--json" in result.stdout) == (0, True), result.stderr


def test_the_report_for_a_person_and_the_report_as_json_agree() -> None:
    table, data = run("-m", "gristmill_kernels"), run("-m", "gristmill_kernels", "--json")
    assert (table.returncode, data.returncode) == (0, 0), table.stderr + data.stderr
    report = json.loads(data.stdout)
    rows = {line.split()[0]: line for line in reversed(table.stdout.splitlines()) if line}
    for name, by_device in report["ops"].items():
        assert f" {by_device['cpu'][0]['implementation']} " in rows[name]


def test_a_bad_variable_ends_the_report_with_one_sentence() -> None:
    result = run("-m", "gristmill_kernels", GRISTMILL_KERNELS_IMPL="rms_norm:fast")
    assert result.returncode == 1
    assert result.stderr.strip().splitlines() == [
        "gristmill_kernels: GRISTMILL_KERNELS_IMPL: 'fast' is not an implementation; they are native, triton, metal, reference"
    ]


def test_all_lists_what_can_be_had() -> None:
    for name in gristmill_kernels.__all__:
        assert getattr(gristmill_kernels, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = gristmill_kernels.nonsense
