"""The latent attention kernel for Hopper GPUs: when it is chosen, and that the assembler keeps its matrix instructions asynchronous."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill_kernels import triton as family
from tests.kernels.triton.processes import CACHE

if family.missing() is not None:
    pytest.skip(str(family.missing()), allow_module_level=True)

import triton

from gristmill_kernels.triton import attention_tables, launch, mla
from gristmill_kernels.triton.launch import AotCase
from tests.kernels.triton.test_aot import TARGETS

if not mla._gluon_works():
    pytest.skip(f"the kernel is not offered for Triton {triton.__version__}", allow_module_level=True)

BF16, HALF, FLOAT, FLOAT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def decode(monkeypatch: pytest.MonkeyPatch, arch: str, q_nope: torch.Tensor, q_rope: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether the kernel would run on such a machine."""
    chosen: list[bool] = []
    monkeypatch.setattr(launch, "facts", lambda device: launch.Facts(arch, 132, 32))
    monkeypatch.setattr(mla, "mla_decode_with", lambda config, *args: chosen.append(config.hopper))
    one = torch.zeros(2, dtype=torch.int32)
    mla.mla_decode(torch.empty(q_nope.shape), None, q_nope, q_rope, cache, None, one, one, None, None, 1.0, 1.0)
    return chosen[0]


def rows(heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(1, heads, 512, dtype=dtype), torch.zeros(1, heads, 64, dtype=dtype), torch.zeros(4, 576, dtype=dtype)


@pytest.mark.parametrize(
    ("arch", "heads", "dtype", "expected"),
    [
        ("sm90", 128, BF16, True),
        ("sm90", 40, HALF, True),
        ("sm90", 32, BF16, False),
        ("sm90", 128, FLOAT, False),
        ("sm100", 128, BF16, False),
        ("sm89", 128, BF16, False),
        ("gfx942", 128, BF16, False),
    ],
)
def test_it_is_chosen_for_many_heads_in_16_bits_on_sm90(
    monkeypatch: pytest.MonkeyPatch, arch: str, heads: int, dtype: torch.dtype, expected: bool
) -> None:
    assert decode(monkeypatch, arch, *rows(heads, dtype)) is expected


def test_other_widths_and_8_bit_caches_are_left_to_the_portable_kernel() -> None:
    assert attention_tables.mla_hopper_config("sm90", BF16, FLOAT8, 512, 64, 128) is None
    assert attention_tables.mla_hopper_config("sm90", BF16, BF16, 256, 64, 128) is None


def test_rows_that_are_not_aligned_are_left_to_the_portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q_nope, q_rope, cache = rows(128, BF16)
    assert not decode(monkeypatch, "sm90", q_nope, q_rope, torch.zeros(4, 580, dtype=BF16)[:, :576])
    assert not decode(monkeypatch, "sm90", q_nope, q_rope, torch.zeros(4 * 576 + 1, dtype=BF16)[1:].view(4, 576))
    packed = torch.zeros(1, 128, 577, dtype=BF16)
    assert not decode(monkeypatch, "sm90", packed[..., :512], packed[..., 512:576], cache)
    packed = torch.zeros(1, 128, 576, dtype=BF16)
    assert decode(monkeypatch, "sm90", packed[..., :512], packed[..., 512:], cache)


def test_a_plain_launch_needs_strides_that_are_multiples_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    q_nope, q_rope, _ = rows(128, BF16)
    cache = torch.zeros(4, 584, dtype=BF16)[:, :576]
    assert decode(monkeypatch, "sm90", q_nope, q_rope, cache)
    monkeypatch.setattr(launch, "use_plain_launch", lambda: True)
    assert not decode(monkeypatch, "sm90", q_nope, q_rope, cache)
    assert decode(monkeypatch, "sm90", *rows(128, BF16))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.label) for case in mla.AOT if case.label.startswith("hopper")])
def test_matrix_instructions_stay_asynchronous(case: AotCase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(CACHE))
    compiled: Any = case.kernel.compile_for(TARGETS["sm90"], case, "sm90")
    source = tmp_path / "kernel.ptx"
    source.write_text(compiled.asm["ptx"])
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [str(assembler), "-v", "--gpu-name=sm_90a", str(source), "-o", str(tmp_path / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "serialized" not in said, said
    assert compiled.asm["ptx"].count("cp.async.cg.shared.global") >= 36, "rows are not copied 16 bytes at a time"
