"""What every op means, in float64 NumPy and plain Python loops, written from the definitions and sharing nothing with the package."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NEGATIVE_INFINITY = float("-inf")


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def layer_norm(x: Array, weight: Array | None, bias: Array | None, eps: float) -> tuple[Array, Array]:
    """Normalised rows and the sum of magnitudes behind every element."""
    mean = x.mean(axis=-1, keepdims=True)
    inverse = 1 / np.sqrt(((x - mean) ** 2).mean(axis=-1, keepdims=True) + eps)
    factor = inverse * (1.0 if weight is None else weight)
    offset = 0.0 if bias is None else bias
    magnitude = (abs(x) + abs(x).mean(axis=-1, keepdims=True)) * abs(factor) + abs(offset)
    return (x - mean) * factor + offset, magnitude


def rope(x: Array, positions: NDArray[np.int32], table: Array, is_neox: bool) -> tuple[Array, Array]:
    """Rotated [T, H, D] and the sum of magnitudes behind every element."""
    result, magnitude = x.copy(), np.zeros_like(x)
    half = table.shape[1] // 2
    for token, position in enumerate(positions):
        if not 0 <= position < table.shape[0]:
            continue
        for pair in range(half):
            cos, sin = table[position, pair], table[position, half + pair]
            i, j = (pair, pair + half) if is_neox else (2 * pair, 2 * pair + 1)
            a, b = x[token, :, i], x[token, :, j]
            result[token, :, i], result[token, :, j] = a * cos - b * sin, b * cos + a * sin
            magnitude[token, :, i] = abs(a * cos) + abs(b * sin)
            magnitude[token, :, j] = abs(b * cos) + abs(a * sin)
    return result, magnitude


def silu_and_mul(x: Array) -> Array:
    half = x.shape[-1] // 2
    gate, up = x[..., :half], x[..., half:]
    with np.errstate(over="ignore"):
        return gate / (1.0 + np.exp(-gate)) * up


def _halves(x: Array) -> tuple[Array, Array]:
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def gelu_and_mul(x: Array) -> tuple[Array, Array]:
    """gate * Phi(gate) * up and |gate * up|."""
    gate, up = _halves(x)
    normal_cdf = np.vectorize(lambda g: 0.5 * math.erfc(-g / math.sqrt(2.0)), otypes=[np.float64])
    return gate * normal_cdf(gate) * up, abs(gate * up)


def gelu_tanh_and_mul(x: Array) -> tuple[Array, Array]:
    """The tanh form of the same, by 1 + tanh(y) = 2 / (1 + e^-2y)."""
    gate, up = _halves(x)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-2 * inner)) * up, abs(gate * up)


def swiglu_oai(x: Array, alpha: float, limit: float) -> tuple[Array, Array]:
    gate, up = np.minimum(x[..., 0::2], limit), np.clip(x[..., 1::2], -limit, limit)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-alpha * gate)) * (up + 1), abs(gate) * (abs(up) + 1)


# The 8-bit floats: exponent bits, mantissa bits, bias, and the codes (without sign) that are no finite number.
_FLOAT8 = {"e4m3fn": (4, 3, 7, {0x7F}), "e5m2": (5, 2, 15, {0x7C, 0x7D, 0x7E, 0x7F}), "e4m3fnuz": (4, 3, 8, set())}


def float8_values(name: str) -> Array:
    """All finite values >= 0 of a format, ascending; the index of a value is its code."""
    _, mantissa_bits, bias, others = _FLOAT8[name]
    values = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        value = math.ldexp(1 + fraction, exponent - bias) if exponent else math.ldexp(fraction, 1 - bias)
        if code not in others:
            values.append(value)
    return np.array(values)


def to_float8(x: NDArray[np.float32], name: str) -> Array:
    """The value of a format nearest to each x, of two equally near ones that with the even code; saturating; NaN for NaN."""
    values = float8_values(name)
    magnitude = np.minimum(abs(x.astype(np.float64)), values[-1])
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    middle = (values[above - 1] + values[above]) / 2
    take_above = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    rounded = np.where(take_above, values[above], values[above - 1])
    return np.where(np.isnan(x), np.nan, np.copysign(rounded, x))


def float8_codes(values: Array, name: str) -> NDArray[np.uint8]:
    """The codes of values of a format; those of NaN mean nothing."""
    codes = np.searchsorted(float8_values(name), np.nan_to_num(abs(values))).astype(np.uint8)
    no_sign = (codes == 0) & (name == "e4m3fnuz")
    return codes | np.where(np.signbit(values) & ~no_sign, 0x80, 0).astype(np.uint8)


def quant_scale(x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """float32[..., 1] scales of the last dimension's elements."""
    largest = np.float32(127 if name == "int8" else float8_values(name)[-1])
    amax = np.where(np.isfinite(x), abs(x), 0).max(-1, keepdims=True, initial=0).astype(np.float32)
    scale = np.maximum(amax / largest, np.float32(2.0**-126))
    with np.errstate(over="ignore"):
        while (beyond := np.isinf(scale * largest)).any():
            scale = np.where(beyond, np.nextafter(scale, np.float32(0)), scale)
    return scale


def quantised(x: NDArray[np.float32], scale: NDArray[np.float32], name: str) -> Array:
    """The values of the codes of x / scale."""
    with np.errstate(over="ignore", invalid="ignore"):
        quotient = x / scale
    if name != "int8":
        return to_float8(quotient, name)
    return np.where(np.isnan(quotient), 0, np.clip(np.rint(quotient), -127, 127)).astype(np.float64)


def float32_quotient(x: NDArray[np.float32], scale: float) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        return x / np.float32(scale)


@dataclass
class AttentionResult:
    out: Array
    lse: Array
    # Sum of p|v| behind every output element, and the largest |q||k| * scale behind every row's logits.
    out_magnitude: Array
    logit_magnitude: Array


def attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    requests: list[tuple[range, list[int]]],
    *,
    scale: float,
    causal: bool = True,
    masks: list[NDArray[np.bool_]] | None = None,
    logit_cap: float = 0.0,
    window_left: int = -1,
    sinks: Array | None = None,
    v_scale: float = 1.0,
) -> AttentionResult:
    """`requests`: for each, its rows of q and its slots in order of position. `masks` replace the causal mask."""
    rows, heads, _ = q.shape
    group = heads // k_cache.shape[1]
    out = np.zeros((rows, heads, v_cache.shape[2]))
    result = AttentionResult(out, np.full((rows, heads), NEGATIVE_INFINITY), np.zeros_like(out), np.zeros((rows, heads)))
    for number, (row_range, slots) in enumerate(requests):
        for i, row in enumerate(row_range):
            position = len(slots) - len(row_range) + i
            seen = [j for j in range(len(slots)) if slots[j] >= 0 and (window_left < 0 or j >= position - window_left)]
            if masks is not None:
                seen = [j for j in seen if masks[number][i, j]]
            elif causal:
                seen = [j for j in seen if j <= position]
            where = np.array([slots[j] for j in seen], dtype=np.int64)
            keys, values = k_cache[where], v_cache[where]
            for head in range(heads):
                sink = None if sinks is None else float(sinks[head])
                _attend_one(result, (row, head), q[row, head], keys[:, head // group], values[:, head // group], scale, logit_cap, sink)
    result.out *= v_scale
    result.out_magnitude *= abs(v_scale)
    return result


def _attend_one(
    result: AttentionResult, at: tuple[int, int], q: Array, keys: Array, values: Array, scale: float, logit_cap: float, sink: float | None
) -> None:
    logits = keys @ q * scale
    if logit_cap > 0:
        logits = logit_cap * np.tanh(logits / logit_cap)
    everything = logits if sink is None else np.append(logits, sink)
    if len(everything) == 0:
        return
    largest = everything.max()
    total = np.exp(everything - largest).sum()
    weights = np.exp(logits - largest) / total
    result.lse[at] = largest + math.log(total)
    result.out[at] = weights @ values
    result.out_magnitude[at] = weights @ abs(values)
    if len(logits):
        result.logit_magnitude[at] = (abs(keys) @ abs(q)).max() * abs(scale)


def merge(o_a: Array, lse_a: Array, o_b: Array, lse_b: Array) -> tuple[Array, Array, Array]:
    """Merged output, LSE, and the sum of magnitudes behind every output element."""
    return merge_many(np.stack([o_a, o_b]), np.stack([lse_a, lse_b]))


def merge_many(states: Array, lses: Array) -> tuple[Array, Array, Array]:
    """As `merge`, of states [N, T, H, D] and LSEs [N, T, H]."""
    out, lse, magnitude = np.zeros(states.shape[1:]), np.full(lses.shape[1:], NEGATIVE_INFINITY), np.zeros(states.shape[1:])
    for at in np.ndindex(lse.shape):
        parts = [(one_lse[at], one[at]) for one_lse, one in zip(lses, states) if one_lse[at] != NEGATIVE_INFINITY]
        if not parts:
            continue
        largest = max(value for value, _ in parts)
        weights = [math.exp(value - largest) for value, _ in parts]
        lse[at] = largest + math.log(sum(weights))
        out[at] = sum(weight * o for weight, (_, o) in zip(weights, parts)) / sum(weights)
        # A float32 difference of LSEs is off by up to |difference| * 2^-24, so its weight is by that much, relatively.
        magnitude[at] = sum((1 + (largest - value)) * weight * abs(o) for weight, (value, o) in zip(weights, parts)) / sum(weights)
    return out, lse, magnitude


def round_to(values: Array, x: Array) -> Array:
    """Nearest of `values` (by code; NaN where a code has no finite value), ties to the even code; beyond the largest it saturates."""
    codes = np.array(sorted((code for code in range(len(values)) if not math.isnan(values[code])), key=lambda code: values[code]))
    grid = values[codes]
    bounded = np.clip(x, grid[0], grid[-1])
    above = np.clip(np.searchsorted(grid, bounded), 1, len(grid) - 1)
    up, down = grid[above] - bounded, bounded - grid[above - 1]
    takes_upper = (up < down) | ((up == down) & (codes[above] % 2 == 0))
    return np.where(np.isnan(x), np.nan, np.where(takes_upper, grid[above], grid[above - 1]))


def philox4x32(counter: tuple, key: tuple[int, int]) -> tuple:
    """Ten rounds of Philox4x32 (Salmon et al. 2011, section 3.3); counter words are Python integers or uint64 arrays."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (product_1 >> 32) ^ c1 ^ k0, product_1 & 0xFFFFFFFF, (product_0 >> 32) ^ c3 ^ k1, product_0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, vocab_size: int) -> Array:
    blocks = np.arange((vocab_size + 3) // 4, dtype=np.uint64)
    zero = np.zeros_like(blocks)
    words = philox4x32((zero + (position & 0xFFFFFFFF), blocks, zero, zero), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    u = (np.stack(words, axis=1).reshape(-1)[:vocab_size].astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log(u))


def is_drawable(logits: Array) -> bool:
    return not (np.isnan(logits).any() or (logits == np.inf).any() or (logits == NEGATIVE_INFINITY).all())


def greedy(logits: Array) -> int:
    return int(np.argmax(logits)) if is_drawable(logits) else -1


def survivors(scaled: Array, top_k: int, top_p: float, min_p: float, slack: float) -> set[int]:
    """Tokens that remain; `slack` > 0 moves the top-p and min-p borders outwards, < 0 inwards, by what rounding may do to a sum."""
    ranked = [token for token in np.argsort(-scaled, kind="stable").tolist() if scaled[token] > NEGATIVE_INFINITY]
    if 0 < top_k < len(scaled):
        ranked = ranked[:top_k]
    if top_p < 1:
        probabilities = np.exp(scaled[ranked])
        before = (np.cumsum(probabilities) - probabilities) / probabilities.sum()
        ranked = [token for rank, token in enumerate(ranked) if rank == 0 or before[rank] < top_p + slack]
    if min_p > 0:
        border = min(min_p, 1.0) * (1 - slack)
        ranked = [token for token in ranked if scaled[token] == 0 or math.exp(scaled[token]) >= border]
    return set(ranked)


def acceptable_draws(
    logits: Array, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int, slack: float = 1e-5
) -> set[int]:
    """Ids that a correct implementation may return: usually one, more where a border or a score is closer than rounding."""
    if not is_drawable(logits) or math.isnan(temperature):
        return {-1}
    if temperature <= 0:
        return {greedy(logits)}
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.where(logits == NEGATIVE_INFINITY, NEGATIVE_INFINITY, (logits - logits.max()) / temperature)
    loose = survivors(scaled, top_k, top_p, min_p, slack)
    strict = survivors(scaled, top_k, top_p, min_p, -slack)
    score = scaled + gumbel(seed, position, len(logits))
    best = max(score[token] for token in strict)
    return {token for token in loose if score[token] >= best - slack * (1 + abs(scaled[token]))}
