"""A tiny model directory that a test may damage, and loading as the worker does it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from gristmill.layers.ops import TorchOps
from gristmill.loading.config import load_config
from gristmill.loading.weights import load_weights
from gristmill.models.registry import build_model
from tests.support.tiny_model import make_tiny_gguf, make_tiny_model


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("pristine") / "m")
    make_tiny_gguf(folder.parent / "m.gguf", folder, "Q8_0")
    return folder


@pytest.fixture
def model_dir(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "m"))


@pytest.fixture(scope="session")
def load():
    """Load the model at a path into plain PyTorch layers and return it."""

    def run(path, progress=None):
        with torch.inference_mode():
            config = load_config(path)
            model = build_model(config, TorchOps(), torch.float32, config.context_length)
            load_weights(model, path, progress)
            return model

    return run
