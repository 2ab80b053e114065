"""The order of sampling: logit_bias, penalties, mask, min_tokens ban, temperature, top-k, top-p, min-p; keyed by (seed, position).

Everything up to the ban changes the logits in place, the rest is one op of gristmill_kernels. Nothing here waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch

from gristmill.errors import ProtocolError
from gristmill.messages import Mask
from gristmill.sampling.state import SamplingState, SlotState
from gristmill.worker.staging import to_device
from gristmill_kernels import sampling as kernels

_NEG_INF = float("-inf")


def sample(
    logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, state: SamplingState, allowed: dict[int, np.ndarray] | None = None
) -> torch.Tensor:
    """Draw one token per row and count it.

    Args:
        logits: float32 [rows, vocab]; changed.
        slots: int32 [rows], request slot of each row.
        positions: int32 [rows], position of the new token.
        allowed: row -> int32 [ceil(vocab / 32)], the bits of the tokens that the grammar allows.

    Returns:
        int32 [rows] on the device of the logits; -1 where the row has no valid distribution.
    """
    special = np.flatnonzero(state.special[slots])
    if special.size:
        states = {int(row): state.of(int(slots[row])) for row in special}
        _apply_bias(logits, states)
        _apply_penalties(logits, states)
    if allowed:
        _apply_mask(logits, allowed)
    if special.size:
        _ban(logits, states, positions)
    temperature = state.temperature[slots]
    if not temperature.any():
        ids = kernels.greedy(logits)
    else:
        columns = (temperature, state.top_k[slots], state.top_p[slots], state.min_p[slots], state.seeds[slots], positions)
        ids = kernels.sample(logits, *to_device(columns, logits.device.type))
    if special.size:
        _count(ids, states)
    return ids


def _apply_bias(logits: torch.Tensor, states: dict[int, SlotState]) -> None:
    counts = np.zeros(logits.shape[0] + 1, np.int32)
    for row, slot in states.items():
        counts[row + 1] = slot.bias_ids.size
    if counts.any():
        ordered = [states[row] for row in sorted(states)]
        ids, values = (np.concatenate([getattr(slot, name) for slot in ordered]) for name in ("bias_ids", "bias_values"))
        kernels.apply_logit_bias(logits, *to_device([counts.cumsum(dtype=np.int32), ids, values], logits.device.type))


def _apply_penalties(logits: torch.Tensor, states: dict[int, SlotState]) -> None:
    for row, slot in states.items():
        if slot.penalties is not None and slot.prompt_mask is not None and slot.output_counts is not None:
            kernels.apply_penalties(logits[row : row + 1], slot.prompt_mask, slot.output_counts, *slot.penalties)


def _apply_mask(logits: torch.Tensor, allowed: dict[int, np.ndarray]) -> None:
    """One mask for all rows: those that are free have every bit set."""
    bits = np.full((logits.shape[0], -(-logits.shape[1] // 32)), -1, np.int32)
    for row, words in allowed.items():
        bits[row] = words
    kernels.apply_token_bitmask(logits, to_device([bits], logits.device.type)[0])


def _ban(logits: torch.Tensor, states: dict[int, SlotState], positions: np.ndarray) -> None:
    for row, slot in states.items():
        if int(positions[row]) - slot.n_prompt < slot.sampling.min_tokens:
            logits[row].index_fill_(0, slot.banned, _NEG_INF)


def _count(ids: torch.Tensor, states: dict[int, SlotState]) -> None:
    """Add the drawn tokens to the counts that penalties go by; an invalid one counts for nothing."""
    for row, slot in states.items():
        if slot.output_counts is not None:
            drawn = ids[row : row + 1]
            slot.output_counts[0].index_add_(0, drawn.clamp(min=0), (drawn >= 0).to(torch.int32))


def allowed_rows(mask: Mask, row_of: dict[int, int], vocab_size: int) -> dict[int, np.ndarray]:
    """The bitmask of each masked row, int32 [ceil(vocab / 32)]. `row_of` maps rows of the step to rows of the logits."""
    words = -(-vocab_size // 32)
    if mask.bits.size != words * mask.rows.size:
        raise ProtocolError(f"Mask of step {mask.step} holds {mask.bits.size} words for {mask.rows.size} rows of {words} words")
    bits = np.asarray(mask.bits, np.int32).reshape(-1, words)
    return {row_of[int(row)]: bits[i] for i, row in enumerate(mask.rows) if int(row) in row_of}
