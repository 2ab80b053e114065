"""What a process imports: the torch-free ones never torch, and everything without a driver or an accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gristmill
from gristmill import device
from gristmill.cli.main import main

ROOT = Path(gristmill.__file__).parent
MODULES = sorted(
    ".".join(("gristmill", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if path.name != "__main__.py"
)
WORKER_SIDE = ("gristmill.worker", "gristmill.models", "gristmill.layers", "gristmill.attention", "gristmill.sampling", "gristmill.loading")


def _import_all(modules: list[str], before: str = "", **environment: str) -> None:
    code = f"import importlib, sys\n{before}\nfor name in {modules}: importlib.import_module(name)"
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_server_scheduler_detokenizer_and_command_line_import_without_torch() -> None:
    modules = [name for name in MODULES if not name.startswith(WORKER_SIDE)]
    assert {"gristmill.engine", "gristmill.serving", "gristmill.server.app", "gristmill.scheduler.process"} < set(modules)
    _import_all(modules, before="sys.modules['torch'] = None")


def test_every_module_imports_without_a_device() -> None:
    assert len(MODULES) > 60
    _import_all(MODULES, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")


@pytest.mark.parametrize("name", ["rocm", "mps", "cuda:99"])
def test_an_unknown_device_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "M", "--device", name]) == 2
    assert capsys.readouterr().err == f"error: --device must be one of auto, cpu, cuda, not {name!r}\n"


@pytest.mark.skipif(device.why_no_cuda() is None, reason="there is a GPU")
def test_an_absent_device_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "M", "--device", "cuda"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --device cuda cannot be used: ") and error.count("\n") == 1
