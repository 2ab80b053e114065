"""Host-side planning of split-KV decode: which worker computes which piece of which request. Layout of the plan tensor: schema.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gristmill_kernels.checks import refuse_dtype, refuse_shape, refuse_value
from gristmill_kernels.schema import PLAN_HEADER, PLAN_VERSION, SPLIT_TOKENS


@dataclass(frozen=True)
class DecodePlan:
    """A schedule for `decode_attention` or `mla_decode`, valid for every layer and step whose kv_indptr is the one planned for.

    Attributes:
        schedule: int32, on the device of the call (layout in schema.py), `schedule_size(num_requests, num_workers, max_items)` long.
        workspace: contiguous float32, at least `max_items * max_q_len * Hq * (Dv + 2)` elements, for the parts of each item: outputs
            before normalisation, largest scores and sums of exponentials.
        num_requests, num_items, num_workers: sizes that the schedule describes.
        max_items: items that schedule and workspace have room for; what a graph is captured with.
        max_q_len: query rows a request may have.
        window_left: window that the items were chosen for; -1 for none.
    """

    schedule: Tensor = field(repr=False)
    workspace: Tensor = field(repr=False)
    num_requests: int
    num_items: int
    num_workers: int
    max_items: int
    max_q_len: int = 1
    window_left: int = -1


def max_decode_items(max_requests: int, max_kv_tokens: int) -> int:
    """Items that suffice for any plan of at most `max_requests` requests with at most `max_kv_tokens` KV entries in all.

    A list of n entries makes ceil(n / SPLIT_TOKENS) items, so B lists of n entries in all make at most B + n // SPLIT_TOKENS, and no more
    than n.

    Args:
        max_requests: requests in a batch, padding included.
        max_kv_tokens: entries of kv_indices.

    Returns:
        The number of items, to be passed to `plan_decode` as `max_items`.

    Raises:
        ValueError: a number is negative.
    """
    for name, value in (("max_requests", max_requests), ("max_kv_tokens", max_kv_tokens)):
        if value < 0:
            raise refuse_value("max_decode_items", name, value, "at least 0")
    return min(max_requests + max_kv_tokens // SPLIT_TOKENS, max_kv_tokens)


def decode_workspace_size(max_requests: int, max_kv_tokens: int, num_qo_heads: int, head_dim_v: int, max_q_len: int = 1) -> int:
    """float32 elements of a workspace that suffices for any plan of at most this many requests with at most this many KV entries in all.

    Args:
        max_requests, max_kv_tokens: as in `max_decode_items`.
        num_qo_heads: heads of q.
        head_dim_v: width of a value head (the latent width for `mla_decode`).
        max_q_len: query rows that a request may have.

    Returns:
        The number of elements, exact beyond 2^31 too.

    Raises:
        ValueError: a number is negative.
    """
    return max_decode_items(max_requests, max_kv_tokens) * max_q_len * num_qo_heads * (head_dim_v + 2)


def schedule_size(num_requests: int, num_workers: int, max_items: int) -> int:
    """int32 words of a schedule: header, two indptr, and two words per item."""
    return PLAN_HEADER + num_workers + 1 + num_requests + 1 + 2 * max_items


def plan_decode(
    kv_indptr_host: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_v: int,
    *,
    num_workers: int,
    max_q_len: int = 1,
    window_left: int = -1,
    max_items: int | None = None,
    device: torch.device | str = "cpu",
    workspace: Tensor | None = None,
    out: DecodePlan | None = None,
) -> DecodePlan:
    """Cut every KV list into items of SPLIT_TOKENS entries and give each worker a contiguous run of about equal work.

    The cuts do not depend on the batch or on `num_workers`, so neither do results.

    For a captured graph: plan once with `max_items=max_decode_items(...)`, capture with that plan, and before every replay plan again with
    `out=` the first one. That writes the same schedule tensor on the current stream and never waits for the device; pad a smaller batch
    with requests of length 0.

    Args:
        kv_indptr_host: [B + 1] int32 on the CPU.
        num_qo_heads, num_kv_heads: heads of q and of the cache (1 for latent attention).
        head_dim_v: width of a value head.
        num_workers: threads, or thread blocks per KV head, that will share the work.
        max_q_len: query rows that a request may have; more than 1 only for `mla_decode` with `qo_indptr`.
        window_left: the window of the calls; items that no row sees are left out. A plan without a window serves any window.
        max_items: room to reserve, at least the number of items now; exactly that number when None.
        device: where the schedule and workspace go.
        workspace: float32 to use instead of a new one, at least `max_items * max_q_len * num_qo_heads * (head_dim_v + 2)` elements.
        out: a plan to refresh in place: same B, num_workers, max_q_len and window_left; `max_items`, `device` and `workspace` are its own.

    Returns:
        The plan, to be passed to `decode_attention` or `mla_decode`. With `out`, one that shares its tensors.

    Raises:
        TypeError, ValueError: an argument that does not fit, in one sentence.

    Example:
        >>> import torch
        >>> indptr = torch.tensor([0, 300, 300, 1000], dtype=torch.int32)
        >>> plan = plan_decode(indptr, 32, 8, 128, num_workers=4, max_items=max_decode_items(3, 4096))
        >>> plan.num_items, plan.max_items  # 2 + 0 + 3 pieces of at most 256
        (5, 19)
        >>> longer = plan_decode(indptr + torch.tensor([0, 1, 1, 1]).int(), 32, 8, 128, num_workers=4, out=plan)
        >>> longer.schedule.data_ptr() == plan.schedule.data_ptr()
        True
    """
    if kv_indptr_host.dtype is not torch.int32:
        raise refuse_dtype("plan_decode", "kv_indptr_host", kv_indptr_host, "int32")
    if kv_indptr_host.dim() != 1 or kv_indptr_host.shape[0] == 0 or kv_indptr_host.device.type != "cpu":
        raise refuse_shape("plan_decode", "kv_indptr_host", kv_indptr_host, "[B + 1] on the CPU")
    for name, value in (("num_workers", num_workers), ("max_q_len", max_q_len), ("head_dim_v", head_dim_v)):
        if value < 1:
            raise refuse_value("plan_decode", name, value, "at least 1")
    if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        raise refuse_value("plan_decode", "num_qo_heads", num_qo_heads, f"a multiple of num_kv_heads = {num_kv_heads}")
    window_left = max(window_left, -1)
    lens = kv_indptr_host.diff().long()
    num_requests = len(lens)
    if num_requests and int(lens.min()) < 0:
        raise refuse_value("plan_decode", "kv_indptr_host", kv_indptr_host.tolist()[:8], "non-decreasing")
    item_request, item_start, request_indptr = _items(lens, max_q_len, window_left)
    num_items = len(item_request)
    if out is not None:
        _check_same(out, num_requests, num_workers, max_q_len, window_left)
        max_items, device, workspace = out.max_items, out.schedule.device, out.workspace
    elif max_items is None:
        max_items = num_items
    if num_items > max_items:
        raise refuse_value("plan_decode", "max_items", max_items, f"at least {num_items} for these lists")
    needed = max_items * max_q_len * num_qo_heads * (head_dim_v + 2)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=device)
    elif workspace.dtype is not torch.float32 or workspace.numel() < needed or not workspace.is_contiguous():
        raise refuse_shape("plan_decode", "workspace", workspace, f"contiguous float32 of at least {needed} elements")

    # Worker w begins with the first item whose start lies at or beyond its share of all tokens.
    item_tokens = (lens[item_request] - item_start).clamp(max=SPLIT_TOKENS)
    before = item_tokens.cumsum(0) - item_tokens
    shares = torch.arange(num_workers) * int(item_tokens.sum()) / num_workers
    worker_indptr = torch.cat([torch.searchsorted(before.double(), shares.double()), torch.tensor([num_items])])
    header = torch.tensor([PLAN_VERSION, num_requests, num_items, num_workers, SPLIT_TOKENS, max_q_len, max_items, window_left])
    assert len(header) == PLAN_HEADER
    unused = torch.full((max_items - num_items,), -1)
    words = torch.cat([header, worker_indptr, request_indptr, item_request, unused, item_start, unused])
    schedule = _upload(words.to(torch.int32), torch.device(device), None if out is None else out.schedule)
    return DecodePlan(schedule, workspace, num_requests, num_items, num_workers, max_items, max_q_len, window_left)


def _items(lens: Tensor, max_q_len: int, window_left: int) -> tuple[Tensor, Tensor, Tensor]:
    """Request and start of every item, and where the items of each request begin [B + 1]; all int64."""
    first = torch.zeros_like(lens)
    if window_left >= 0:
        # The earliest row sits at position len - max_q_len at the least, and sees nothing before position - window_left.
        first = (lens - max_q_len - window_left).clamp(min=0) // SPLIT_TOKENS
    count = (lens + SPLIT_TOKENS - 1) // SPLIT_TOKENS - first
    request_indptr = torch.zeros(len(lens) + 1, dtype=torch.int64)
    torch.cumsum(count, 0, out=request_indptr[1:])
    item_request = torch.repeat_interleave(torch.arange(len(lens)), count)
    within = torch.arange(len(item_request)) - request_indptr[item_request]
    return item_request, (first[item_request] + within) * SPLIT_TOKENS, request_indptr


def _check_same(out: DecodePlan, num_requests: int, num_workers: int, max_q_len: int, window_left: int) -> None:
    wanted = {"num_requests": num_requests, "num_workers": num_workers, "max_q_len": max_q_len, "window_left": window_left}
    for name, value in wanted.items():
        if getattr(out, name) != value:
            raise refuse_value("plan_decode", f"out.{name}", getattr(out, name), f"{value} as in this call")


def _upload(words: Tensor, device: torch.device, target: Tensor | None) -> Tensor:
    """`words` on `device`, into `target` if given. The pinned staging comes from torch's caching allocator, which hands a block out again
    only when the copy that read it is done."""
    if target is None:
        target = torch.empty(words.shape, dtype=torch.int32, device=device)
    target.copy_(words.pin_memory() if target.is_cuda else words, non_blocking=True)
    return target
