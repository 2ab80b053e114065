"""What one forward pass works on: the rows of a Step with their tokens, positions and KV slots looked up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_UNSET = torch.empty(0, dtype=torch.int32)


@dataclass(slots=True)
class ForwardBatch:
    """Row r is request req_slots[r] at positions [kv_lens[r] - q_lens[r], kv_lens[r]); tokens of all rows lie one after another.

    Tensors are int32 on the model's device; the `host_` arrays hold the same numbers for planning. `req_to_token[slot, p]` is the KV slot
    of position p. `out_slots` are the KV slots of this batch's own tokens. The `window_` tensors are the same for the pool of the
    sliding-window layers, None where they share the full pool; what lies below the window is stale there. RequestTables.look_up fills
    in what depends on the tables' contents (input_ids, positions and out_slots), AttentionBackend.prepare fills in `attention`.

    A batch of a captured graph (see worker/graphs.py) has only padding rows in its host arrays: what it will run on is known to the
    device alone. A padding row has length 0 and KV slot -1.
    """

    step: int
    num_tokens: int
    is_decode: bool  # every row has exactly one token
    req_slots: torch.Tensor
    q_lens: torch.Tensor
    kv_lens: torch.Tensor
    req_to_token: torch.Tensor
    host_req_slots: np.ndarray
    host_q_lens: np.ndarray
    host_kv_lens: np.ndarray
    owners: torch.Tensor | None = None  # request slot of every token; None in a decode batch, where it is req_slots
    positions: torch.Tensor = field(default=_UNSET)
    input_ids: torch.Tensor = field(default=_UNSET)
    out_slots: torch.Tensor = field(default=_UNSET)
    window_out_slots: torch.Tensor | None = None
    window_req_to_token: torch.Tensor | None = None
    attention: Any = None
