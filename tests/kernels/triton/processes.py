"""Starting Python processes of their own for tests of the Triton family."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# Compiled kernels are kept between runs; their names are hashes of source, options and compiler.
CACHE = ROOT / "build" / "triton-cache"


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, so that the same packages are found, with the kernels' cache inside the tree."""
    paths = os.pathsep.join(filter(None, sys.path))
    return os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(CACHE), "CUDA_VISIBLE_DEVICES": ""} | extra
