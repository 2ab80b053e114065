"""Every Triton kernel compiled for GPUs that are not here, and what the compiler made of it: no spills, shared memory within the limit,
wide loads, a matrix instruction wherever there is a product."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gristmill_kernels import triton as family
from tests.kernels.triton.processes import CACHE

if family.missing() is not None:
    pytest.skip(str(family.missing()), allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget

from gristmill_kernels.triton.launch import AotCase

TARGETS = {
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm90": GPUTarget("cuda", 90, 32),
}
# Bytes of LDS of a work-group (AMD) and of shared memory that a block can opt in to (NVIDIA).
SHARED_LIMIT = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840, "sm90": 232448}
MATRIX_INSTRUCTION = {"gfx90a": r"v_mfma_", "gfx942": r"v_mfma_", "gfx950": r"v_mfma_", "sm90": r"wgmma\.mma_async|mma\.sync"}


# Scalar registers that AMD may park in lanes of vector registers (no memory is touched): a few of them cost nothing that can be measured.
SCALAR_SPILL_LIMIT = 16


class Resources(NamedTuple):
    """What one lane holds, and what it lacked room for. `stack_bytes` is private memory, which should not be needed."""

    registers: int
    spills: int
    scalar_spills: int
    stack_bytes: int


def amd_resources(assembly: str) -> Resources:
    """From the kernel metadata that the assembly ends with."""

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert found, f"the metadata has no {name}"
        return int(found[1])

    return Resources(number("vgpr_count"), number("vgpr_spill_count"), number("sgpr_spill_count"), number("private_segment_fixed_size"))


def nvidia_resources(ptx: str, folder: Path) -> Resources:
    """From what the assembler that comes with triton says about the PTX."""
    arch = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert arch, "the PTX names no target"
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [str(assembler), "-v", f"--gpu-name={arch[1]}", str(source), "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers and memory, said
    return Resources(int(registers[1]), int(memory[2]) + int(memory[3]), 0, int(memory[1]))


def cases() -> list[Any]:
    found = []
    for module in family.modules():
        for case, arch in itertools.product(import_module(f"gristmill_kernels.triton.{module}").AOT, TARGETS):
            if not case.archs or arch in case.archs:
                found.append(pytest.param(case, arch, id=f"{case.kernel.name.strip('_')}-{case.label}-{arch}"))
    return found


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(CACHE))


@pytest.mark.parametrize(("case", "arch"), cases())
def test_kernel_compiles_without_spilling(case: AotCase, arch: str, tmp_path: Path) -> None:
    compiled = case.kernel.compile_for(TARGETS[arch], case, arch)
    assembly = compiled.asm["amdgcn"] if arch.startswith("gfx") else compiled.asm["ptx"]
    resources = amd_resources(assembly) if arch.startswith("gfx") else nvidia_resources(assembly, tmp_path)
    assert resources.spills == 0 and resources.stack_bytes == 0, f"{resources} with {compiled.metadata.num_warps} warps"
    assert resources.scalar_spills <= SCALAR_SPILL_LIMIT, f"{resources} with {compiled.metadata.num_warps} warps"
    assert compiled.metadata.shared <= SHARED_LIMIT[arch]
    if case.dot:
        assert re.search(MATRIX_INSTRUCTION[arch], assembly), "no matrix instruction"


def test_every_kernel_has_a_case() -> None:
    from gristmill_kernels.triton.launch import Kernel

    for name in family.modules():
        module = import_module(f"gristmill_kernels.triton.{name}")
        kernels = {value for value in vars(module).values() if isinstance(value, Kernel)}
        missing = kernels - {case.kernel for case in module.AOT}
        assert not missing, f"{name}.py lists no ahead-of-time case for {', '.join(kernel.name for kernel in missing)}"
