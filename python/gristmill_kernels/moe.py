"""Mixture of experts: which experts a token goes to and with what weights, and the tokens of every expert in blocks. A row of logits that
holds a NaN or an infinity affects no other row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gristmill_kernels._registry import select
from gristmill_kernels.checks import (
    check_float,
    check_vector,
    is_dense,
    refuse_device,
    refuse_dtype,
    refuse_shape,
    refuse_value,
    same_device,
)
from gristmill_kernels.schema import MAX_CHOSEN_EXPERTS, MAX_EXPERT_GROUPS, MAX_EXPERTS, device_of, norm_key


def _chosen(function: str, argument: str, tensor: Tensor | None, dtype: torch.dtype, logits: Tensor, top_k: int) -> Tensor:
    """An output [T, K], allocated when None."""
    shape = (logits.shape[0], top_k)
    if tensor is None:
        return torch.empty(shape, dtype=dtype, device=logits.device)
    if tensor.dtype is not dtype:
        raise refuse_dtype(function, argument, tensor, "float32" if dtype is torch.float32 else "int32")
    if tensor.shape != shape or not is_dense(tensor):
        raise refuse_shape(function, argument, tensor, f"[T, K] = {shape}, with contiguous rows")
    if not same_device(tensor, logits):
        raise refuse_device(function, argument, tensor, logits)
    return tensor


def _checked(
    function: str, logits: Tensor, top_k: int, bias: Tensor | None, weights: Tensor | None, ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The outputs, once everything fits."""
    check_float(function, "logits", logits)
    if logits.ndim != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        raise refuse_shape(function, "logits", logits, f"[T, E] with E from 1 to {MAX_EXPERTS}")
    experts = logits.shape[1]
    if not 1 <= top_k <= min(experts, MAX_CHOSEN_EXPERTS):
        raise refuse_value(function, "top_k", top_k, f"from 1 to {min(experts, MAX_CHOSEN_EXPERTS)}")
    if bias is not None:
        if bias.dtype is not torch.float32 and bias.dtype is not torch.bfloat16:
            raise refuse_dtype(function, "bias", bias, "float32 or bfloat16")
        check_vector(function, "bias", bias, bias.dtype, experts, logits, "[E]")
    return (
        _chosen(function, "weights", weights, torch.float32, logits, top_k),
        _chosen(function, "ids", ids, torch.int32, logits, top_k),
    )


def topk_softmax(
    logits: Tensor, top_k: int, renormalize: bool, *, weights: Tensor | None = None, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The `top_k` most likely experts of every token, best first, and their softmax probabilities.

    An expert whose logit is NaN or -inf is never chosen and has no share of the softmax. +inf is taken as the limit: experts at +inf share
    all of the weight evenly, others have weight 0. Experts are compared by their logits, so ids are exact; equals go by lowest id.

    Args:
        logits: [T, E] float32, float16 or bfloat16, E from 1 to 1024; any row stride.
        top_k: experts per token, K, from 1 to 32 and at most E.
        renormalize: the weights of a token sum to 1; otherwise the softmax is over all E experts.
        weights: [T, K] float32; any row stride. Allocated when None.
        ids: [T, K] int32; any row stride. Allocated when None.

    Returns:
        `weights` and `ids`. Where fewer than K experts can be chosen, the last places have id -1 and weight 0.

    Raises:
        TypeError, ValueError: a dtype, shape, stride, value or device that does not fit, in one sentence.

    Source: Shazeer et al., "Outrageously Large Neural Networks" (2017); Mixtral and Qwen-MoE model code for `renormalize`.

    Example:
    >>> weights, ids = topk_softmax(torch.tensor([[0.0, 2.0, 2.0, float("nan")]]), 2, renormalize=True)
    >>> weights.tolist(), ids.tolist()
    ([[0.5, 0.5]], [[1, 2]])
    """
    weights, ids = _checked("topk_softmax", logits, top_k, None, weights, ids)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.topk_softmax(weights, ids, logits, renormalize)
    else:
        select("topk_softmax", norm_key(logits))(weights, ids, logits, renormalize)
    return weights, ids


def topk_sigmoid(
    logits: Tensor,
    top_k: int,
    renormalize: bool,
    *,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The `top_k` experts with the highest sigmoid score (plus bias) of every token, best first, and their scores.

    `bias` decides who is chosen and has no part in the weights. An expert is never chosen when its logit or its biased score is NaN or
    -inf; a logit of +inf scores 1. Without a bias experts are compared by their logits, so ids are exact; with one by
    float32(score + bias), so that two within rounding of each other may change places between implementations. Equals go by lowest id.

    Args:
        logits: [T, E] float32, float16 or bfloat16, E from 1 to 1024; any row stride.
        top_k: experts per token, K, from 1 to 32 and at most E.
        renormalize: the weights of a token sum to 1, however small the scores.
        bias: [E] float32 or bfloat16, added to the scores for the choice.
        weights: [T, K] float32; any row stride. Allocated when None.
        ids: [T, K] int32; any row stride. Allocated when None.

    Returns:
        `weights` and `ids`. Where fewer than K experts can be chosen, the last places have id -1 and weight 0.

    Raises:
        TypeError, ValueError: a dtype, shape, stride, value or device that does not fit, in one sentence.

    Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024), section 3.
    """
    weights, ids = _checked("topk_sigmoid", logits, top_k, bias, weights, ids)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.topk_sigmoid(weights, ids, logits, bias, renormalize)
    else:
        select("topk_sigmoid", norm_key(logits))(weights, ids, logits, bias, renormalize)
    return weights, ids


def grouped_topk(
    logits: Tensor,
    top_k: int,
    *,
    num_groups: int,
    topk_groups: int,
    scoring: str,
    renormalize: bool,
    bias: Tensor | None = None,
    scaling: float = 1.0,
    weights: Tensor | None = None,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The `top_k` best experts of every token from its `topk_groups` best groups, best first, and their weights.

    Group g is the experts [g * E / num_groups, (g + 1) * E / num_groups). It counts as its best expert, or with a bias as the float32 sum
    of its two best biased scores (one, if only one can be chosen); equal groups go by lowest number. Experts of other groups are not
    chosen. Which experts can be chosen, how they are compared, and what infinities mean is as in `topk_softmax` and `topk_sigmoid`.

    DeepSeek-V2 is `scoring="softmax"` without bias; DeepSeek-V3 is `scoring="sigmoid"` with bias, `renormalize=True`, `scaling=2.5`.

    Args:
        logits: [T, E] float32, float16 or bfloat16, E from 1 to 1024; any row stride.
        top_k: experts per token, K, from 1 to 32 and at most E.
        num_groups: groups of equal size, from 1 to 32; divides E.
        topk_groups: groups per token, from 1 to num_groups.
        scoring: "softmax" over all E experts, or "sigmoid".
        renormalize: the weights of a token sum to `scaling`, however small the scores.
        bias: [E] float32 or bfloat16, added to the scores for the choice only.
        scaling: finite; multiplies the weights, renormalized or not.
        weights: [T, K] float32; any row stride. Allocated when None.
        ids: [T, K] int32; any row stride. Allocated when None.

    Returns:
        `weights` and `ids`. Where fewer than K experts can be chosen, the last places have id -1 and weight 0.

    Raises:
        TypeError, ValueError: a dtype, shape, stride, value or device that does not fit, in one sentence.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.2.2, "DeepSeek-V3" (2024), section 2.1.2, and their model code.
    """
    weights, ids = _checked("grouped_topk", logits, top_k, bias, weights, ids)
    if not 1 <= num_groups <= MAX_EXPERT_GROUPS or logits.shape[1] % num_groups:
        right = f"from 1 to {MAX_EXPERT_GROUPS} and a divisor of E = {logits.shape[1]}"
        raise refuse_value("grouped_topk", "num_groups", num_groups, right)
    if not 1 <= topk_groups <= num_groups:
        raise refuse_value("grouped_topk", "topk_groups", topk_groups, f"from 1 to num_groups = {num_groups}")
    if scoring not in ("softmax", "sigmoid"):
        raise refuse_value("grouped_topk", "scoring", scoring, "'softmax' or 'sigmoid'")
    if not math.isfinite(scaling):
        raise refuse_value("grouped_topk", "scaling", scaling, "finite")
    options = (num_groups, topk_groups, scaling, scoring == "sigmoid", renormalize)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.grouped_topk(weights, ids, logits, bias, *options)
    else:
        select("grouped_topk", norm_key(logits))(weights, ids, logits, bias, *options)
    return weights, ids


def max_expert_blocks(num_ids: int, num_experts: int, block_size: int) -> int:
    """Blocks that suffice for `align_block_size` whatever the ids are: what its outputs need room for.

    Args:
        num_ids: T * K, the entries of topk_ids.
        num_experts: experts that blocks are made for.
        block_size: entries of a block.

    Returns:
        The number of blocks. Every expert with ids wastes at most block_size - 1 places.

    Raises:
        ValueError: a negative number of ids, or a number of experts or a block size below 1.

    Example:
    >>> max_expert_blocks(1024, 256, 16), max_expert_blocks(3, 256, 16)
    (304, 3)
    """
    for name, value, least in (("num_ids", num_ids, 0), ("num_experts", num_experts, 1), ("block_size", block_size, 1)):
        if value < least:
            raise refuse_value("max_expert_blocks", name, value, f"at least {least}")
    return (num_ids + min(num_ids, num_experts) * (block_size - 1)) // block_size


def _index_output(argument: str, tensor: Tensor | None, least: int, topk_ids: Tensor) -> Tensor:
    """A list of at least `least` entries, allocated when None."""
    if tensor is None:
        return torch.empty(least, dtype=torch.int32, device=topk_ids.device)
    check_vector("align_block_size", argument, tensor, torch.int32, None, topk_ids, f"one-dimensional, of at least {least} entries")
    if tensor.shape[0] < least:
        raise refuse_shape("align_block_size", argument, tensor, f"of at least {least} entries")
    return tensor


def align_block_size(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    *,
    expert_map: Tensor | None = None,
    sorted_token_ids: Tensor | None = None,
    expert_ids: Tensor | None = None,
    num_tokens_post_padded: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the entries of `topk_ids` by expert and pad every expert to whole blocks, so that a grouped matrix product has one expert per
    block of rows.

    Entry i = t * K + k of `topk_ids` is row t of the activations (i // K). Experts come in ascending order, and the entries of one expert
    in theirs, whatever the device. Sizes depend on shapes only and nothing waits for the device, so the call can be captured in a graph.

    Args:
        topk_ids: [T, K] int32; any row stride. An id that is -1, or no expert's, is skipped: it takes no place.
        num_experts: experts that blocks are made for, E, from 1 to 1024.
        block_size: entries of a block, at least 1.
        expert_map: [G] int32: id g stands for expert `expert_map[g]` here, from 0 to E - 1; the entries of -1 or anything else are skipped,
            and so are ids outside [0, G). None: ids are experts.
        sorted_token_ids: int32, at least `max_expert_blocks(T * K, E, block_size) * block_size` long. Allocated when None.
        expert_ids: int32, at least `max_expert_blocks(T * K, E, block_size)` long. Allocated when None.
        num_tokens_post_padded: [1] int32. Allocated when None.

    Returns:
        `sorted_token_ids`: the entries by expert; T * K stands in the places that none fills, up to its end.
        `expert_ids`: the expert of every block; -1 from the first unused block to its end.
        `num_tokens_post_padded`: how many places the used blocks have.

    Raises:
        TypeError, ValueError: a dtype, shape, stride, value or device that does not fit, in one sentence.

    Source: the lists that vLLM's and SGLang's fused MoE kernels read (their moe_align_block_size).

    Example:
    >>> ids = torch.tensor([[1, 2], [2, 0], [2, -1]], dtype=torch.int32)
    >>> [x.tolist() for x in align_block_size(ids, 3, 2)]
    [[3, 6, 0, 6, 1, 2, 4, 6], [0, 1, 2, 2], [8]]
    """
    if topk_ids.dtype is not torch.int32:
        raise refuse_dtype("align_block_size", "topk_ids", topk_ids, "int32")
    if topk_ids.ndim != 2 or not is_dense(topk_ids):
        raise refuse_shape("align_block_size", "topk_ids", topk_ids, "[T, K] with contiguous rows")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise refuse_value("align_block_size", "num_experts", num_experts, f"from 1 to {MAX_EXPERTS}")
    if block_size < 1:
        raise refuse_value("align_block_size", "block_size", block_size, "at least 1")
    if expert_map is not None:
        check_vector("align_block_size", "expert_map", expert_map, torch.int32, None, topk_ids, "[G]")
    blocks = max_expert_blocks(topk_ids.numel(), num_experts, block_size)
    sorted_token_ids = _index_output("sorted_token_ids", sorted_token_ids, blocks * block_size, topk_ids)
    expert_ids = _index_output("expert_ids", expert_ids, blocks, topk_ids)
    if num_tokens_post_padded is None:
        num_tokens_post_padded = torch.empty(1, dtype=torch.int32, device=topk_ids.device)
    else:
        check_vector("align_block_size", "num_tokens_post_padded", num_tokens_post_padded, torch.int32, 1, topk_ids, "[1]")
    outputs = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.align_block_size(*outputs, topk_ids, expert_map, num_experts, block_size)
    else:
        select("align_block_size", (device_of(topk_ids),))(*outputs, topk_ids, expert_map, num_experts, block_size)
    return outputs
