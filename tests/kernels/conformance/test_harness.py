"""The conformance suite on trial: wrong implementations of every op must be caught, and a new one must join by registering."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable

import pytest
import torch
from torch.library import Library

from gristmill_kernels import dispatch
from gristmill_kernels.reference import activation, attention, gemm, indices, kvcache, mla, moe, norm, quant, rope, sampling
from gristmill_kernels.schema import OPS
from tests.kernels.conformance import oracle
from tests.kernels.conformance.harness import Moved, pairs, run_case
from tests.kernels.conformance.test_conformance import CASES

INF = float("inf")


def altered(kernel: Callable[..., None], **changes: object) -> Callable[..., None]:
    """`kernel` with some arguments replaced; a callable change receives all arguments by name."""
    names = list(inspect.signature(kernel).parameters)

    def wrong(*args: object) -> None:
        given = dict(zip(names, args))
        given |= {name: change(given) if callable(change) else change for name, change in changes.items()}
        kernel(**given)

    return wrong


def followed_by(kernel: Callable[..., None], change: Callable[..., None]) -> Callable[..., None]:
    """`kernel`, and then something that it should not have done."""

    def wrong(*args: object) -> None:
        kernel(*args)
        change(*args)

    return wrong


def _bfloat16_products(out, x, packed, bias, n, k) -> None:
    gemm.packed_linear(out, x.bfloat16(), packed.bfloat16(), bias, n, k)


def _heads_interleaved(args: dict) -> torch.Tensor:
    """Query heads mapped to KV head h % Hkv instead of h // ratio."""
    num_kv_heads = args["k_cache"].shape[1]
    return args["q"].unflatten(1, (-1, num_kv_heads)).transpose(1, 2).flatten(1, 2)


def _without_the_last_key(args: dict) -> torch.Tensor:
    is_last = torch.arange(len(args["kv_indices"])) == args["kv_indptr"][-1] - 1
    return args["kv_indices"].masked_fill(is_last, -1)


def _lse_base_2(out, lse, *rest) -> None:
    if lse is not None:
        lse.mul_(1.4426950408889634)


def _in_chunks_of_two(out, out_lse, o, lse) -> None:
    """Pairs are merged with equal weight."""
    attention.merge_states(out, out_lse, o, lse)
    if len(o) > 2:
        out.copy_(o.double().nan_to_num().mean(0))


def _merge_all_by_formula(out, out_lse, o, lse) -> None:
    total = torch.logsumexp(lse, 0)
    out.copy_((torch.exp(lse - total)[..., None] * o).sum(0))
    out_lse.copy_(total)


def _in_the_wrong_order(args: dict) -> torch.Tensor:
    """The bounds of requests as if their rows came last to first."""
    return args["kv_indptr"][-1] - args["kv_indptr"].flip(0)


def _first_row_for_all(out, lse, q_nope, q_rope, kv_cache, qo_indptr, *rest) -> None:
    """Every row of a request sits where its first one does."""
    mla.mla_decode(out, lse, q_nope, q_rope, kv_cache, qo_indptr, *rest)
    if qo_indptr is not None:
        for begin, end in itertools.pairwise(qo_indptr.tolist()):
            out[begin:end] = out[begin : begin + 1]


def _merge_by_formula(out, out_lse, o_a, lse_a, o_b, lse_b) -> None:
    lse = torch.logaddexp(lse_a, lse_b)
    out.copy_(torch.exp(lse_a - lse)[..., None] * o_a + torch.exp(lse_b - lse)[..., None] * o_b)
    out_lse.copy_(lse)


def _without_repeats(logits, indptr, ids, values) -> None:
    bounds = indptr.tolist()
    original = logits.clone()
    for row in range(logits.shape[0]):
        for j in range(bounds[row], bounds[row + 1]):
            if 0 <= ids[j] < logits.shape[1]:
                logits[row, ids[j]] = original[row, ids[j]].double() + values[j]


def _silent_last_row(out, *rest) -> None:
    if out.shape[0]:
        out[-1] = out[0]


def _highest_id_first(weights, ids, logits, renormalize) -> None:
    moe.topk_softmax(weights, ids, logits.flip(1), renormalize)
    ids.copy_(torch.where(ids < 0, ids, logits.shape[1] - 1 - ids))


def _nan_spoils_weights(weights, ids, logits, renormalize) -> None:
    weights.masked_fill_(logits.isnan().any(1, keepdim=True), float("nan"))


def _without_the_last_expert(args: dict) -> torch.Tensor:
    return args["logits"].float().masked_fill(torch.arange(args["logits"].shape[1]) == args["logits"].shape[1] - 1, -INF)


def _bias_weighs(weights, ids, logits, bias, renormalize) -> None:
    moe.topk_sigmoid(weights, ids, logits, bias, renormalize)
    if bias is not None:
        weights += bias[ids.clamp(min=0)].masked_fill(ids < 0, 0.0)


def _renormalized_float32_scores(weights, ids, logits, bias, renormalize) -> None:
    moe.topk_sigmoid(weights, ids, logits, bias, False)
    if renormalize:
        weights /= weights.sum(1, keepdim=True) + 1e-20


def _by_float32_scores(weights, ids, logits, bias, renormalize) -> None:
    scores = torch.where(logits > -INF, logits.float().sigmoid(), logits.float())
    moe.topk_sigmoid(weights, ids, scores if bias is None else logits, bias, renormalize)
    moe.topk_sigmoid(weights, torch.empty_like(ids), logits, bias, renormalize)


def _unused_blocks_kept(entries, owners, padded, *rest) -> None:
    before = owners.clone()
    moe.align_block_size(entries, owners, padded, *rest)
    owners.copy_(torch.where(owners < 0, before, owners))


def _unused_places_kept(entries, owners, padded, *rest) -> None:
    before = entries.clone()
    moe.align_block_size(entries, owners, padded, *rest)
    entries[int(padded) :] = before[int(padded) :]


def _entries_backwards(entries, owners, padded, topk_ids, *rest) -> None:
    moe.align_block_size(entries, owners, padded, topk_ids.flip(0, 1), *rest)
    entries.copy_(torch.where(entries == topk_ids.numel(), entries, topk_ids.numel() - 1 - entries))


def _without_nan(args: dict) -> torch.Tensor | None:
    return None if args["bias"] is None else args["bias"].nan_to_num(0.0, INF, -INF)


def _groups_by_their_best(weights, ids, logits, bias, num_groups, topk_groups, scaling, sigmoid, renormalize) -> None:
    """As if every second expert of a group did not count: groups are chosen by single experts first."""
    if bias is None or num_groups == 1:
        return moe.grouped_topk(weights, ids, logits, bias, num_groups, topk_groups, scaling, sigmoid, renormalize)
    choice = torch.nan_to_num(moe._scores(logits.double(), sigmoid) + bias.double(), -INF, INF, -INF).masked_fill(~(logits > -INF), -INF)
    kept = moe._in_best_groups(choice, num_groups, topk_groups, False)
    moe.grouped_topk(weights, ids, logits.float().masked_fill(~kept, -INF), bias, 1, 1, scaling, sigmoid, renormalize)


def _reciprocal(kernel: Callable[..., None]) -> Callable[..., None]:
    """Products with the inverse of the scale instead of quotients."""

    def wrong(out, scales, x, *group) -> None:
        kernel(out, scales, x, *group)
        width = group[0] if group else x.shape[1]
        if x.numel():
            inverse = (1 / scales).repeat_interleave(width, 1)
            products = x.float() * inverse
            largest = quant.LARGEST_FLOAT8.get(out.dtype, quant.INT8_LARGEST)
            out.copy_(
                (products if out.dtype.is_floating_point else products.nan_to_num(0.0).round()).clamp(-largest, largest).to(out.dtype)
            )

    return wrong


def _quant_mutants(kernel: Callable[..., None]) -> dict[str, Callable[..., None]]:
    return {
        "the scale counts infinities": altered(kernel, x=lambda a: a["x"].nan_to_num(nan=float("nan"))),
        "a scale is zero where all values are": followed_by(kernel, lambda out, scales, *rest: scales.masked_fill_(scales == 2.0**-126, 0)),
        "the sign is lost": altered(kernel, x=lambda a: a["x"].abs()),
        "values are truncated": altered(kernel, x=lambda a: a["x"] * 0.97),
        "the scale is the inverse": followed_by(kernel, lambda out, scales, *rest: scales.reciprocal_()),
        "products stand for quotients": _reciprocal(kernel),
        "rows share a scale": followed_by(
            kernel, lambda out, scales, *rest: scales.copy_(scales[:1].expand_as(scales)) if len(scales) else None
        ),
    }


def _affine(normal, weight, bias):
    scaled = normal if weight is None else normal * weight.double()
    return scaled if bias is None else scaled + bias.double()


def _one_pass_layer_norm(out, x, weight, bias, eps) -> None:
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = (wide.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
    out.copy_(_affine((wide - mean) * (variance + eps).rsqrt(), weight, bias))


def _sample_variance_layer_norm(out, x, weight, bias, eps) -> None:
    centred = x.double() - x.double().mean(-1, keepdim=True)
    variance = centred.square().sum(-1, keepdim=True) / max(1, x.shape[-1] - 1)
    out.copy_(_affine(centred * (variance + eps).rsqrt(), weight, bias))


def _store_then_rotate(q, k, k_cache, v_cache, v, positions, table, slots, is_neox, *scales) -> None:
    kvcache.store_kv(k_cache, v_cache, k, v, slots, *scales)
    rope.apply_rope(q, k, positions, table, is_neox)


def _store_rounded_quotient(k_cache, v_cache, k, v, slots, k_scale=1.0, v_scale=1.0) -> None:
    kvcache.store_kv(k_cache, v_cache, k / k_scale, v / v_scale, slots)


def _store_without_saturation(k_cache, v_cache, k, v, slots, k_scale=1.0, v_scale=1.0) -> None:
    infinite = float("inf")
    keep = (k_cache.dtype in kvcache._LARGEST) & (k.abs() / k_scale > kvcache._LARGEST.get(k_cache.dtype, infinite))
    kvcache.store_kv(k_cache, v_cache, k.masked_fill(keep, float("nan")), v, slots, k_scale, v_scale)


def _store_cut_off(k_cache, v_cache, k, v, slots, k_scale=1.0, v_scale=1.0) -> None:
    """Rounding toward zero: what is not representable is taken for a little less."""
    if k_cache.dtype in kvcache._LARGEST:
        exact = (k.float() / k_scale).clamp(-240, 240).to(k_cache.dtype).float() * k_scale == k.float()
        k = torch.where(exact, k.float(), k.float() * 0.96)
    kvcache.store_kv(k_cache, v_cache, k, v, slots, k_scale, v_scale)


def _copy_backwards(k_cache, v_cache, src_slots, dst_slots) -> None:
    for pair in reversed(range(len(src_slots))):
        kvcache.copy_slots(k_cache, v_cache, src_slots[pair : pair + 1], dst_slots[pair : pair + 1])


def _table_of_slots(out, req_to_token, req_slots, seq_lens, page_size) -> None:
    indices.page_table(out, req_to_token * page_size, req_slots, seq_lens, page_size)


def _cleared_page_table(out, req_to_token, req_slots, seq_lens, page_size) -> None:
    out.zero_()
    indices.page_table(out, req_to_token, req_slots, seq_lens, page_size)


def _draft_branches_first(indptr, out, req_to_token, req_slots, prefix_lens, draft_slots, steps, topk) -> None:
    if draft_slots is not None:
        draft_slots = draft_slots.transpose(1, 2).reshape(draft_slots.shape)
    indices.draft_kv_indices(indptr, out, req_to_token, req_slots, prefix_lens, draft_slots, steps, topk)


def _draft_all_steps(indptr, out, *rest) -> None:
    indices.draft_kv_indices(indptr, out, *rest)
    indptr[:-1] = indptr[-1]


def _whole_page_prefixes(args: dict) -> torch.Tensor:
    page_size = args["page_size"]
    return torch.minimum((args["prefix_lens"] + page_size - 1) // page_size * page_size, args["new_lens"])


def _every_request_from_the_front(out, num_pages, prefix_lens, new_lens, last_slots, free_pages, page_size) -> None:
    offset, taken = 0, 0
    for request in range(len(prefix_lens)):
        one = slice(request, request + 1)
        indices.alloc_extend(out[offset:], num_pages, prefix_lens[one], new_lens[one], last_slots[one], free_pages, page_size)
        offset += max(0, int(new_lens[request] - prefix_lens[request]))
        taken += int(num_pages)
    num_pages.fill_(taken)


def _without_lowest_bit(cache: torch.Tensor) -> torch.Tensor:
    return (cache.view(torch.uint8) & 0xFE).view(cache.dtype) if cache.element_size() == 1 else cache


def _as_e4m3fn(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.float8_e4m3fn) if cache.dtype is torch.float8_e4m3fnuz else cache


def _store_without_bounds(kv_cache, kv_c, k_rope, slots, kv_scale) -> None:
    kept = slots >= 0
    rows = torch.cat([kv_c, k_rope], dim=-1)[kept].float() / kv_scale
    kv_cache[slots[kept].long()] = rows.to(kv_cache.dtype)


ATTENTION_MUTANTS: dict[str, dict] = {
    "window is one too wide": {"window_left": lambda a: a["window_left"] + (a["window_left"] >= 0)},
    "window is one too narrow": {"window_left": lambda a: a["window_left"] - 1 if a["window_left"] > 0 else a["window_left"]},
    "sinks are ignored": {"sinks": None},
    "the logit cap is ignored": {"logit_cap": 0.0},
    "k_scale is ignored": {"k_scale": 1.0},
    "v_scale is ignored": {"v_scale": 1.0},
    "k_scale is applied twice": {"k_scale": lambda a: a["k_scale"] ** 2},
    "heads are mapped in the wrong order": {"q": _heads_interleaved},
    "holes are read as slot 0": {"kv_indices": lambda a: a["kv_indices"].clamp(min=0)},
    "the last key is dropped": {"kv_indices": _without_the_last_key},
    "an 8-bit cache loses its lowest bit": {
        "k_cache": lambda a: _without_lowest_bit(a["k_cache"]),
        "v_cache": lambda a: _without_lowest_bit(a["v_cache"]),
    },
    "e4m3fnuz is read as e4m3fn": {name: lambda a, name=name: _as_e4m3fn(a[name]) for name in ("k_cache", "v_cache")},
    "queries are rounded to eight bits": {"q": lambda a: a["q"].to(torch.float8_e4m3fn).to(a["q"].dtype)},
}
EXTEND_MUTANTS: dict[str, dict] = ATTENTION_MUTANTS | {
    "the causal mask is ignored": {"causal": False},
    "the causal mask is always on": {"causal": True, "custom_mask": None},
    "the custom mask starts one late": {"custom_mask": lambda a: None if a["custom_mask"] is None else a["custom_mask"].roll(1)},
}
RAGGED_MUTANTS: dict[str, dict] = {
    "window is one too wide": EXTEND_MUTANTS["window is one too wide"],
    "window is one too narrow": EXTEND_MUTANTS["window is one too narrow"],
    "sinks are ignored": {"sinks": None},
    "the logit cap is ignored": {"logit_cap": 0.0},
    "the causal mask is ignored": {"causal": False},
    "the causal mask is always on": EXTEND_MUTANTS["the causal mask is always on"],
    "the custom mask starts one late": EXTEND_MUTANTS["the custom mask starts one late"],
    "values are those of the row before": {"v": lambda a: a["v"].roll(1, 0)},
    "sm_scale comes from the value width": {"sm_scale": lambda a: a["sm_scale"] * (a["q"].shape[2] / a["v"].shape[2]) ** 0.5},
    "requests are taken from the end": {"kv_indptr": _in_the_wrong_order},
    "queries are rounded to eight bits": EXTEND_MUTANTS["queries are rounded to eight bits"],
}
MLA_MUTANTS: dict[str, dict] = {
    "the rope part is ignored": {"q_rope": lambda a: torch.zeros_like(a["q_rope"])},
    "kv_scale is ignored": {"kv_scale": 1.0},
    "kv_scale is left out of the logits": {"sm_scale": lambda a: a["sm_scale"] / a["kv_scale"]},
    "holes are read as slot 0": {"kv_indices": lambda a: a["kv_indices"].clamp(min=0)},
    "the last key is dropped": {"kv_indices": _without_the_last_key},
    "sm_scale comes from the cache's width": {"sm_scale": 576**-0.5},
    "heads are reversed": {"q_nope": lambda a: a["q_nope"].flip(1), "q_rope": lambda a: a["q_rope"].flip(1)},
}

MUTANTS: dict[str, dict[str, Callable[..., None]]] = {
    "rms_norm": {
        "eps is ignored": altered(norm.rms_norm, eps=0.0),
        "the weight is ignored": altered(norm.rms_norm, weight=lambda a: torch.ones_like(a["weight"])),
        "one element is left out": altered(norm.rms_norm, x=lambda a: a["x"] * (torch.arange(a["x"].shape[-1]) > 0)),
        "the result is 1% off": followed_by(norm.rms_norm, lambda out, *rest: out.mul_(1.01)),
    },
    "fused_add_rms_norm": {
        "the residual is not updated": altered(norm.fused_add_rms_norm, residual=lambda a: a["residual"].clone()),
        "eps is ignored in a small row": altered(norm.fused_add_rms_norm, eps=0.1),
        "x is not overwritten": altered(norm.fused_add_rms_norm, x=lambda a: a["x"].clone()),
    },
    "gemma_rms_norm": {
        "the weight is the factor": norm.rms_norm,
        "eps is too large": altered(norm.gemma_rms_norm, eps=0.1),
    },
    "gemma_fused_add_rms_norm": {
        "the weight is the factor": norm.fused_add_rms_norm,
        "the residual is not updated": altered(norm.gemma_fused_add_rms_norm, residual=lambda a: a["residual"].clone()),
    },
    "layer_norm": {
        "the mean stays": lambda out, x, weight, bias, eps: out.copy_(_affine(norm._normalise(x, 1.0, eps), weight, bias)),
        "the weight is ignored": altered(norm.layer_norm, weight=None),
        "the bias is ignored": altered(norm.layer_norm, bias=None),
        "eps is ignored": altered(norm.layer_norm, eps=0.0),
        "the variance is a difference of two float32 sums": _one_pass_layer_norm,
        "the variance divides by one less": _sample_variance_layer_norm,
    },
    "apply_rope": {
        "pairs are taken the other way": altered(rope.apply_rope, is_neox=lambda a: not a["is_neox"]),
        "positions are off by one": altered(rope.apply_rope, positions=lambda a: a["positions"] - 1),
        "padding is rotated": altered(rope.apply_rope, positions=lambda a: a["positions"].clamp(0, a["cos_sin_cache"].shape[0] - 1)),
        "keys are forgotten": altered(rope.apply_rope, k=lambda a: a["k"].clone()),
        "sines have the wrong sign": altered(
            rope.apply_rope, cos_sin_cache=lambda a: torch.cat([a["cos_sin_cache"].chunk(2, 1)[0], -a["cos_sin_cache"].chunk(2, 1)[1]], 1)
        ),
    },
    "apply_rope_store_kv": {
        "keys are stored before they are rotated": _store_then_rotate,
        "keys are rotated in the cache only": altered(rope.apply_rope_store_kv, k=lambda a: a["k"].clone()),
        "padding is not stored": altered(rope.apply_rope_store_kv, slots=lambda a: a["slots"].masked_fill(a["positions"] < 0, -1)),
        "rows without a slot are not rotated": altered(
            rope.apply_rope_store_kv, positions=lambda a: a["positions"].masked_fill(a["slots"] < 0, -1)
        ),
        "scales are swapped": altered(rope.apply_rope_store_kv, k_scale=lambda a: a["v_scale"], v_scale=lambda a: a["k_scale"]),
        "pairs are taken the other way": altered(rope.apply_rope_store_kv, is_neox=lambda a: not a["is_neox"]),
    },
    "silu_and_mul": {
        "halves are swapped": altered(activation.silu_and_mul, x=lambda a: torch.cat(a["x"].chunk(2, -1)[::-1], -1)),
        "the last element is missed": followed_by(activation.silu_and_mul, lambda out, x: out[..., -1:].fill_(0.5)),
    },
    "gelu_and_mul": {
        "it is the tanh form": activation.gelu_tanh_and_mul,
        "it is silu": activation.silu_and_mul,
        "halves are swapped": altered(activation.gelu_and_mul, x=lambda a: torch.cat(a["x"].chunk(2, -1)[::-1], -1)),
    },
    "gelu_tanh_and_mul": {
        "it is the exact form": activation.gelu_and_mul,
        "halves are swapped": altered(activation.gelu_tanh_and_mul, x=lambda a: torch.cat(a["x"].chunk(2, -1)[::-1], -1)),
    },
    "swiglu_oai": {
        "gate and up are halves": altered(activation.swiglu_oai, x=lambda a: torch.stack(a["x"].chunk(2, -1), -1).flatten(-2)),
        "gate and up are swapped": altered(activation.swiglu_oai, x=lambda a: a["x"].unflatten(-1, (-1, 2)).flip(-1).flatten(-2)),
        "alpha is ignored": altered(activation.swiglu_oai, alpha=1.0),
        "limit is ignored": altered(activation.swiglu_oai, limit=float("inf")),
        "the gate is bounded below": altered(activation.swiglu_oai, x=lambda a: a["x"].clamp(min=-a["limit"])),
        "NaN becomes the limit": altered(activation.swiglu_oai, x=lambda a: a["x"].nan_to_num(a["limit"])),
    },
    "store_kv": {
        "slot -1 is the last slot": altered(kvcache.store_kv, slots=lambda a: a["slots"] % a["k_cache"].shape[0]),
        "values are not stored": altered(kvcache.store_kv, v_cache=lambda a: a["v_cache"].clone()),
        "values go one slot further": altered(kvcache.store_kv, v_cache=lambda a: a["v_cache"].roll(1, 0)),
        "k_scale is ignored": altered(kvcache.store_kv, k_scale=1.0),
        "v_scale is ignored": altered(kvcache.store_kv, v_scale=1.0),
        "rows are multiplied by the scale": altered(kvcache.store_kv, k_scale=lambda a: 1 / a.get("k_scale", 1.0)),
        "rows are rounded before they become 8-bit": _store_rounded_quotient,
        "8-bit stores overflow": _store_without_saturation,
        "8-bit stores cut off": _store_cut_off,
        "NaN saturates": altered(kvcache.store_kv, k=lambda a: a["k"].nan_to_num(0.0)),
    },
    "copy_slots": {
        "source and destination are swapped": lambda k, v, source, target: kvcache.copy_slots(k, v, target, source),
        "only the first layer is copied": altered(kvcache.copy_slots, k_cache=lambda a: a["k_cache"][:1]),
        "values are forgotten": altered(kvcache.copy_slots, v_cache=None),
        "the last pair is copied first": _copy_backwards,
        "slot -1 is the last slot": altered(
            kvcache.copy_slots,
            src_slots=lambda a: a["src_slots"] % a["k_cache"].shape[1],
            dst_slots=lambda a: a["dst_slots"] % a["k_cache"].shape[1],
        ),
    },
    "transfer_kv": {
        "source slots are used on both sides": altered(kvcache.transfer_kv, dst_slots=lambda a: a["src_slots"]),
        "values are forgotten": altered(kvcache.transfer_kv, src_v=None, dst_v=None),
        "slot -1 is slot 0": altered(kvcache.transfer_kv, src_slots=lambda a: a["src_slots"].clamp(min=0)),
        "the last pair is missing": altered(
            kvcache.transfer_kv, src_slots=lambda a: a["src_slots"][:-1], dst_slots=lambda a: a["dst_slots"][:-1]
        ),
    },
    "kv_indices": {
        "kv_start is ignored": altered(indices.kv_indices, kv_start=None),
        "rows are taken in order": altered(indices.kv_indices, req_slots=lambda a: torch.arange(len(a["req_slots"]))),
        "the rest of the buffer is cleared": followed_by(indices.kv_indices, lambda indptr, out, *rest: out[int(indptr[-1]) :].zero_()),
    },
    "qo_indptr": {"it does not begin with 0": followed_by(indices.qo_indptr, lambda out, q_lens: out[0].fill_(1))},
    "write_req_to_token": {
        "starts are ignored": altered(indices.write_req_to_token, starts=lambda a: a["starts"] * 0),
        "each run begins with the first slot": altered(indices.write_req_to_token, slots=lambda a: a["slots"].flip(0)),
    },
    "window_kv_indices": {
        "the window is one too wide": altered(
            indices.window_kv_indices, window_left=lambda a: a["window_left"] + (a["window_left"] >= 0)
        ),
        "the window is one too narrow": altered(
            indices.window_kv_indices, window_left=lambda a: a["window_left"] - 1 if a["window_left"] > 0 else a["window_left"]
        ),
        "the window counts from the last row": altered(indices.window_kv_indices, q_lens=None),
        "slots are not mapped": altered(indices.window_kv_indices, slot_map=None),
        "holes are mapped": altered(indices.window_kv_indices, req_to_token=lambda a: a["req_to_token"].clamp(min=0)),
    },
    "page_table": {
        "slots stand for pages": _table_of_slots,
        "the rest of a row is cleared": _cleared_page_table,
        "rows are taken in order": altered(indices.page_table, req_slots=lambda a: torch.arange(len(a["req_slots"]))),
        "the last, partial page is missing": altered(
            indices.page_table, seq_lens=lambda a: a["seq_lens"] // a["page_size"] * a["page_size"]
        ),
    },
    "last_page_len": {
        "a full page is empty": lambda out, seq_lens, page_size: out.copy_(seq_lens.clamp(min=0) % page_size),
        "an empty request has a page": lambda out, seq_lens, page_size: out.copy_((seq_lens - 1) % page_size + 1),
    },
    "mla_indices": {
        "indptr counts tokens": followed_by(indices.mla_indices, lambda indptr, *rest: indptr[1:].copy_(rest[4].clamp(min=0).cumsum(0))),
        "slots stand for pages": lambda indptr, out, last, table, rows, lens, page_size: indices.mla_indices(
            indptr, out, last, (table * page_size).where(table >= 0, -1), rows, lens, page_size
        ),
        "the last length is that of the first page": followed_by(
            indices.mla_indices, lambda *args: args[2].copy_(args[5].clamp(min=0, max=args[6]))
        ),
    },
    "draft_kv_indices": {
        "the newest draft token is missing": followed_by(indices.draft_kv_indices, lambda indptr, *rest: indptr[:, 1:].sub_(1)),
        "branches share the first branch's slots": altered(
            indices.draft_kv_indices,
            draft_slots=lambda a: None if a["draft_slots"] is None else a["draft_slots"][:, :1].expand(-1, a["topk"], -1),
        ),
        "listed slots are ignored": altered(indices.draft_kv_indices, draft_slots=None),
        "branches come first": _draft_branches_first,
        "every step sees all draft tokens": _draft_all_steps,
    },
    "alloc_extend": {
        "partial pages are not filled": altered(indices.alloc_extend, prefix_lens=_whole_page_prefixes),
        "new pages are taken from the back": altered(indices.alloc_extend, free_pages=lambda a: a["free_pages"].flip(0)),
        "the last slot is used again": altered(indices.alloc_extend, last_slots=lambda a: a["last_slots"] - 1),
        "each request begins with the first free page": _every_request_from_the_front,
        "num_pages counts tokens": followed_by(indices.alloc_extend, lambda out, num_pages, *rest: num_pages.fill_(len(out))),
    },
    "alloc_decode": {
        "a full page goes on": lambda out, num_pages, new_lens, last_slots, *rest: out.copy_(last_slots + 1),
        "padding takes a slot": altered(indices.alloc_decode, new_lens=lambda a: a["new_lens"].clamp(min=1)),
        "num_pages is not written": altered(indices.alloc_decode, num_pages=lambda a: a["num_pages"].clone()),
        "every page is the first": altered(indices.alloc_decode, free_pages=lambda a: a["free_pages"][:1].expand(len(a["free_pages"]))),
    },
    "decode_attention": {name: altered(attention.decode_attention, **changes) for name, changes in ATTENTION_MUTANTS.items()}
    | {"LSE is base 2": followed_by(attention.decode_attention, _lse_base_2)},
    "extend_attention": {name: altered(attention.extend_attention, **changes) for name, changes in EXTEND_MUTANTS.items()}
    | {"LSE is base 2": followed_by(attention.extend_attention, _lse_base_2)},
    "ragged_attention": {name: altered(attention.ragged_attention, **changes) for name, changes in RAGGED_MUTANTS.items()}
    | {"LSE is base 2": followed_by(attention.ragged_attention, _lse_base_2)},
    "mla_decode": {name: altered(mla.mla_decode, **changes) for name, changes in MLA_MUTANTS.items()}
    | {"LSE is base 2": followed_by(mla.mla_decode, _lse_base_2), "rows do not advance": _first_row_for_all},
    "mla_store": {
        "slot -1 is the last slot": altered(mla.mla_store, slots=lambda a: a["slots"] % a["kv_cache"].shape[0]),
        "the rope part is not stored": altered(mla.mla_store, k_rope=lambda a: torch.zeros_like(a["k_rope"])),
        "kv_scale multiplies": altered(mla.mla_store, kv_scale=lambda a: 1 / a["kv_scale"]),
        "8-bit values do not saturate": _store_without_bounds,
        "8-bit values are truncated": altered(
            mla.mla_store, kv_c=lambda a: a["kv_c"] * 0.97 if a["kv_cache"].element_size() == 1 else a["kv_c"]
        ),
    },
    "merge_states": {
        "it is the bare formula": _merge_all_by_formula,
        "more than two states are averaged": _in_chunks_of_two,
        "the last state is left out": altered(
            attention.merge_states, o=lambda a: a["o"][: max(1, len(a["o"]) - 1)], lse=lambda a: a["lse"][: max(1, len(a["lse"]) - 1)]
        ),
    },
    "merge_state": {
        "it is the bare formula": _merge_by_formula,
        "states are swapped": altered(attention.merge_state, lse_a=lambda a: a["lse_b"], lse_b=lambda a: a["lse_a"]),
    },
    "greedy": {
        "the last of equals wins": lambda out, logits: out.copy_(logits.shape[1] - 1 - logits.flip(1).argmax(1)),
        "broken rows get an id": lambda out, logits: out.copy_(logits.nan_to_num().argmax(1)),
    },
    "sample": {
        "the seed's upper half is ignored": altered(sampling.sample, seeds=lambda a: a["seeds"] & 0xFFFFFFFF),
        "the position is ignored": altered(sampling.sample, positions=lambda a: a["positions"] * 0),
        "top_k keeps one more": altered(sampling.sample, top_k=lambda a: a["top_k"] + (a["top_k"] > 0)),
        "top_p is ignored": altered(sampling.sample, top_p=lambda a: torch.ones_like(a["top_p"])),
        "min_p is ignored": altered(sampling.sample, min_p=lambda a: a["min_p"] * 0),
        "the temperature is ignored": altered(sampling.sample, temperature=lambda a: a["temperature"].clamp(min=1)),
        "a broken row spoils its neighbour": followed_by(sampling.sample, _silent_last_row),
    },
    "apply_logit_bias": {
        "ids are clamped": altered(sampling.apply_logit_bias, ids=lambda a: a["ids"].clamp(0, a["logits"].shape[1] - 1)),
        "a repeated id counts once": _without_repeats,
    },
    "apply_penalties": {
        "the prompt counts as output": altered(
            sampling.apply_penalties, output_counts=lambda a: a["output_counts"] + a["prompt_mask"].int()
        ),
        "the prompt is not repeated": altered(sampling.apply_penalties, prompt_mask=lambda a: torch.zeros_like(a["prompt_mask"])),
        "counts are capped": altered(sampling.apply_penalties, output_counts=lambda a: a["output_counts"].clamp(max=1)),
    },
    "apply_token_bitmask": {
        "the first token is lost": followed_by(sampling.apply_token_bitmask, lambda logits, bitmask: logits[:, :1].fill_(float("-inf"))),
        "set bits are masked": altered(sampling.apply_token_bitmask, bitmask=lambda a: ~a["bitmask"]),
    },
    "pack_weight": {"the last column is lost": followed_by(gemm.pack_weight, lambda out, weight: out.view(weight.shape)[:, -1].zero_())},
    "packed_linear": {
        "the bias is ignored": altered(gemm.packed_linear, bias=None),
        "float32 products are bfloat16": _bfloat16_products,
        "the last k is dropped": altered(gemm.packed_linear, x=lambda a: a["x"] * (torch.arange(a["k"]) < a["k"] - 1)),
    },
    "skinny_linear": {
        "the bias is ignored": altered(gemm.skinny_linear, bias=None),
        "the last k is dropped": altered(gemm.skinny_linear, x=lambda a: a["x"] * (torch.arange(a["x"].shape[1]) < a["x"].shape[1] - 1)),
        "float32 products are bfloat16": altered(gemm.skinny_linear, weight=lambda a: a["weight"].bfloat16()),
        "a row mixes with its neighbour": altered(gemm.skinny_linear, x=lambda a: a["x"] + 0.001 * a["x"].roll(1, 0)),
    },
    "topk_softmax": {
        "weights are never renormalized": altered(moe.topk_softmax, renormalize=False),
        "the last of equals wins": _highest_id_first,
        "NaN counts as 0": altered(moe.topk_softmax, logits=lambda a: a["logits"].nan_to_num(0.0, INF, -INF)),
        "NaN has a share": followed_by(moe.topk_softmax, _nan_spoils_weights),
        "+inf is a large number": altered(moe.topk_softmax, logits=lambda a: a["logits"].clamp(max=6e4)),
        "-inf can be chosen": altered(moe.topk_softmax, logits=lambda a: a["logits"].clamp(min=-3e4)),
        "the softmax is over the chosen": altered(moe.topk_softmax, renormalize=True),
        "the last expert is never chosen": altered(moe.topk_softmax, logits=_without_the_last_expert),
        "a row mixes with its neighbour": altered(moe.topk_softmax, logits=lambda a: a["logits"] + 0.001 * a["logits"].roll(1, 0)),
    },
    "topk_sigmoid": {
        "the bias is ignored": altered(moe.topk_sigmoid, bias=None),
        "the bias weighs": _bias_weighs,
        "weights are never renormalized": altered(moe.topk_sigmoid, renormalize=False),
        "tiny scores divide 0 by 0": _renormalized_float32_scores,
        "scores are compared, not logits": _by_float32_scores,
    },
    "align_block_size": {
        "experts are not padded": altered(moe.align_block_size, block_size=lambda a: 1 if len(a["expert_ids"]) > 64 else a["block_size"]),
        "the map is ignored": altered(moe.align_block_size, expert_map=None),
        "id -1 is the last expert": altered(
            moe.align_block_size, topk_ids=lambda a: torch.where(a["topk_ids"] == -1, a["num_experts"] - 1, a["topk_ids"])
        ),
        "padding is -1": followed_by(moe.align_block_size, lambda *args: args[0].masked_fill_(args[0] == args[3].numel(), -1)),
        "unused blocks keep what they held": _unused_blocks_kept,
        "padding behind the last block is not written": _unused_places_kept,
        "entries of an expert come in any order": _entries_backwards,
        "numbers are tokens, not entries": followed_by(moe.align_block_size, lambda *args: args[0].floor_divide_(max(1, args[3].shape[1]))),
        "the length counts blocks": followed_by(moe.align_block_size, lambda *args: args[2].floor_divide_(args[6])),
    },
    "grouped_topk": {
        "groups are ignored": altered(moe.grouped_topk, topk_groups=lambda a: a["num_groups"]),
        "one group more is kept": altered(moe.grouped_topk, topk_groups=lambda a: min(a["num_groups"], a["topk_groups"] + 1)),
        "groups count as their best with a bias too": _groups_by_their_best,
        "the scaling is ignored": altered(moe.grouped_topk, scaling=1.0),
        "scores are always sigmoids": altered(moe.grouped_topk, sigmoid=True),
        "scores are always softmax": altered(moe.grouped_topk, sigmoid=False),
        "the bias is ignored": altered(moe.grouped_topk, bias=None),
        "a NaN bias counts as 0": altered(moe.grouped_topk, bias=_without_nan),
        "weights are never renormalized": altered(moe.grouped_topk, renormalize=False),
    },
    "quant_fp8": {
        "the scale multiplies": altered(quant.quant_fp8, scale=lambda a: 1 / a["scale"]),
        "infinities do not saturate": altered(quant.quant_fp8, x=lambda a: a["x"].masked_fill(a["x"].isinf(), float("nan"))),
        "a NaN becomes zero": altered(quant.quant_fp8, x=lambda a: a["x"].nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf"))),
        "a zero loses its sign": altered(quant.quant_fp8, x=lambda a: a["x"] + 0.0),
        "products stand for quotients": altered(
            quant.quant_fp8, x=lambda a: a["x"].float() * (1 / a["scale"]), scale=lambda a: torch.ones_like(a["scale"])
        ),
    },
    "per_token_quant_fp8": _quant_mutants(quant.per_token_quant_fp8),
    "per_token_quant_int8": _quant_mutants(quant.per_token_quant_int8)
    | {
        "-128 is used": followed_by(quant.per_token_quant_int8, lambda out, scales, x: out.masked_fill_(out == -127, -128)),
        "half is rounded up": followed_by(
            quant.per_token_quant_int8, lambda out, scales, x: out.add_((x.float() / scales - out == 0.5).to(torch.int8))
        ),
        "127 times a scale is infinite": followed_by(
            quant.per_token_quant_int8,
            lambda out, scales, x: scales.mul_(torch.where(scales == quant.INT8_LARGEST_SCALE, 1 + 2.0**-23, 1.0)),
        ),
    },
    "per_group_quant_fp8": _quant_mutants(quant.per_group_quant_fp8)
    | {
        "groups share a scale": followed_by(
            quant.per_group_quant_fp8, lambda out, scales, *rest: scales.copy_(scales[:, :1].expand_as(scales)) if scales.numel() else None
        ),
    },
}  # fmt: skip


def _caught(op: str, kernel: Callable[..., None], seed: int) -> bool:
    for case in reversed(CASES):  # the special cases of attention come after its large grid
        if case.op != op:
            continue
        try:
            run_case(case, kernel, seed, "reference")
        except (AssertionError, RuntimeError):
            return True
    return False


@pytest.mark.parametrize(
    ("op", "mutant"), [pytest.param(op, name, id=f"{op}: {name}") for op, mutants in MUTANTS.items() for name in mutants]
)
def test_a_wrong_implementation_is_caught(op: str, mutant: str, seed: int) -> None:
    assert _caught(op, MUTANTS[op][mutant], seed), f"no case of {op} notices that {mutant}"


@pytest.mark.parametrize("op", OPS)
def test_an_op_that_writes_nothing_is_caught(op: str, seed: int) -> None:
    assert op in MUTANTS
    assert _caught(op, lambda *args: None, seed)


@pytest.mark.parametrize("where", [-1, +1])
def test_a_write_beside_the_output_is_caught(where: int, seed: int) -> None:
    def beside(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        norm.rms_norm(out, x, weight, eps)
        if out.numel():
            start = out.storage_offset()
            end = start + sum((size - 1) * stride for size, stride in zip(out.shape, out.stride()))
            out.as_strided((1,), (1,), start - 1 if where < 0 else end + 1).fill_(1.0)

    assert _caught("rms_norm", beside, seed)


def test_an_implementation_joins_the_suite_by_registering(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    library = Library("gristmill_metal", "IMPL")
    try:
        library.impl("silu_and_mul", MUTANTS["silu_and_mul"]["halves are swapped"], "CompositeExplicitAutograd")
        joined = dispatch.Implementation("metal", lambda key: None, ("cpu",))
        monkeypatch.setitem(dispatch._implementations["silu_and_mul"], "metal", joined)
        monkeypatch.setitem(dispatch.PREFERENCE, "cpu", ("metal", *dispatch.PREFERENCE["cpu"]))
        found = [case for family, case in pairs(CASES) if family == "metal"]
        assert len(found) == sum(case.op == "silu_and_mul" for case in CASES)
        with pytest.raises(AssertionError, match="elements are wrong"):
            run_case(found[0], dispatch.overload("silu_and_mul", "metal"), seed, "metal")
    finally:
        library._destroy()


@pytest.mark.parametrize("op", ["rms_norm", "apply_rope", "store_kv", "decode_attention"])
def test_a_call_moved_to_another_device_is_judged_the_same(op: str, seed: int) -> None:
    """`cpu:0` is another name of the CPU, to which everything is copied and back."""
    case = next(case for case in CASES if case.op == op)
    run_case(case, dispatch.overload(op, "reference"), seed, "reference", "cpu:0")
    with pytest.raises(AssertionError):
        run_case(case, lambda *args: None, seed, "reference", "cpu:0")


def test_moved_arguments_share_memory_as_before() -> None:
    whole = torch.arange(24.0).view(4, 6)
    moved = Moved((whole[:, :4], 3, None, whole[:, 4:]), torch.device("cpu:0"))
    left, number, nothing, right = moved.args
    assert (number, nothing, left.stride(), right.storage_offset()) == (3, None, (6, 1), 4)
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    left.fill_(-1)
    assert whole[0, 0] == 0
    moved.back()
    assert (whole[:, :4] == -1).all() and whole[3, 5] == 23


def test_the_oracle_knows_the_published_philox_vectors() -> None:
    """Known answers of Random123's kat_vectors for philox4x32-10."""
    assert oracle.philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert oracle.philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert oracle.philox4x32(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
