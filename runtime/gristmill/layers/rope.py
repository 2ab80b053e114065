"""The rotary embedding's cos/sin cache with the scaling rules of `transformers` (modeling_rope_utils.py): default, linear, llama3, yarn.

Rules that change with the length of the running sequence (dynamic, longrope) are refused when the model is loaded.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from gristmill.errors import ModelError
from gristmill.loading.config import ModelConfig

SUPPORTED = ("linear", "llama3", "yarn", "freq_factors")


def check_rope(config: ModelConfig) -> None:
    """Raise ModelError when the model's rope scaling is not supported or lacks a parameter."""
    inverse_frequencies(config, freq_factors=torch.ones(config.head_dim // 2))


def cos_sin_cache(config: ModelConfig, n_positions: int, freq_factors: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [n_positions, head_dim]: cos of all frequencies, then sin. `freq_factors` are the divisors a GGUF file stores."""
    frequencies, scale = inverse_frequencies(config, freq_factors)
    angles = torch.arange(n_positions, dtype=torch.float32)[:, None] * frequencies[None]
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1)


def inverse_frequencies(config: ModelConfig, freq_factors: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
    """float32 [head_dim / 2] and the factor that yarn applies to cos and sin (1 elsewhere)."""
    dim, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    base = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if scaling is None:
        return base, 1.0
    kind = scaling["rope_type"]
    if kind == "linear":
        return base / _number(scaling, "factor"), 1.0
    if kind == "llama3":
        return _llama3(base, scaling), 1.0
    if kind == "yarn":
        return _yarn(base, dim, theta, scaling)
    if kind == "freq_factors":
        if freq_factors is None or freq_factors.shape != base.shape:
            found = None if freq_factors is None else tuple(freq_factors.shape)
            raise ModelError(f"tensor 'rope_freqs.weight' must hold {dim // 2} values, one per rotary frequency, not {found}")
        return base / freq_factors, 1.0
    raise ModelError(f"rope scaling {kind!r} is not supported; known: {', '.join(SUPPORTED[:-1])}")


def _number(scaling: dict[str, Any], key: str, default: float | None = None) -> float:
    value: Any = scaling.get(key)
    if value is None:
        value = default
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"rope scaling {scaling['rope_type']!r} needs a positive number as {key!r}, not {value!r}")
    return float(value)


def _llama3(base: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Wavelengths above old/low_freq_factor are divided by `factor`, those below old/high_freq_factor kept, the band between blended."""
    factor, low, high = (_number(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    old_context = _number(scaling, "original_max_position_embeddings")
    wavelength = 2 * math.pi / base
    scaled = torch.where(wavelength > old_context / low, base / factor, base)
    smooth = (old_context / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelength < old_context / high) & ~(wavelength > old_context / low)
    return torch.where(medium, blended, scaled)


def _yarn(base: torch.Tensor, dim: int, theta: float, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate low frequencies, keep high ones, a linear ramp between; cos and sin get the mscale."""
    factor, old_context = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")
    beta_fast, beta_slow = _number(scaling, "beta_fast", 32.0), _number(scaling, "beta_slow", 1.0)

    def mscale(value: float) -> float:
        return 0.1 * value * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        attention = _number(scaling, "attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention = mscale(_number(scaling, "mscale")) / mscale(_number(scaling, "mscale_all_dim"))
    else:
        attention = mscale(1.0)

    def correction(rotations: float) -> float:
        return dim * math.log(old_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(beta_fast), correction(beta_slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return base / factor * ramp + base * (1 - ramp), attention
