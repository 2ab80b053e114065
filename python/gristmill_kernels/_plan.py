"""Host-side planning of split-KV decode: which worker computes which piece of which request. Layout of the plan tensor: schema.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gristmill_kernels.checks import refuse_dtype, refuse_shape, refuse_value
from gristmill_kernels.schema import PLAN_HEADER, PLAN_VERSION, SPLIT_TOKENS


@dataclass(frozen=True)
class DecodePlan:
    """A schedule for `decode_attention`, valid for every layer and step whose kv_indptr is the one planned for.

    Attributes:
        schedule: int32, on the device of the call (layout in schema.py).
        workspace: float32, `decode_workspace_size` elements: partial outputs and their LSE.
        num_requests, num_items, num_workers: sizes that the schedule describes.
    """

    schedule: Tensor = field(repr=False)
    workspace: Tensor = field(repr=False)
    num_requests: int
    num_items: int
    num_workers: int


def decode_workspace_size(max_requests: int, max_kv_tokens: int, num_qo_heads: int, head_dim_v: int) -> int:
    """float32 elements that suffice for any plan of at most this many requests with at most this many KV entries in all."""
    return (max_requests + max_kv_tokens // SPLIT_TOKENS) * num_qo_heads * (head_dim_v + 2)


def plan_decode(
    kv_indptr_host: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_v: int,
    *,
    num_workers: int,
    device: torch.device | str = "cpu",
    workspace: Tensor | None = None,
) -> DecodePlan:
    """Cut every KV list into items of SPLIT_TOKENS entries and give each worker a contiguous run of about equal work.

    The cuts do not depend on the batch or on `num_workers`, so neither do results.

    Args:
        kv_indptr_host: [B + 1] int32 on the CPU.
        num_qo_heads, num_kv_heads: heads of q and of the cache.
        head_dim_v: width of a value head.
        num_workers: threads, or thread blocks per KV head, that will share the work.
        device: where the schedule and workspace go.
        workspace: float32 to use instead of a new one, at least `num_items * num_qo_heads * (head_dim_v + 2)` elements.

    Returns:
        The plan, to be passed to `decode_attention`.

    Raises:
        TypeError, ValueError: an argument that does not fit, in one sentence.
    """
    if kv_indptr_host.dtype is not torch.int32:
        raise refuse_dtype("plan_decode", "kv_indptr_host", kv_indptr_host, "int32")
    if kv_indptr_host.dim() != 1 or kv_indptr_host.shape[0] == 0 or kv_indptr_host.device.type != "cpu":
        raise refuse_shape("plan_decode", "kv_indptr_host", kv_indptr_host, "[B + 1] on the CPU")
    if num_workers < 1:
        raise refuse_value("plan_decode", "num_workers", num_workers, "at least 1")
    if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        raise refuse_value("plan_decode", "num_qo_heads", num_qo_heads, f"a multiple of num_kv_heads = {num_kv_heads}")
    lens = kv_indptr_host.diff().long()
    if lens.numel() and int(lens.min()) < 0:
        raise refuse_value("plan_decode", "kv_indptr_host", kv_indptr_host.tolist()[:8], "non-decreasing")
    items_per_request = (lens + SPLIT_TOKENS - 1) // SPLIT_TOKENS
    request_indptr = torch.zeros(len(lens) + 1, dtype=torch.int64)
    torch.cumsum(items_per_request, 0, out=request_indptr[1:])
    num_items = int(request_indptr[-1])
    item_request = torch.repeat_interleave(torch.arange(len(lens)), items_per_request)
    item_start = (torch.arange(num_items) - request_indptr[item_request]) * SPLIT_TOKENS
    item_tokens = (lens[item_request] - item_start).clamp(max=SPLIT_TOKENS)
    # Worker w begins with the first item whose start lies at or beyond its share of all tokens.
    before = item_tokens.cumsum(0) - item_tokens
    shares = torch.arange(num_workers) * int(lens.sum()) / num_workers
    worker_indptr = torch.cat([torch.searchsorted(before.double(), shares.double()), torch.tensor([num_items])])
    header = torch.tensor([PLAN_VERSION, len(lens), num_items, num_workers, SPLIT_TOKENS])
    assert len(header) == PLAN_HEADER
    schedule = torch.cat([header, worker_indptr, request_indptr, item_request, item_start]).to(torch.int32)
    needed = num_items * num_qo_heads * (head_dim_v + 2)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=device)
    elif workspace.dtype is not torch.float32 or workspace.numel() < needed or not workspace.is_contiguous():
        raise refuse_shape("plan_decode", "workspace", workspace, f"contiguous float32 of at least {needed} elements")
    return DecodePlan(schedule.to(device), workspace, len(lens), num_items, num_workers)
