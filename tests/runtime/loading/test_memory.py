"""Loading needs the memory of the weights plus one shard, not a second copy of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_model import make_tiny_model

CODE = """
import json, sys
import torch
from gristmill.layers.ops import KernelOps
from gristmill.loading.config import load_config
from gristmill.loading.weights import load_weights
from gristmill.models.registry import build_model

def peak():
    # not getrusage: its maximum is inherited from the parent
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["VmHWM"].split()[0]) * 1024

def load(path):
    with torch.inference_mode():
        config = load_config(path)
        model = build_model(config, KernelOps(config, torch.float32, "cpu"), torch.float32, 64)
        load_weights(model, path)
        return model

small = load(sys.argv[1])  # libraries, packing buffers
before = peak()
model = load(sys.argv[2])
print(json.dumps(peak() - before))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_peak_while_loading(tmp_path):
    small = make_tiny_model(tmp_path / "small")
    large = make_tiny_model(tmp_path / "large", hidden=512, intermediate=1280, heads=8, kv_heads=8, layers=8, shards=8)
    shards = [path.stat().st_size for path in large.glob("*.safetensors")]
    total, largest = sum(shards), max(shards)
    assert total > 90e6 and largest < total / 6
    done = subprocess.run([sys.executable, "-c", CODE, small, large], check=True, capture_output=True, text=True, timeout=120)
    grown = json.loads(done.stdout)
    slack = 40e6  # a fused layer before it is packed (5 MB), and what the allocator keeps
    assert total * 0.8 < grown < total + largest + slack < 2 * total, f"{grown / 1e6:.0f} MB for {total / 1e6:.0f} MB of weights"
