"""The backends over libraries, with a double of the library: by name, on the CPU, also in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gristmill.attention import registry
from gristmill.attention.flash_attn.backend import FlashAttnBackend
from gristmill.attention.flash_attn.library import FlashAttention2, FlashAttention3
from gristmill.attention.flashinfer.backend import FlashInferBackend
from tests.support import fake_flash_attn, fake_flashinfer

_ANYWHERE = {"devices": ("cpu",), "dtypes": (torch.float32, torch.float16, torch.bfloat16)}


def _double(name: str, base: type, library: object, **traits: object) -> None:
    registry.register(name)(type(name, (base,), {**_ANYWHERE, "library": classmethod(lambda cls: library), **traits}))


@pytest.fixture
def doubles() -> Iterator[None]:
    registry.backends()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", dict(registry._registered))
        _double("fake_flashinfer", FlashInferBackend, fake_flashinfer, head_dims=(16, 32))
        _double("fake_flash_attn_2", FlashAttnBackend, FlashAttention2(fake_flash_attn.VERSION_2))
        _double("fake_flash_attn_3", FlashAttnBackend, FlashAttention3(fake_flash_attn.VERSION_3))
        yield
