"""From logits to token ids, and what changes logits first. Random numbers are counted, not drawn from a state: the same seed and position
give the same token whatever the batch, the vocabulary order or the implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._registry import select
from gristmill_kernels.checks import check_float, check_vector, is_dense, refuse_device, refuse_dtype, refuse_shape, same_device
from gristmill_kernels.schema import norm_key


def _check_logits(function: str, logits: Tensor) -> None:
    check_float(function, "logits", logits)
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise refuse_shape(function, "logits", logits, "[B, V] with V >= 1")


def _ids_like(function: str, logits: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    check_vector(function, "out", out, torch.int32, logits.shape[0], logits, "[B]")
    return out


def greedy(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The most likely token of every row; among equals the lowest id.

    Args:
        logits: [B, V] float32, float16 or bfloat16; any row stride.
        out: [B] int32. Allocated when None.

    Returns:
        `out`; -1 for a row that holds a NaN or +inf or nothing but -inf.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.
    """
    _check_logits("greedy", logits)
    out = _ids_like("greedy", logits, out)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.greedy(out, logits)
    else:
        select("greedy", norm_key(logits))(out, logits)
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draw one token per row. Order: temperature, top-k, top-p of what top-k left (renormalised), min-p relative to the best token.

    The draw is the Gumbel-max trick over the surviving tokens: argmax of `(x - max) / temperature - log(-log(u))`, lowest id among
    equals. `u` of token v is `(word + 0.5) * 2^-32` where word is lane `v % 4` of Philox4x32-10 with key (seed low, seed high), counter
    (position, v // 4, 0, 0).

    Args:
        logits: [B, V] float32, float16 or bfloat16; any row stride; -inf never drawn.
        temperature: [B] float32; <= 0 means greedy.
        top_k: [B] int32; the k best tokens, equals ranked by lowest id, so 1 means greedy; <= 0 or >= V switches it off.
        top_p: [B] float32; tokens in order of probability while the mass before them is < top_p, at least one; >= 1 switches it off.
        min_p: [B] float32; tokens with at least this fraction of the best token's probability; <= 0 switches it off.
        seeds: [B] int64.
        positions: [B] int32, the position of the token drawn: makes each draw of a sequence a new one.
        out: [B] int32. Allocated when None.

    Returns:
        `out`; -1 for a row that holds a NaN or +inf or nothing but -inf, or whose temperature is NaN. Other rows are not affected.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: Gumbel (1954); Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); Holtzman et al. (2020) for top-p.
    """
    _check_logits("sample", logits)
    batch = logits.shape[0]
    check_vector("sample", "temperature", temperature, torch.float32, batch, logits, "[B]")
    check_vector("sample", "top_k", top_k, torch.int32, batch, logits, "[B]")
    check_vector("sample", "top_p", top_p, torch.float32, batch, logits, "[B]")
    check_vector("sample", "min_p", min_p, torch.float32, batch, logits, "[B]")
    check_vector("sample", "seeds", seeds, torch.int64, batch, logits, "[B]")
    check_vector("sample", "positions", positions, torch.int32, batch, logits, "[B]")
    out = _ids_like("sample", logits, out)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.sample(out, logits, temperature, top_k, top_p, min_p, seeds, positions)
    else:
        select("sample", norm_key(logits))(out, logits, temperature, top_k, top_p, min_p, seeds, positions)
    return out


def apply_logit_bias(logits: Tensor, indptr: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add `values[j]` to the logit of token `ids[j]`, in place, for j in [indptr[b], indptr[b + 1]) of row b.

    Args:
        logits: [B, V] float32, float16 or bfloat16; any row stride; changed.
        indptr: [B + 1] int32.
        ids: [N] int32; an id outside [0, V) is skipped, an id named twice gets both values.
        values: [N] float32.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.
    """
    _check_logits("apply_logit_bias", logits)
    check_vector("apply_logit_bias", "indptr", indptr, torch.int32, logits.shape[0] + 1, logits, "[B + 1]")
    check_vector("apply_logit_bias", "ids", ids, torch.int32, None, logits, "[N]")
    check_vector("apply_logit_bias", "values", values, torch.float32, ids.shape[0], logits, "[N]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.apply_logit_bias(logits, indptr, ids, values)
    else:
        select("apply_logit_bias", norm_key(logits))(logits, indptr, ids, values)


def apply_penalties(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> None:
    """Repetition, then frequency and presence penalties, in place.

    A token of the prompt or output has its logit divided by `repetition` when positive and multiplied by it otherwise; then
    `frequency * count + presence * (count > 0)` is subtracted, counting the output only.

    Args:
        logits: [B, V] float32, float16 or bfloat16; any row stride; changed.
        prompt_mask: [B, V] bool, tokens of the prompt.
        output_counts: [B, V] int32, how often each token was produced.
        presence, frequency: [B] float32; 0 has no effect.
        repetition: [B] float32; 1 has no effect.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: Keskar et al., "CTRL" (2019), section 4.1 for repetition; the OpenAI API for the other two.
    """
    _check_logits("apply_penalties", logits)
    for argument, tensor, dtype, right in (
        ("prompt_mask", prompt_mask, torch.bool, "bool"),
        ("output_counts", output_counts, torch.int32, "int32"),
    ):
        if tensor.dtype is not dtype:
            raise refuse_dtype("apply_penalties", argument, tensor, right)
        if tensor.shape != logits.shape or not is_dense(tensor):
            raise refuse_shape("apply_penalties", argument, tensor, f"{tuple(logits.shape)} like logits, with contiguous rows")
        if not same_device(tensor, logits):
            raise refuse_device("apply_penalties", argument, tensor, logits)
    batch = logits.shape[0]
    check_vector("apply_penalties", "presence", presence, torch.float32, batch, logits, "[B]")
    check_vector("apply_penalties", "frequency", frequency, torch.float32, batch, logits, "[B]")
    check_vector("apply_penalties", "repetition", repetition, torch.float32, batch, logits, "[B]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.apply_penalties(logits, prompt_mask, output_counts, presence, frequency, repetition)
    else:
        select("apply_penalties", norm_key(logits))(logits, prompt_mask, output_counts, presence, frequency, repetition)


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Leave only the tokens whose bit is set, in place: the logits of the others become -inf.

    Args:
        logits: [B, V] float32, float16 or bfloat16; any row stride; changed.
        bitmask: [B, ceil(V / 32)] int32, contiguous rows; bit v % 32 of word v // 32, lowest first, is token v's. Bits past V are ignored.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: the layout of xgrammar's token bitmask (Dong et al., "XGrammar", 2024).
    """
    _check_logits("apply_token_bitmask", logits)
    if bitmask.dtype is not torch.int32:
        raise refuse_dtype("apply_token_bitmask", "bitmask", bitmask, "int32")
    batch, words = logits.shape[0], (logits.shape[1] + 31) // 32
    if bitmask.shape != (batch, words) or not is_dense(bitmask):
        raise refuse_shape("apply_token_bitmask", "bitmask", bitmask, f"[B, ceil(V / 32)] = {(batch, words)}, with contiguous rows")
    if not same_device(bitmask, logits):
        raise refuse_device("apply_token_bitmask", "bitmask", bitmask, logits)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.apply_token_bitmask(logits, bitmask)
    else:
        select("apply_token_bitmask", norm_key(logits))(logits, bitmask)
