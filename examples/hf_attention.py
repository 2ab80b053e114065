"""Hugging Face transformers with Gristmill's attention: register a function, name it in `attn_implementation`, and any model of the library
that asks for its attention by name runs on it. Here a tiny random Qwen3, on the CPU; `.cuda()` on model and prompts is all a GPU needs.

    pip install transformers && python examples/hf_attention.py
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3ForCausalLM
from transformers.masking_utils import sdpa_mask

from gristmill_kernels import ragged_attention


def attend(module, query, key, value, attention_mask, scaling=None, **options):
    """[B, Hq, S, D] and two times [B, Hkv, N, D] to [B, S, Hq, D]. The mask, if any, is True where a row may look."""
    batch, _, q_len, _ = query.shape
    kv_len = key.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # the tokens of all requests, one after the other
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    masked = {}
    if attention_mask is not None:
        masked["custom_mask"] = attention_mask.expand(batch, 1, q_len, kv_len).flatten()
        masked["mask_indptr"] = starts * (q_len * kv_len)
    out = ragged_attention(q, k, v, starts * q_len, starts * kv_len, sm_scale=scaling, **masked)  # causal unless masked
    return out.unflatten(0, (batch, q_len)), None


AttentionInterface.register("gristmill", attend)
AttentionMaskInterface.register("gristmill", sdpa_mask)  # None where causal says it all, else a bool mask


def main() -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    model = Qwen3ForCausalLM(config).eval()
    prompts = torch.randint(3, 300, (3, 12))
    mask = torch.ones_like(prompts)
    mask[1, :5] = 0  # shorter prompts are padded on the left
    answers = {}
    for name in ("eager", "gristmill"):
        model.set_attn_implementation(name)
        answers[name] = model.generate(prompts, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert torch.equal(answers["eager"], answers["gristmill"])
    print(f"transformers generates the same {answers['eager'][:, 12:].numel()} tokens with its own attention and with ragged_attention")


if __name__ == "__main__":
    main()
