"""How much of a GPU's memory the KV pool may have: what is left of the engine's share after a rehearsal of the largest steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gristmill.errors import ModelError

# CUDA context growth, the libraries' workspaces, what the allocator loses to fragments
_RESERVE_BYTES = 512 << 20


def room_for_pool(device: str, fraction: float, rehearse: Callable[[], None]) -> int:
    """Bytes for keys and values, so that the engine takes at most `fraction` of the card in all.

    `rehearse` runs the largest steps over a pool that is gone when it returns; what they needed beyond what they left behind is kept free,
    once more for the memory of captured graphs. Raises ModelError when that leaves nothing.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    rehearse()
    torch.cuda.synchronize(device)
    transient = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    room = int(total * fraction) - used - transient - _RESERVE_BYTES
    if room <= 0:
        raise ModelError(
            f"no GPU memory is left for keys and values: of {total / 2**30:.1f} GiB, --mem-fraction {fraction:g} may be used; "
            f"{used / 2**30:.1f} GiB are taken and the largest step needs {transient / 2**30:.1f} GiB (lower --chunk-tokens, --max-running)"
        )
    return room
