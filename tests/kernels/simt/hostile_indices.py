"""The emulated index ops on tensors that hold nonsense: `python -m tests.kernels.simt.hostile_indices LIBRARY SEED`."""

from __future__ import annotations

import sys
from pathlib import Path

from gristmill_kernels import dispatch
from tests.kernels import hostile_indices
from tests.kernels.simt.suite import hide_cpu_library, open_emulated

if __name__ == "__main__":
    hide_cpu_library()
    open_emulated(Path(sys.argv[1]))
    seed, rounds = int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 30
    assert hostile_indices.check(lambda name, _: dispatch.overload(name, "native"), seed, rounds)
