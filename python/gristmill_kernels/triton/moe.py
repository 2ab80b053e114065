"""Triton kernels of expert routing. The choice: one program per token, over its logits as [groups, experts of a group]. The sort by expert:
chunks are counted, counts summed along chunks and along experts, and then every entry knows its place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gristmill_kernels.checks import FLOAT_DTYPES, name_of
from gristmill_kernels.schema import RoutingKey
from gristmill_kernels.triton import launch
from gristmill_kernels.triton.launch import AotCase, Kernel, Op, Options, supports_any

_NONE = tl.constexpr(float("-inf"))  # an expert that cannot be chosen
# Ids of a chunk, experts counted at once, and places filled at once.
_CHUNK, _EXPERTS, _FILL = 64, 32, 1024
_ROUTE_OPTIONS, _ALIGN_OPTIONS = Options(num_warps=1, num_stages=1), Options(num_warps=4, num_stages=1)


@triton.jit
def _exp_less(x, largest):
    """exp(x - largest), and 1 for equal infinities."""
    return tl.exp(tl.where(x == largest, 0.0, x - largest))


@triton.jit
def _in_best_groups(choice, group, place, TWO: tl.constexpr, KEPT: tl.constexpr, SIZE_BLOCK: tl.constexpr):
    """Which groups stay, by their best expert or the sum of their two best."""
    best = tl.max(choice, axis=1)
    value = best
    if TWO:
        first = tl.min(tl.where(choice == best[:, None], place[None, :], SIZE_BLOCK), axis=1)
        second = tl.max(tl.where(place[None, :] == first[:, None], _NONE, choice), axis=1)
        value = tl.where(second > _NONE, best + second, best)
    before = (value[None, :] == value[:, None]) & (group[None, :] < group[:, None])
    return tl.sum(((value[None, :] > value[:, None]) | before).to(tl.int32), axis=1) < KEPT


@triton.jit
def _route_kernel(
    weights, ids, logits, bias,
    weights_row: tl.int64, ids_row: tl.int64, logits_row: tl.int64, scaling: tl.float32,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, GROUPS_BLOCK), tl.arange(0, SIZE_BLOCK)
    expert = group[:, None] * (EXPERTS // GROUPS) + place[None, :]
    there = (group[:, None] < GROUPS) & (place[None, :] < EXPERTS // GROUPS)
    x = tl.load(logits + row * logits_row + expert, mask=there, other=_NONE).to(tl.float32)
    x = tl.where(x > _NONE, x, _NONE)
    choice = x
    largest = tl.max(x)
    total = 1.0
    if not SIGMOID and (bias is not None or not RENORMALIZE):
        total = tl.sum(tl.where(x > _NONE, _exp_less(x, largest), 0.0))
    if bias is not None:
        if SIGMOID:
            lowered = tl.exp(-tl.abs(x))
            score = tl.where(x >= 0, 1.0, lowered) / (1.0 + lowered)
        else:
            score = _exp_less(x, largest) / total
        biased = score + tl.load(bias + expert, mask=there, other=0.0).to(tl.float32)
        choice = tl.where((x > _NONE) & (biased > _NONE), biased, _NONE)
    if GROUPS > 1:
        kept = _in_best_groups(choice, group, place, bias is not None, KEPT, SIZE_BLOCK)
        choice = tl.where(kept[:, None], choice, _NONE)

    column = tl.arange(0, K_BLOCK)
    chosen = tl.full([K_BLOCK], -1, tl.int32)
    for k in range(K):
        top = tl.max(choice)
        number = tl.min(tl.where((choice == top) & (choice > _NONE), expert, EXPERTS))
        chosen = tl.where((column == k) & (number < EXPERTS), number, chosen)
        choice = tl.where(expert == number, _NONE, choice)

    taken = chosen >= 0
    logit = tl.load(logits + row * logits_row + chosen, mask=taken, other=_NONE).to(tl.float32)
    lowered = logit
    if SIGMOID:
        lowered = tl.minimum(logit, 0.0)
    # Relative to the largest chosen logit where weights are renormalized: the least term of the sum is then not tiny.
    if RENORMALIZE:
        term = _exp_less(lowered, tl.max(lowered))
    elif SIGMOID:
        term = tl.exp(lowered)
    else:
        term = _exp_less(lowered, largest)
    if SIGMOID:
        term = term / (1.0 + tl.exp(-tl.abs(logit)))
    term = tl.where(taken, term, 0.0)
    if RENORMALIZE:
        total = tl.sum(term)
    tl.store(ids + row * ids_row + column, chosen, mask=column < K)
    tl.store(weights + row * weights_row + column, tl.where(taken, scaling * (term / total), 0.0), mask=column < K)


@triton.jit
def _experts_of(topk_ids, expert_map, entry, ids_row, count, per_token, mapped, experts):
    """The experts of some entries; -1 for one that goes nowhere."""
    number = tl.load(topk_ids + (entry // per_token).to(tl.int64) * ids_row + entry % per_token, mask=entry < count, other=-1)
    if expert_map is not None:
        number = tl.load(expert_map + number, mask=(number >= 0) & (number < mapped), other=-1)
    return tl.where((number >= 0) & (number < experts), number, -1)


@triton.jit
def _count_kernel(
    counts, topk_ids, expert_map,
    ids_row: tl.int64, count: tl.int32, per_token: tl.int32, mapped: tl.int32, experts: tl.int32,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    own = _experts_of(topk_ids, expert_map, chunk * CHUNK + tl.arange(0, CHUNK), ids_row, count, per_token, mapped, experts)
    for begin in range(0, experts, BLOCK):
        expert = begin + tl.arange(0, BLOCK)
        here = tl.sum((own[:, None] == expert[None, :]).to(tl.int32), axis=0)
        tl.store(counts + chunk.to(tl.int64) * experts + expert, here, mask=expert < experts)


@triton.jit
def _chunks_kernel(totals, counts, chunks: tl.int32, experts: tl.int32, BLOCK: tl.constexpr):
    """Counts of one expert become what the chunks before each hold."""
    expert = tl.program_id(0)
    total = tl.zeros((), tl.int32)
    for begin in range(0, chunks, BLOCK):
        chunk = begin + tl.arange(0, BLOCK)
        at = counts + chunk.to(tl.int64) * experts + expert
        here = tl.load(at, mask=chunk < chunks, other=0)
        tl.store(at, total + tl.cumsum(here, axis=0) - here, mask=chunk < chunks)
        total += tl.sum(here, axis=0)
    tl.store(totals + expert, total)


@triton.jit
def _starts_kernel(starts, padded, totals, experts: tl.int32, block_size: tl.int32, BLOCK: tl.constexpr):
    """The first place of every expert, and how many places there are."""
    expert = tl.arange(0, BLOCK)
    total = tl.load(totals + expert, mask=expert < experts, other=0)
    places = (total + block_size - 1) // block_size * block_size
    tl.store(starts + expert, tl.cumsum(places, axis=0) - places, mask=expert < experts)
    tl.store(starts + experts, tl.sum(places, axis=0))
    tl.store(padded, tl.sum(places, axis=0))


@triton.jit
def _place_kernel(
    places, counts, starts, topk_ids, expert_map,
    ids_row: tl.int64, count: tl.int32, per_token: tl.int32, mapped: tl.int32, experts: tl.int32,
    CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, lane = tl.program_id(0), tl.arange(0, CHUNK)
    entry = chunk * CHUNK + lane
    own = _experts_of(topk_ids, expert_map, entry, ids_row, count, per_token, mapped, experts)
    rank = tl.sum(((own[:, None] == own[None, :]) & (lane[None, :] < lane[:, None])).to(tl.int32), axis=1)
    there = own >= 0
    before = tl.load(counts + chunk.to(tl.int64) * experts + own, mask=there, other=0)
    tl.store(places + tl.load(starts + own, mask=there, other=0) + before + rank, entry, mask=there)


@triton.jit
def _rest_kernel(
    places, owners, starts, totals,
    count: tl.int32, experts: tl.int32, block_size: tl.int32, num_places: tl.int32, num_owners: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What entries leave open: one program per expert, and one for what lies behind the last."""
    expert = tl.program_id(0)
    begin = tl.load(starts + expert)
    behind = expert == experts
    end = tl.load(starts + expert + 1, mask=expert < experts, other=0)
    filled = begin + tl.load(totals + expert, mask=expert < experts, other=0)
    owner = tl.where(behind, -1, expert)
    for first in range(begin // block_size, tl.where(behind, num_owners, end // block_size), BLOCK):
        block = first + tl.arange(0, BLOCK)
        tl.store(owners + block, owner + tl.zeros_like(block), mask=block < tl.where(behind, num_owners, end // block_size))
    for first in range(filled, tl.where(behind, num_places, end), BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(places + place, count + tl.zeros_like(place), mask=place < tl.where(behind, num_places, end))


_route = Kernel(_route_kernel)
_count, _chunks, _starts = Kernel(_count_kernel), Kernel(_chunks_kernel), Kernel(_starts_kernel)
_place, _rest = Kernel(_place_kernel), Kernel(_rest_kernel)


def route_constants(experts: int, top_k: int, groups: int, kept: int, sigmoid: bool, renormalize: bool) -> tuple:
    blocks = (groups, experts // groups, top_k)
    return (experts, groups, kept, top_k, sigmoid, renormalize, *map(launch.next_power_of_2, blocks))


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
    strides = (weights.stride(0), ids.stride(0), logits.stride(0))
    constants = route_constants(logits.shape[1], ids.shape[1], num_groups, topk_groups, sigmoid, renormalize)
    _route((logits.shape[0], 1, 1), (weights, ids, logits, bias, *strides, scaling), constants, _ROUTE_OPTIONS)


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
    count, per_token = topk_ids.numel(), max(1, topk_ids.shape[1])
    chunks = launch.cdiv(count, _CHUNK)
    scratch = torch.empty((chunks + 2) * num_experts + 1, dtype=torch.int32, device=topk_ids.device)
    totals, starts, counts = scratch.split((num_experts, num_experts + 1, chunks * num_experts))
    sizes = (topk_ids.stride(0), count, per_token, 0 if expert_map is None else expert_map.shape[0], num_experts)
    _count((chunks, 1, 1), (counts, topk_ids, expert_map, *sizes), (_CHUNK, _EXPERTS), _ALIGN_OPTIONS)
    _chunks((num_experts, 1, 1), (totals, counts, chunks, num_experts), (_FILL,), _ALIGN_OPTIONS)
    experts_block = launch.next_power_of_2(num_experts)
    _starts((1, 1, 1), (starts, num_tokens_post_padded, totals, num_experts, block_size), (experts_block,), _ALIGN_OPTIONS)
    _place((chunks, 1, 1), (sorted_token_ids, counts, starts, topk_ids, expert_map, *sizes), (_CHUNK,), _ALIGN_OPTIONS)
    rooms = (count, num_experts, block_size, sorted_token_ids.shape[0], expert_ids.shape[0])
    _rest((num_experts + 1, 1, 1), (sorted_token_ids, expert_ids, starts, totals, *rooms), (_FILL,), _ALIGN_OPTIONS)


def supports(key: RoutingKey) -> str | None:
    return None if key.dtype in FLOAT_DTYPES else f"dtype {name_of(key.dtype)} is not float32, float16 or bfloat16"


OPS = {function.__name__: Op(function, supports) for function in (topk_softmax, topk_sigmoid, grouped_topk)}
OPS["align_block_size"] = Op(align_block_size, supports_any)

_FLOAT, _INT = torch.float32, torch.int32
AOT = [
    AotCase("128", _route, (_FLOAT, _INT, torch.bfloat16, None), route_constants(128, 8, 1, 1, False, True), _ROUTE_OPTIONS),
    AotCase("256of8", _route, (_FLOAT, _INT, _FLOAT, _FLOAT), route_constants(256, 8, 8, 4, True, True), _ROUTE_OPTIONS),
    AotCase("160of8", _route, (_FLOAT, _INT, torch.float16, torch.bfloat16), route_constants(160, 6, 8, 3, False, False), _ROUTE_OPTIONS),
    AotCase("", _count, (_INT, _INT, None), (_CHUNK, _EXPERTS), _ALIGN_OPTIONS),
    AotCase("", _chunks, (_INT,) * 2, (_FILL,), _ALIGN_OPTIONS),
    AotCase("256", _starts, (_INT,) * 3, (256,), _ALIGN_OPTIONS),
    AotCase("", _place, (_INT,) * 5, (_CHUNK,), _ALIGN_OPTIONS),
    AotCase("", _rest, (_INT,) * 4, (_FILL,), _ALIGN_OPTIONS),
]
