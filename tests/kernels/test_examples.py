"""The examples for other engines run, on the CPU, and use what they say they use."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_decode_step_in_plain_pytorch() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(EXAMPLES / "plain_pytorch.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "agrees with the definition" in done.stdout


def test_transformers_generates_the_same_with_our_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("hf_attention", EXAMPLES / "hf_attention.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    calls = []
    attention = example.ragged_attention

    def counted(*args: object, **options: object) -> object:
        calls.append("custom_mask" in options)
        return attention(*args, **options)

    monkeypatch.setattr(example, "ragged_attention", counted)
    example.main()  # compares
    assert len(calls) == 2 * 20 and all(calls), "two layers and twenty steps, of a padded batch"
