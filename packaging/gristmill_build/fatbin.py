"""Which GPU code a shared object holds, read from the container that nvcc embeds in it; cuobjdump's listing drops the suffix of sm_90a."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of what follows it
_ENTRY = struct.Struct("<HHIQ12xI8xI")  # kind, version, size of this header, size of the payload, architecture, flags
_PTX, _ELF = 1, 2
_SUFFIX = {0: "", 0x100000: "a", 0x200000: "f"}


def images(library: Path) -> list[frozenset[str]]:
    """The images of each container, one container per source file: sm_90a for compiled code, compute_100 for PTX."""
    data = section(library.read_bytes(), b".nv_fatbin")
    found, offset = [], 0
    while offset + _CONTAINER.size <= len(data):
        magic, _, header, size = _CONTAINER.unpack_from(data, offset)
        if magic != _MAGIC:  # padding
            offset += 8
            continue
        found.append(frozenset(_entries(data[offset + header : offset + header + size])))
        offset += header + size + -(header + size) % 8
    return found


def _entries(data: bytes) -> Iterator[str]:
    offset = 0
    while offset + _ENTRY.size <= len(data):
        kind, _, header, size, arch, flags = _ENTRY.unpack_from(data, offset)
        if kind in (_PTX, _ELF):
            yield f"{'compute' if kind == _PTX else 'sm'}_{arch}{_SUFFIX.get(flags & 0x300000, '?')}"
        offset += header + size


def section(elf: bytes, name: bytes) -> bytes:
    """The content of a section of a 64-bit little-endian ELF file; empty where there is none."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return b""
    table, size, count, names = struct.unpack_from("<Q", elf, 40)[0], *struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<II16xQQ", elf, table + index * size) for index in range(count)]  # name, type, offset, size
    strings = headers[names][2]
    for text, _, offset, length in headers:
        begin = strings + text
        if elf[begin : elf.index(b"\0", begin)] == name:
            return elf[offset : offset + length]
    return b""
