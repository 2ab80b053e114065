"""Compiler options and block sizes per architecture: a rule for machines nobody measured, and over it what benchmarks/tune_triton.py
measured and wrote to tuned.json ({arch: {table: {size: {name: value}}}}; the entry of the smallest listed size that is not below the
wanted one counts, else the largest)."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from gristmill_kernels.triton.launch import Facts, Options, next_power_of_2

TUNED_FILE = Path(__file__).parent / "tuned.json"

# Rows shorter than this many elements share a program.
SHORT_ROW = 1024
# Elements of a row that one lane should hold: two 16-byte loads of a 16-bit type.
_ELEMENTS_PER_LANE = 16
MAX_LANES = 1024


@functools.cache
def _tuned() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    return json.loads(TUNED_FILE.read_text()) if TUNED_FILE.is_file() else {}


@functools.cache
def tuned(table: str, arch: str, size: int) -> dict[str, Any]:
    """What was measured for this table, architecture and size; empty when nothing was. An unmeasured arch takes its nearest relative's."""
    by_arch = _tuned()
    for candidate in (arch, _RELATIVES.get(arch)):
        entries = by_arch.get(candidate or "", {}).get(table)
        if entries:
            sizes = sorted(map(int, entries))
            return entries[str(next((listed for listed in sizes if listed >= size), sizes[-1]))]
    return {}


_RELATIVES = {"gfx90a": "gfx942", "gfx950": "gfx942", "sm100": "sm90", "sm103": "sm90", "sm120": "sm89", "sm86": "sm80", "sm89": "sm80"}


def options(table: str, arch: str, size: int, default: Options = Options()) -> Options:
    """`default` with the measured num_warps and num_stages put in its place."""
    found = tuned(table, arch, size)
    return default._replace(**{name: found[name] for name in ("num_warps", "num_stages") if name in found})


def row_block(width: int) -> tuple[int, int]:
    """(columns, rows) of one program over rows of `width` elements; both powers of two."""
    columns = next_power_of_2(width)
    return columns, max(1, SHORT_ROW // columns)


@functools.cache
def row_options(table: str, facts: Facts, block: int) -> Options:
    """Options of a kernel that holds `block` elements per program in registers and does little with them."""
    warps = max(1, min(block // (_ELEMENTS_PER_LANE * facts.warp_size), MAX_LANES // facts.warp_size))
    return options(table, facts.arch, block, Options(num_warps=1 << (warps.bit_length() - 1), num_stages=1))


def aot_facts(arch: str) -> Facts:
    """Facts of an architecture that need not be here, as far as compiling depends on them."""
    return Facts(arch, 100, 64 if arch.startswith("gfx9") else 32)
