"""Choosing experts in plain PyTorch, float64, and sorting tokens by expert."""

from __future__ import annotations

import torch
from torch import Tensor

NONE = float("-inf")


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b, and 0 for equal infinities."""
    return torch.where(a == b, 0.0, a - b)


def _scores(logits: Tensor, sigmoid: bool) -> Tensor:
    """What weighs an expert, [T, E]; 0 for NaN and -inf."""
    usable = logits > NONE
    kept = logits.masked_fill(~usable, NONE)
    if sigmoid:
        return torch.sigmoid(kept)
    shares = torch.where(usable, _difference(kept, kept.amax(-1, keepdim=True)).exp(), 0.0)
    return shares / shares.sum(-1, keepdim=True)


def _renormalized(logits: Tensor, sigmoid: bool) -> Tensor:
    """Weights [T, K] that sum to 1; every logit less the largest, so that tiny scores keep their digits."""
    lowered = logits.clamp(max=0) if sigmoid else logits
    terms = _difference(lowered, lowered.amax(-1, keepdim=True)).exp()
    if sigmoid:
        terms = terms / (1 + (-logits.abs()).exp())
    terms = terms.masked_fill(logits == NONE, 0.0)
    return terms / terms.sum(-1, keepdim=True)


def _in_best_groups(choice: Tensor, num_groups: int, topk_groups: int, two: bool) -> Tensor:
    """bool [T, E]. A group counts as its best expert, or the sum of its two best; equal groups rank by number."""
    best = choice.unflatten(1, (num_groups, -1)).topk(min(2, choice.shape[1] // num_groups) if two else 1, -1).values
    values = torch.where(best[..., -1] > NONE, best.sum(-1), best[..., 0])
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :topk_groups]
    kept = torch.zeros_like(values, dtype=torch.bool).scatter(1, order, True)
    return kept.repeat_interleave(choice.shape[1] // num_groups, 1)


def grouped_topk(
    weights: Tensor,
    ids: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    num_groups: int,
    topk_groups: int,
    scaling: float,
    sigmoid: bool,
    renormalize: bool,
) -> None:
    wide = logits.double()
    scores = _scores(wide, sigmoid)
    choice = wide if bias is None else torch.where(wide > NONE, scores + bias.double(), NONE)
    choice = torch.where(choice > NONE, choice, NONE)
    choice = choice.masked_fill(~_in_best_groups(choice, num_groups, topk_groups, bias is not None), NONE)
    values, order = (x[:, : ids.shape[1]] for x in torch.sort(choice, dim=-1, descending=True, stable=True))
    chosen = values > NONE
    ids.copy_(order.masked_fill(~chosen, -1))
    taken = wide.gather(1, order).masked_fill(~chosen, NONE)
    shares = _renormalized(taken, sigmoid) if renormalize else scores.gather(1, order)
    weights.copy_((shares * scaling).masked_fill(~chosen, 0.0))


def topk_softmax(weights: Tensor, ids: Tensor, logits: Tensor, renormalize: bool) -> None:
    grouped_topk(weights, ids, logits, None, 1, 1, 1.0, False, renormalize)


def topk_sigmoid(weights: Tensor, ids: Tensor, logits: Tensor, bias: Tensor | None, renormalize: bool) -> None:
    grouped_topk(weights, ids, logits, bias, 1, 1, 1.0, True, renormalize)


def align_block_size(
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    block_size: int,
) -> None:
    ids = topk_ids.reshape(-1).long()
    if expert_map is not None:
        there = (ids >= 0) & (ids < len(expert_map))
        ids = torch.where(there, torch.cat([expert_map, expert_map.new_tensor([-1])])[torch.where(there, ids, -1)], -1)
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    order = torch.sort(ids, stable=True).indices
    counts = torch.bincount(ids, minlength=num_experts + 1)[:num_experts]
    blocks = (counts + block_size - 1) // block_size
    order, experts = order[: int(counts.sum())], torch.repeat_interleave(counts)
    rank = torch.arange(len(order), device=ids.device) - (counts.cumsum(0) - counts)[experts]
    owners = torch.repeat_interleave(blocks)
    sorted_token_ids.fill_(topk_ids.numel())
    sorted_token_ids[(blocks.cumsum(0) - blocks)[experts] * block_size + rank] = order.int()
    expert_ids.fill_(-1)
    expert_ids[: len(owners)] = owners.int()
    num_tokens_post_padded.fill_(len(owners) * block_size)
