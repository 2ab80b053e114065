"""Block sizes of the attention kernels: what was measured per architecture, and a rule for everything that was not.
`benchmarks/tune_triton.py --kernels attention` tries the candidates below and writes the best into tables.TUNED_FILE.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from gristmill_kernels.schema import SPLIT_TOKENS
from gristmill_kernels.triton import tables
from gristmill_kernels.triton.launch import Options, next_power_of_2


class DecodeConfig(NamedTuple):
    """`split_tokens` and `block_n` are part of what a result is, so they depend on head sizes and dtypes and on nothing of the batch."""

    block_n: int
    split_tokens: int
    programs_per_processor: int
    options: Options


class ExtendConfig(NamedTuple):
    """`block_n` is part of what a result is; `head_major` runs all tiles of a head before the next head, which keeps its keys in L2."""

    block_m: int
    block_n: int
    head_major: bool
    options: Options


class MlaConfig(NamedTuple):
    """All but `programs_per_processor` are part of what a result is. With `hopper` blocks are 64 by 64, and 8 warps share a program."""

    block_m: int
    block_n: int
    value_parts: int
    split_tokens: int
    programs_per_processor: int
    options: Options
    hopper: bool = False  # the kernel of mla_hopper.py


# What the tuner tries, by kernel.
DECODE_CANDIDATES = tuple(
    DecodeConfig(block_n, split_tokens, programs, Options(num_warps, num_stages))
    for block_n, num_warps, num_stages, split_tokens, programs in (
        (128, 4, 2, 256, 64), (128, 4, 2, 512, 64), (128, 4, 2, 1024, 64), (64, 4, 3, 512, 64), (64, 4, 2, 512, 64), (64, 4, 2, 1024, 64),
        (64, 4, 3, 1024, 64), (32, 4, 4, 1024, 64), (32, 4, 3, 1024, 64), (64, 2, 2, 512, 64), (64, 2, 2, 1024, 64), (64, 2, 3, 512, 64),
        (128, 8, 2, 512, 64), (16, 1, 4, 512, 64),
    )
)  # fmt: skip
EXTEND_CANDIDATES = tuple(
    ExtendConfig(block_m, block_n, head_major, Options(num_warps, num_stages))
    for block_m, block_n, num_warps, num_stages, head_major in (
        (128, 64, 8, 3, True), (128, 64, 8, 2, True), (128, 128, 8, 2, True), (128, 128, 8, 3, True), (64, 64, 4, 2, True),
        (64, 64, 4, 3, True), (128, 32, 4, 3, True), (128, 64, 8, 4, True), (128, 64, 8, 3, False), (128, 128, 8, 2, False),
    )
)  # fmt: skip
# By number of heads.
MLA_CANDIDATES = {
    heads: tuple(
        MlaConfig(block_m, block_n, value_parts, split_tokens, 64, Options(num_warps, num_stages))
        for block_m, block_n, value_parts, num_warps, num_stages, split_tokens in tried
    )
    for heads, tried in {
        16: (
            (16, 32, 1, 4, 2, 512), (16, 32, 1, 4, 3, 512), (16, 16, 1, 4, 4, 512), (16, 32, 1, 8, 2, 512), (16, 32, 1, 8, 3, 512),
            (16, 64, 1, 8, 2, 512), (16, 64, 1, 8, 2, 1024), (16, 32, 1, 4, 3, 1024), (16, 32, 1, 8, 3, 1024), (16, 32, 1, 4, 2, 256),
            (16, 32, 1, 4, 2, 1024), (16, 64, 1, 8, 2, 2048),
        ),
        128: (
            (64, 64, 1, 8, 2, 1024), (64, 32, 1, 8, 2, 1024), (64, 32, 1, 8, 3, 1024), (64, 64, 1, 8, 2, 2048), (64, 64, 1, 8, 1, 1024),
            (128, 32, 2, 8, 2, 1024), (128, 32, 2, 8, 2, 2048), (128, 64, 2, 8, 1, 1024), (64, 64, 2, 4, 2, 1024), (64, 32, 2, 4, 2, 1024),
        ),
    }.items()
}  # fmt: skip
MLA_HOPPER_CANDIDATES = tuple(MlaConfig(64, 64, 1, split_tokens, 16, Options(8, 1), True) for split_tokens in (512, 1024, 1280, 2048))


@functools.cache
def decode_config(arch: str, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, head_dim_v: int, group: int) -> DecodeConfig:
    """Configuration of a decode, by facts that do not depend on the batch."""
    measured = _measured("decode", arch, dtype, cache_dtype, head_dim, head_dim_v)
    if measured and group <= 16:
        options = Options(measured["num_warps"], measured["num_stages"])
        return DecodeConfig(measured["block_n"], measured["split_tokens"], measured["programs_per_processor"], options)
    amd = arch.startswith("gfx")
    num_stages = 2 if amd else 3
    width = next_power_of_2(head_dim) + next_power_of_2(head_dim_v)
    row_bytes = width * max(cache_dtype.itemsize, dtype.itemsize)
    budget = 32_768 if amd else 98_304
    block_n = 64
    while block_n > 16 and block_n * row_bytes * (num_stages - amd) > budget:
        block_n //= 2
    if cache_dtype.itemsize == 1:  # widened in registers
        block_n = min(block_n, 32)
    wide = max(head_dim, head_dim_v) > 256 or group > 32
    return DecodeConfig(block_n, SPLIT_TOKENS, 64, Options(8 if wide else 4, num_stages))


@functools.cache
def extend_config(
    arch: str, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, head_dim_v: int, ragged: bool = False
) -> ExtendConfig:
    """Configuration of an extend, by facts that do not depend on the batch."""
    measured = _measured("ragged" if ragged else "extend", arch, dtype, cache_dtype, head_dim, head_dim_v)
    if measured:
        options = Options(measured["num_warps"], measured["num_stages"])
        return ExtendConfig(measured["block_m"], measured["block_n"], measured["head_major"], options)
    amd = arch.startswith("gfx")
    width = max(next_power_of_2(head_dim), next_power_of_2(head_dim_v))
    if arch == "cpu":
        return ExtendConfig(32, 32, True, Options(4, 2))
    if dtype.itemsize == 4:
        return ExtendConfig(32 if width <= 128 else 16, 32 if width <= 128 else 16, not amd, Options(4, 1))
    if width <= 64:
        return ExtendConfig(128, 64, not amd, Options(4, 2 if amd else 3))
    if width <= 128:
        return ExtendConfig(128, 32 if amd else 64, not amd, Options(4 if amd else 8, 2 if amd else 3))
    if width <= 256:
        return ExtendConfig(64, 32, not amd, Options(4, 1 if amd else 2))
    return ExtendConfig(32 if amd else 64, 16 if amd else 32, not amd, Options(4 if amd else 8, 1 if amd else 2))


@functools.cache
def mla_config(arch: str, dtype: torch.dtype, cache_dtype: torch.dtype, latent: int, rope: int, num_heads: int) -> MlaConfig:
    """Configuration of a latent decode, by facts that do not depend on the batch or on the number of query rows."""
    large = num_heads > 32
    measured = tables.tuned("mla", arch, 128 if large else 16) if dtype.itemsize == 2 and cache_dtype is dtype and latent == 512 else {}
    if measured:
        options = Options(measured["num_warps"], measured["num_stages"])
        fields = ("block_m", "block_n", "value_parts", "split_tokens", "programs_per_processor")
        return MlaConfig(**{name: measured[name] for name in fields}, options=options)
    amd = arch.startswith("gfx")
    if dtype.itemsize == 4 or arch == "cpu":
        return MlaConfig(16, 16, 1, SPLIT_TOKENS, 64, Options(4, 1))
    if amd:
        return MlaConfig(*((32, 16, 2) if large else (16, 32, 1)), 2 * SPLIT_TOKENS, 64, Options(8 if large else 4, 1))
    if large:
        return MlaConfig(128, 32, 2, 4 * SPLIT_TOKENS, 64, Options(8, 2))
    return MlaConfig(16 if num_heads <= 16 else 32, 32, 1, 2 * SPLIT_TOKENS, 64, Options(4 if num_heads <= 16 else 8, 2))


@functools.cache
def mla_hopper_config(arch: str, dtype: torch.dtype, cache_dtype: torch.dtype, latent: int, rope: int, num_heads: int) -> MlaConfig | None:
    """The same for mla_hopper.py; None where its kernel cannot run, or where a tile of 64 rows would be mostly empty."""
    if arch != "sm90" or dtype.itemsize != 2 or cache_dtype is not dtype or (latent, rope) != (512, 64) or num_heads <= 32:
        return None
    split_tokens = tables.tuned("mla_hopper", arch, num_heads).get("split_tokens", 4 * SPLIT_TOKENS)
    return MlaConfig(64, 64, 1, split_tokens, 16, Options(8, 1), True)


def _measured(table: str, arch: str, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, head_dim_v: int) -> dict[str, Any]:
    """The tuner's entry for exactly this head size, for 16-bit data; empty where nothing was measured."""
    if dtype.itemsize != 2 or cache_dtype is not dtype or head_dim != head_dim_v:
        return {}
    found = tables.tuned(table, arch, head_dim)
    return found if found.get("head_dim") == head_dim else {}


def entry_of(config: DecodeConfig | ExtendConfig | MlaConfig, head_dim: int) -> dict[str, Any]:
    """A configuration as an entry of the tuned table."""
    fields = {name: value for name, value in config._asdict().items() if name != "options"}
    return {"head_dim": head_dim, **fields, "num_warps": config.options.num_warps, "num_stages": config.options.num_stages}
