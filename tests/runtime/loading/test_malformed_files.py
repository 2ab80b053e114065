"""Whatever bytes a model file holds, loading ends with a model or one ModelError: never another traceback, never a hang."""

from __future__ import annotations

import json
import random

import pytest

from gristmill.errors import ModelError
from gristmill.loading.config import load_config
from gristmill.loading.safetensors import SafetensorsSource

FIRST = "model-00001-of-00002.safetensors"
ROUNDS = 60


def damage(data: bytes, rng: random.Random, head: int) -> bytes:
    """Cut at a random place, or change a few random bytes of the first `head`."""
    if rng.random() < 0.4:
        return data[: rng.choice((rng.randrange(head), rng.randrange(len(data))))]
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        changed[rng.randrange(min(head, len(data)))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed)


def outcome(action) -> str:
    """ "ok", or the sentence of a ModelError; anything else passes through and fails the test."""
    try:
        action()
    except ModelError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return str(error)
    return "ok"


def test_damaged_safetensors(model_dir, load, seed):
    rng = random.Random(seed)
    data = (model_dir / FIRST).read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    seen = set()
    for _ in range(ROUNDS):
        (model_dir / FIRST).write_bytes(damage(data, rng, head))
        seen.add(outcome(lambda: load(model_dir))[-40:])
    assert len(seen) > 1, f"no damage was noticed (seed {seed})"


def test_damaged_gguf(pristine, tmp_path, load, seed):
    rng = random.Random(seed)
    data = (pristine.parent / "m.gguf").read_bytes()
    head = data.index(b"blk.1.ffn_up.weight") + 100  # metadata and tensor table
    path, seen = tmp_path / "m.gguf", set()
    for _ in range(ROUNDS):
        path.write_bytes(damage(data, rng, head))
        seen.add(outcome(lambda: load(path))[-40:])
    assert len(seen) > 3, f"no damage was noticed (seed {seed})"


def test_damaged_json(model_dir, load, seed):
    rng = random.Random(seed)
    for name in ("config.json", "model.safetensors.index.json"):
        data = (model_dir / name).read_bytes()
        for _ in range(ROUNDS // 2):
            (model_dir / name).write_bytes(damage(data, rng, len(data)))
            outcome(lambda: load(model_dir))
        (model_dir / name).write_bytes(data)


@pytest.mark.parametrize("value", [None, 5, "text", [], [1], {}, {"a": 1}, 1e400, -1, True, 2**70, ""], ids=repr)
def test_any_json_value_in_any_configuration_field(value, model_dir):
    original = json.loads((model_dir / "config.json").read_text())
    for key in [
        *original,
        "rope_scaling",
        "rope_parameters",
        "tie_word_embeddings",
        "text_config",
        "attention_bias",
        "sliding_window",
        "max_window_layers",
    ]:
        (model_dir / "config.json").write_text(json.dumps(original | {key: value}))
        outcome(lambda: load_config(model_dir))
        (model_dir / "config.json").write_text(json.dumps(original | {"use_sliding_window": True, "model_type": "qwen2", key: value}))
        outcome(lambda: load_config(model_dir))


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b"[]",
        b'{"x": 5}',
        b'{"x": {"dtype": "F32"}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [9223372036854775807, 9223372036854775807], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        b"[" * 100_000,
        b'{"x": "\xff"}',
    ],
    ids=lambda header: header[:60].decode("latin-1"),
)
def test_hostile_safetensors_headers(header, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    outcome(lambda: list(SafetensorsSource(tmp_path).tensors()))
