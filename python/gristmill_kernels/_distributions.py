"""Whether this package was installed by one distribution, as it must be: kernels-cpu, -cuda, -rocm and -metal own the same files.
Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

VARIANTS = ("kernels_cpu", "kernels_cuda", "kernels_rocm", "kernels_metal")


def installed_variants(site: Path) -> list[str]:
    """Distributions of this package with metadata in directory `site`, as pip spells them, for example `kernels-cpu 0.1.0`."""
    found = []
    try:
        names = sorted(os.listdir(site))
    except OSError:  # inside a zip file
        return []
    for name in names:
        stem, separator, _ = name.partition(".dist-info")
        distribution, _, version = stem.partition("-")
        if separator and distribution in VARIANTS:
            found.append(f"{distribution.replace('_', '-')} {version}")
    return found


def refuse_two_variants(site: Path) -> None:
    """Raise ImportError when two variants are installed over each other: their files are a mixture of both."""
    found = installed_variants(site)
    if len(found) > 1:
        names = " ".join(item.split()[0] for item in found)
        raise ImportError(
            f"{' and '.join(found)} are both installed in {site} and have overwritten each other's files: "
            f"run `pip uninstall -y {names}` and install the one that you want"
        )
