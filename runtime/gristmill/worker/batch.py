"""What one forward pass works on: the rows of a Step with their tokens, positions and KV slots looked up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(slots=True)
class ForwardBatch:
    """Row r is request req_slots[r] at positions [kv_lens[r] - q_lens[r], kv_lens[r]); tokens of all rows lie one after another.

    Tensors are int32 on the model's device; the `host_` arrays hold the same numbers for planning. `req_to_token[slot, p]` is the KV slot
    of position p. `out_slots` are the KV slots of this batch's own tokens. The `window_` tensors are the same for the pool of the
    sliding-window layers, None where they share the full pool; what lies below the window is stale there. `attention` is filled by
    AttentionBackend.prepare.
    """

    step: int
    num_tokens: int
    is_decode: bool  # every row has exactly one token
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: torch.Tensor
    req_slots: torch.Tensor
    q_lens: torch.Tensor
    kv_lens: torch.Tensor
    req_to_token: torch.Tensor
    host_q_lens: np.ndarray
    host_kv_lens: np.ndarray
    window_out_slots: torch.Tensor | None = None
    window_req_to_token: torch.Tensor | None = None
    attention: Any = None
