"""Gristmill: a small LLM inference engine over the gristmill_kernels wheels. `Engine` runs it inside your own process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]

if TYPE_CHECKING:
    from gristmill.engine import Engine


def __getattr__(name: str) -> Any:
    if name == "Engine":  # lazy: the scheduler and detokenizer processes import this package without the engine
        from gristmill.engine import Engine

        return Engine
    raise AttributeError(f"module 'gristmill' has no attribute {name!r}")
