"""One decode step of a transformer layer in plain PyTorch with gristmill_kernels: no engine, no model library. Runs on the CPU, or on
the GPU if there is one.

    python examples/plain_pytorch.py
"""

import torch

import gristmill_kernels as gk

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
HEADS, KV_HEADS, DIM, HIDDEN, SLOTS = 8, 2, 64, 512, 1024

x = torch.randn(2, HIDDEN, device=device)  # the newest token of two requests, of 5 and 3 tokens
w_qkv = torch.randn((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, device=device) / HIDDEN**0.5
w_out = torch.randn(HIDDEN, HEADS * DIM, device=device) / HIDDEN**0.5
k_cache, v_cache = torch.randn(2, SLOTS, KV_HEADS, DIM, device=device).unbind(0)  # what earlier tokens have stored
slots = torch.tensor([7, 900, 12, 33, 34, 80, 2, 5], dtype=torch.int32, device=device)  # request after request
indptr = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
positions = torch.tensor([4, 2], dtype=torch.int32, device=device)
angles = torch.outer(torch.arange(64, device=device), 10000.0 ** (-torch.arange(0, DIM, 2, device=device) / DIM))
cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)


def decode_step(x: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    normed = gk.rms_norm(x, torch.ones_like(x[0]))
    qkv = gk.skinny_linear(normed, w_qkv).view(-1, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    gk.apply_rope_store_kv(q, k, v, k_cache, v_cache, positions, slots[[4, 7]], cos_sin)  # rotates q and k in place
    attended = gk.decode_attention(q, k_cache, v_cache, indptr, slots)
    return x + gk.skinny_linear(attended.flatten(1), w_out)


def by_definition(x: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    """The same in PyTorch's own operations."""
    qkv = (torch.nn.functional.rms_norm(x, (HIDDEN,), eps=1e-6) @ w_qkv.T).view(-1, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos, sin = cos_sin[positions, None].chunk(2, dim=-1)
    q, k = (torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1)))
    k_cache[slots[[4, 7]]], v_cache[slots[[4, 7]]] = k, v
    rows = []
    for request, keys in enumerate((slots[:5], slots[5:])):
        full_k, full_v = (cache[keys].repeat_interleave(HEADS // KV_HEADS, 1) for cache in (k_cache, v_cache))
        weights = torch.softmax(torch.einsum("hd,nhd->hn", q[request], full_k) / DIM**0.5, -1)
        rows.append(torch.einsum("hn,nhd->hd", weights, full_v))
    return x + torch.stack(rows).flatten(1) @ w_out.T


expected = by_definition(x, k_cache.clone(), v_cache.clone())
torch.testing.assert_close(decode_step(x, k_cache, v_cache), expected, atol=1e-4, rtol=1e-4)
print(f"a decode step on {device} with gristmill_kernels agrees with the definition")
