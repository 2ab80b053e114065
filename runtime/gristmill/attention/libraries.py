"""Attention libraries that are installed on their own: finding them, and what the backends over them share."""

from __future__ import annotations

import importlib
import re
from abc import abstractmethod
from types import ModuleType
from typing import Any, ClassVar

import torch

from gristmill.attention.kernels import StoringBackend
from gristmill.loading.config import ModelConfig
from gristmill.worker.batch import ForwardBatch
from gristmill.worker.kv_pool import KVPool, LatentPool


def find(module: str, package: str, oldest: tuple[int, int]) -> ModuleType:
    """The importable `module`, of at least version `oldest` where it says its version. Raises ImportError, a clause that names the pip
    `package` to install."""
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a broken CUDA library raises more than ImportError
        raise ImportError(f"{module} cannot be imported ({type(error).__name__}: {error}); pip install {package} brings it") from error
    version = str(getattr(found, "__version__", ""))
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if len(numbers) == 2 and numbers < oldest:
        least = ".".join(map(str, oldest))
        raise ImportError(f"{module} {version} is older than {least}; pip install -U {package} brings a newer one")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class LibraryBackend(StoringBackend):
    """Dense attention by a library. `kinds` says which layers there are: without a window (False), with one (True).

    A padding row of a captured step counts as one key, in slot 0: no library promises what a row without keys gives.
    """

    captures = True
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)

    @classmethod
    @abstractmethod
    def library(cls) -> Any:
        """Raises ImportError, a clause that names the package to install."""

    @classmethod
    @abstractmethod
    def why_not_head_dim(cls, head_dim: int) -> str | None:
        """None when the library has kernels for it, else the reason, a clause."""

    @classmethod
    def supports(cls, config: ModelConfig, device: str, dtype: torch.dtype) -> str | None:
        if device not in cls.devices:
            return f"it runs on NVIDIA GPUs, not on {device}"
        if dtype not in cls.dtypes:
            return f"it computes in {' or '.join(map(_name, cls.dtypes))}, not in {_name(dtype)} (see --dtype)"
        if config.num_heads % config.num_kv_heads:
            return f"{config.num_heads} query heads are not a multiple of {config.num_kv_heads} KV heads"
        if (reason := cls.why_not_head_dim(config.head_dim)) is not None:
            return reason
        try:
            cls.library()
        except ImportError as error:
            return str(error)
        return None

    def __init__(self, config: ModelConfig, pool: KVPool | LatentPool, dtype: torch.dtype | None = None) -> None:
        super().__init__(config, pool, dtype)
        self.kinds = sorted({config.window_of_layer(index) is not None for index in range(config.num_layers)})
        if isinstance(pool, KVPool):
            for index in range(config.num_layers):
                for cache in pool.layer(index):
                    cache[:1].zero_()  # padding rows read it, and a NaN there would go through the rest of the model

    def before(self, kind: bool) -> int | None:
        """How many positions before its own a query sees, None: all."""
        if not kind:
            return None
        assert self.config.sliding_window is not None
        return self.config.sliding_window - 1

    @staticmethod
    def table_of(batch: ForwardBatch, kind: bool) -> torch.Tensor:
        """The request table of the pool of such layers."""
        return batch.window_req_to_token if kind and batch.window_req_to_token is not None else batch.req_to_token

    @staticmethod
    def out_slots_of(batch: ForwardBatch, kind: bool) -> torch.Tensor:
        return batch.window_out_slots if kind and batch.window_out_slots is not None else batch.out_slots
