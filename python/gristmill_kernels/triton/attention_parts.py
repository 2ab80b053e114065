"""Device functions shared by the attention kernels: which request a work item belongs to, the score transform, and the softmax step.
Not a kernel and not a launcher.

Work items without a host-side plan. A list of length n cut every `step` entries has ceil(n / step) pieces, but lengths live on the device.
Since floor((a + n) / step) + 1 >= floor(a / step) + ceil(n / step), giving request b the item numbers from `indptr[b] // step + b` up to
`indptr[b + 1] // step + b + 1` leaves room for all of its pieces, needs no prefix sum, and is bounded by `total // step + B`, which the
host knows. At most one number per request stays unused.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gristmill_kernels.checks import name_of
from gristmill_kernels.schema import AttentionKey

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

log2_e = tl.constexpr(LOG2_E)
ln_2 = tl.constexpr(LN_2)


@triton.jit
def first_item(indptr, request, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Number of the first work item of a request whose entries count WIDTH each, cut every STEP."""
    return (tl.load(indptr + request).to(tl.int64) * WIDTH // STEP).to(tl.int32) + request


@triton.jit
def request_of_item(indptr, item, batch, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """The request that owns a work item; `batch` if there is none."""
    before = 0
    for first in range(0, batch, 128):
        request = first + tl.arange(0, 128)
        end = tl.load(indptr + request + 1, mask=request < batch, other=0).to(tl.int64)
        done = (end * WIDTH // STEP + request + 1 <= item) & (request < batch)
        before += tl.sum(done.to(tl.int32), axis=0)
    return before


@triton.jit
def soft_cap(scores, cap):
    """cap * tanh(scores / cap) without a vendor's tanh; a polynomial near 0, where 1 - exp would cancel."""
    x = scores / cap
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    decay = tl.exp2(-2.0 * log2_e * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * (1.0 - decay) / (1.0 + decay)
    return cap * tl.where(square < 0.0625, near, far)


@triton.jit
def softmax_step(scores, largest, total, factor):
    """One online softmax step over scores [M, N] in raw units, of which `factor` makes powers of 2.

    Returns weights [M, N], the rescaling of what was accumulated [M], the new maximum and total. A row whose scores are all -inf passes
    unchanged, bit for bit, so skipped and fully masked blocks are the same thing.
    """
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest * factor)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * factor, -tl.broadcast_to(base[:, None], scores.shape)))
    rescale = tl.exp2(largest * factor - base)
    return weights, rescale, new_largest, total * rescale + tl.sum(weights, 1)


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLOATS_8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
MAX_HEAD_DIM = 576
MAX_GROUP = 128


def head_blocks(head_dim: int) -> tuple[int, int]:
    """Powers of two that cover a head in two parts, so that 576 costs 512 + 64 columns and not 1024; the second part may be 0."""
    first = max(16, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - first
    return first, (max(16, 1 << (rest - 1).bit_length()) if rest > 0 else 0)


def supports_attention(key: AttentionKey) -> str | None:
    """What every attention kernel of this family asks of a call."""
    if key.dtype not in FLOATS:
        return f"dtype {name_of(key.dtype)} is not float32, float16 or bfloat16"
    reason = unreadable(key.device, key.dtype, key.cache_dtype)
    if reason is not None:
        return reason
    if max(key.head_dim, key.head_dim_v) > MAX_HEAD_DIM:
        return f"head sizes {key.head_dim}/{key.head_dim_v} exceed {MAX_HEAD_DIM}"
    if key.num_qo_heads > MAX_GROUP * key.num_kv_heads:
        return f"{key.num_qo_heads} query heads on {key.num_kv_heads} KV heads are more than {MAX_GROUP} each"
    return None


def unreadable(device: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    """Why a cache of this dtype cannot be read beside queries of `dtype` on this device, or None."""
    if cache_dtype is not dtype and cache_dtype not in FLOATS_8:
        return f"a cache of {name_of(cache_dtype)} is neither that of q nor an 8-bit float"
    nvidia = device == "cuda" and torch.version.hip is None
    if cache_dtype == torch.float8_e4m3fnuz and (device == "cpu" or nvidia):
        return "e4m3fnuz is a format of AMD GPUs"
    if cache_dtype == torch.float8_e4m3fn and nvidia and torch.cuda.get_device_capability() < (8, 9):
        return "e4m3fn needs compute capability 8.9 or newer"
    return None
