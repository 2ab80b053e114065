"""Attention backends by name. A package adds one with `@register("name")` in a module named by an entry point of GROUP."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import metadata
from typing import TypeVar

import torch

from gristmill.attention.base import AttentionBackend
from gristmill.errors import OptionError
from gristmill.loading.config import ModelConfig

log = logging.getLogger(__name__)

GROUP = "gristmill.attention_backends"
AUTO_ORDER = {
    "cpu": ("cpu", "torch_native"),
    "cuda": ("cuda", "triton", "torch_native"),
}  # best first; backends of other packages are used only by name

_Backend = TypeVar("_Backend", bound=type[AttentionBackend])
_registered: dict[str, type[AttentionBackend]] = {}
_failed: dict[str, str] = {}
_loaded = False


def register(name: str) -> Callable[[_Backend], _Backend]:
    """Class decorator that makes a backend available as `name`."""

    def wrap(cls: _Backend) -> _Backend:
        if name in _registered and _registered[name] is not cls:
            raise ValueError(f"attention backend {name!r} is registered twice: {_registered[name].__module__} and {cls.__module__}")
        cls.registered_name = name  # type: ignore[attr-defined]
        _registered[name] = cls
        return cls

    return wrap


def backends() -> dict[str, type[AttentionBackend]]:
    """All backends that can be imported, by name."""
    global _loaded
    if not _loaded:
        _loaded = True
        import gristmill.attention.cpu
        import gristmill.attention.cuda
        import gristmill.attention.flash_attn.backend
        import gristmill.attention.flashinfer.backend
        import gristmill.attention.torch_native
        import gristmill.attention.triton  # noqa: F401

        for entry in metadata.entry_points(group=GROUP):
            try:
                entry.load()
            except Exception as error:  # a broken plug-in must not take the engine down; asking for it by name says why
                _failed[entry.name] = f"{type(error).__name__}: {error}"
                log.warning("attention backend %s (%s) cannot be loaded: %s", entry.name, entry.value, _failed[entry.name])
    return _registered


def choose(name: str, config: ModelConfig, device: str, dtype: torch.dtype, page_size: int = 1) -> tuple[type[AttentionBackend], str]:
    """The backend called `name`, for "auto" the best that supports the model, for "PREFILL+DECODE" the hybrid of two; and a sentence why.

    Raises OptionError when a named backend is unknown, cannot be loaded or does not support the model or the pages of its pool.
    """
    if "+" in name:
        return _choose_two(name, config, device, dtype, page_size)
    known = backends()
    if name == "auto":
        return _choose_best(config, device, dtype, page_size)
    if name not in known:
        why = f"; loading it failed with {_failed[name]}" if name in _failed else ""
        raise OptionError(f"--attention-backend must be auto or one of {', '.join(sorted(known))}, not {name!r}{why}")
    reason = _why_not(known[name], config, device, dtype, page_size)
    if reason is not None:
        raise OptionError(f"--attention-backend {name} cannot run this model: {reason}")
    return known[name], "asked for"


def _choose_two(name: str, config: ModelConfig, device: str, dtype: torch.dtype, page_size: int) -> tuple[type[AttentionBackend], str]:
    names = name.split("+")
    if len(names) != 2 or not all(names):
        raise OptionError(f"--attention-backend must be one name, or two as PREFILL+DECODE, not {name!r}")
    prefill, decode = (choose(part, config, device, dtype, page_size)[0] for part in names)
    from gristmill.attention.hybrid import hybrid

    return (prefill if prefill is decode else hybrid(prefill, decode)), "asked for"


def _choose_best(config: ModelConfig, device: str, dtype: torch.dtype, page_size: int) -> tuple[type[AttentionBackend], str]:
    declined: list[str] = []
    for candidate in AUTO_ORDER.get(device, ()):
        backend = backends()[candidate]
        reason = _why_not(backend, config, device, dtype, page_size)
        if reason is None:
            return backend, "; ".join(["first choice for " + device if not declined else "fallback", *declined])
        declined.append(f"{candidate}: {reason}")
    raise OptionError(f"no attention backend can run this model on {device}: {'; '.join(declined) or 'none is known'}")


def _why_not(backend: type[AttentionBackend], config: ModelConfig, device: str, dtype: torch.dtype, page_size: int) -> str | None:
    return backend.supports(config, device, dtype) or backend.supports_page_size(page_size)
