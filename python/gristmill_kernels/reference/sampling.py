"""Token choice from logits in plain PyTorch, float64. The random numbers are Philox4x32-10 (Salmon et al. 2011), counted by position and
token id, so a draw depends on nothing but the row, its seed and its position."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
# Logits worked on at once.
_MAX_SCORES = 1 << 20


def _high_low(a: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32x32-bit product, from two 16-bit halves so that int64 never overflows."""
    low_product = (a & 0xFFFF) * multiplier
    high_product = (a >> 16) * multiplier + (low_product >> 16)
    return high_product >> 16, ((high_product & 0xFFFF) << 16) | (low_product & 0xFFFF)


def philox_uniform(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """float64 [B, V] in (0, 1): u of token v is lane v % 4 of block (position, v // 4, 0, 0) under key (seed low, seed high)."""
    blocks = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=seeds.device)
    c1 = blocks.expand(len(seeds), -1)
    c0, c2, c3 = torch.zeros_like(c1) + (positions.long()[:, None] & _MASK), torch.zeros_like(c1), torch.zeros_like(c1)
    key_0, key_1 = seeds[:, None] & _MASK, (seeds[:, None] >> 32) & _MASK
    for _ in range(10):
        high_0, low_0 = _high_low(c0, _MULTIPLIER_0)
        high_1, low_1 = _high_low(c2, _MULTIPLIER_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0, key_1 = (key_0 + _WEYL_0) & _MASK, (key_1 + _WEYL_1) & _MASK
    words = torch.stack([c0, c1, c2, c3], dim=2).flatten(1)[:, :vocab_size]
    return (words.double() + 0.5) * 2.0**-32


def _invalid(logits: Tensor) -> Tensor:
    """Rows [B] from which nothing can be drawn: any NaN or +inf, or all -inf."""
    return logits.isnan().any(-1) | (logits == float("inf")).any(-1) | (logits == float("-inf")).all(-1)


def greedy(out: Tensor, logits: Tensor) -> None:
    if logits.shape[0] == 0:
        return
    # argmax promises no particular winner among equals; the first index where the maximum is reached is asked for.
    best = (logits == logits.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)
    out.copy_(best.masked_fill(_invalid(logits), -1))


def sample(
    out: Tensor, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor
) -> None:
    greedy(out, logits)
    rows_at_once = max(1, _MAX_SCORES // logits.shape[1])
    for begin in range(0, len(out), rows_at_once):
        rows = slice(begin, begin + rows_at_once)
        scaled = scale_logits(logits[rows], temperature[rows])
        kept = surviving(scaled, top_k[rows], top_p[rows], min_p[rows])
        noise = -torch.log(-torch.log(philox_uniform(seeds[rows], positions[rows], logits.shape[1])))
        drawn = (scaled + noise).masked_fill(~kept, float("-inf")).argmax(-1).int()
        best = out[rows]
        chosen = torch.where((temperature[rows] <= 0) | (best < 0), best, drawn)
        best.copy_(chosen.masked_fill(temperature[rows].isnan(), -1))


def scale_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """float64 [B, V]: (x - max) / temperature, with -inf kept so that an infinite temperature does not revive it."""
    wide = logits.double()
    scaled = (wide - wide.amax(-1, keepdim=True)) / temperature.double()[:, None]
    return scaled.masked_fill(wide == float("-inf"), float("-inf"))


def surviving(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool [B, V]: tokens left by top-k, then top-p over the renormalised rest, then min-p. Equal logits rank by lowest index."""
    vocab_size = scaled.shape[-1]
    ranked, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=scaled.device)
    limit = torch.where(top_k > 0, top_k, vocab_size)[:, None]
    kept = (ranked > float("-inf")) & (rank < limit)
    probability = torch.where(kept, ranked.exp(), 0.0)
    mass_before = (probability.cumsum(-1) - probability) / probability.sum(-1, keepdim=True)
    within = (mass_before < top_p.double()[:, None]) | (rank == 0)
    kept &= within | ~(top_p < 1)[:, None]
    likely = ranked.exp() >= min_p.double().clamp(max=1.0)[:, None]
    kept &= likely | ~(min_p > 0)[:, None]
    return torch.zeros_like(kept).scatter(-1, order, kept)


def apply_logit_bias(logits: Tensor, indptr: Tensor, ids: Tensor, values: Tensor) -> None:
    bounds = indptr.tolist()
    if bounds[-1] > len(ids):
        raise RuntimeError(f"apply_logit_bias: indptr ends at {bounds[-1]}, but ids has {len(ids)} entries")
    for row in range(logits.shape[0]):
        for token, value in zip(ids[bounds[row] : bounds[row + 1]].tolist(), values[bounds[row] : bounds[row + 1]].tolist()):
            if 0 <= token < logits.shape[1]:
                logits[row, token] = logits[row, token].double() + value


def apply_penalties(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> None:
    wide = logits.double()
    produced = output_counts > 0
    factor = repetition.double()[:, None]
    repeated = torch.where(wide > 0, wide / factor, wide * factor)
    wide = torch.where(prompt_mask | produced, repeated, wide)
    wide = wide - frequency.double()[:, None] * output_counts - presence.double()[:, None] * produced
    logits.copy_(wide)


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    bits = bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bitmask.device) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))
