"""Registers every op of schema.py once per implementation family and picks, by static facts, the family that runs a call.
Each family has its own torch namespace (`gristmill_native`, `gristmill_reference`, ...); `gristmill::op` itself routes to the chosen one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.library import Library, register_fake

from gristmill_kernels.schema import FAMILIES, NAMESPACE, OPS

IMPL_VARIABLE = "GRISTMILL_KERNELS_IMPL"
STRICT_VARIABLE = "GRISTMILL_KERNELS_STRICT"

# Order of preference where several families serve a device. `reference` is always the last resort.
PREFERENCE: dict[str, tuple[str, ...]] = {
    "cpu": ("native", "reference"),
    "cuda": ("native", "triton", "reference"),
    "mps": ("metal", "reference"),
}

Supports = Callable[[Any], "str | None"]
DispatchCallable = Callable[..., Any]


class Implementation(NamedTuple):
    """One family's claim on one op: on which devices it exists, and for which keys (`supports` gives None, or the reason it cannot)."""

    family: str
    supports: Supports
    devices: tuple[str, ...]


class Choice(NamedTuple):
    """What `explain` found: the family that runs, and why every better one was passed over."""

    family: str
    declined: tuple[str, ...]
    forced: bool


class NoImplementationError(ValueError):
    """No family can run the op for these facts, or strict mode forbids the one that could."""


_libraries: dict[str, Library] = {}
_implementations: dict[str, dict[str, Implementation]] = {}
_chosen: dict[tuple[str, tuple], DispatchCallable] = {}
_overrides: dict[str, str] | None = None
_forced_family: str | None = None


def _fake(*args: Any, **kwargs: Any) -> None:
    """Every op only writes into tensors it was given, so tracing it computes nothing."""


def _router(name: str, key_of: Callable[..., tuple]) -> DispatchCallable:
    def route(*args: Any, **kwargs: Any) -> None:
        select(name, key_of(*args, **kwargs))(*args, **kwargs)

    return route


def _define_all() -> None:
    for namespace in (NAMESPACE, *(f"{NAMESPACE}_{family}" for family in FAMILIES)):
        library = _libraries[namespace] = Library(namespace, "DEF")
        for spec in OPS.values():
            library.define(spec.schema, tags=(torch.Tag.pt2_compliant_tag,))
            register_fake(f"{namespace}::{spec.name}", _fake, lib=library)
    for spec in OPS.values():
        _implementations[spec.name] = {}
        for device_key in ("CPU", "CUDA", "MPS"):
            _libraries[NAMESPACE].impl(spec.name, _router(spec.name, spec.key_of), device_key)


def implement(
    name: str,
    family: str,
    supports: Supports,
    fn: DispatchCallable | None = None,
    *,
    devices: tuple[str, ...] = ("cpu", "cuda", "mps"),
    device_key: str = "CompositeExplicitAutograd",
) -> None:
    """Let `family` run op `name` on `devices` for every key that `supports` accepts. Without `fn`, C++ has registered the kernel."""
    if name not in OPS:
        raise ValueError(f"op {name!r} is not declared in schema.py")
    if family not in FAMILIES:
        raise ValueError(f"implementation family {family!r} is not one of {', '.join(FAMILIES)}")
    if fn is not None:
        attach(name, family, fn, device_key=device_key)
    _implementations[name][family] = Implementation(family, supports, devices)
    _chosen.clear()


def attach(name: str, family: str, fn: DispatchCallable, *, device_key: str = "CompositeExplicitAutograd") -> None:
    """Give torch the function that runs op `name` in `family`: by a family that imports its kernels when its `supports` is first asked."""
    _libraries[f"{NAMESPACE}_{family}"].impl(name, fn, device_key)


def overload(name: str, family: str) -> DispatchCallable:
    """The OpOverload of one family, whether or not it would be chosen."""
    return getattr(getattr(torch.ops, f"{NAMESPACE}_{family}"), name).default


def _register_families() -> None:
    """The built-in families register on first use, so that importing this module alone is enough for a caller of `select`."""
    import_module("gristmill_kernels._registry")


def families_of(name: str, device: str = "cpu") -> tuple[str, ...]:
    """Families that implement op `name` on a device type, best first."""
    _register_families()
    order = PREFERENCE.get(device, ("reference",))
    registered = _implementations[name]
    return tuple(family for family in order if family in registered and device in registered[family].devices)


def why_not(name: str, family: str, key: tuple) -> str | None:
    """None if `family` can run the op for this key, else the reason it cannot."""
    _register_families()
    implementation = _implementations[name].get(family)
    if implementation is None or key[0] not in implementation.devices:
        return f"not implemented for {key[0]}"
    return implementation.supports(OPS[name].key_type(*key))


def explain(name: str, key: tuple) -> Choice:
    """Which family runs op `name` for `key`, and why better ones do not. Raises NoImplementationError when none can."""
    facts = OPS[name].key_type(*key)
    device = key[0]
    order = PREFERENCE.get(device)
    if order is None:
        raise NoImplementationError(f"{name}: device type {device!r} is not one of {', '.join(PREFERENCE)}")
    forced = _forced_family or _read_overrides().get(name) or _read_overrides().get("*")
    if forced is not None:
        reason = why_not(name, forced, key)
        if reason is not None:
            source = "a using() block" if _forced_family else IMPL_VARIABLE
            raise NoImplementationError(f"{name}: {source} asks for {forced}, which cannot run {facts}: {reason}")
        return Choice(forced, (), True)
    declined: list[str] = []
    for family in order:
        reason = why_not(name, family, key)
        if reason is None:
            return Choice(family, tuple(declined), False)
        declined.append(f"{family}: {reason}")
    raise NoImplementationError(f"{name}: no implementation for {facts}; " + "; ".join(declined))


def select(name: str, key: tuple) -> DispatchCallable:
    """The OpOverload that runs op `name` for `key` (made by schema.py's key functions). The runtime asks once per layer and keeps it."""
    return _chosen.get((name, key)) or _select_slow(name, key)


def _select_slow(name: str, key: tuple) -> DispatchCallable:
    choice = explain(name, key)
    if choice.declined and strict():
        raise NoImplementationError(
            f"{name}: {STRICT_VARIABLE}=1 refuses the fallback to {choice.family} for {OPS[name].key_type(*key)}; "
            + "; ".join(choice.declined)
        )
    op = overload(name, choice.family)
    _chosen[name, key] = op
    return op


def chosen_family(name: str, key: tuple) -> str:
    """Like `select`, strict mode included, but names the family."""
    select(name, key)
    return explain(name, key).family


def chosen_families() -> dict[str, str]:
    """Op -> the family that it was last dispatched to, of those used since the last `reset`."""
    return {name: str(op).removeprefix(f"{NAMESPACE}_").split(".")[0] for (name, _), op in _chosen.items()}


def strict() -> bool:
    """Whether a fallback from the preferred implementation is an error."""
    return os.environ.get(STRICT_VARIABLE, "") not in ("", "0")


def _read_overrides() -> dict[str, str]:
    global _overrides
    if _overrides is None:
        _overrides = parse_overrides(os.environ.get(IMPL_VARIABLE, ""))
    return _overrides


def parse_overrides(text: str) -> dict[str, str]:
    """Read `op:family,op:family`; `*` stands for every op not named. Raises ValueError for an unknown op or family."""
    overrides = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, separator, family = item.partition(":")
        if not separator:
            raise ValueError(f"{IMPL_VARIABLE}: {item!r} should be op:implementation, for example rms_norm:reference")
        if name != "*" and name not in OPS:
            raise ValueError(f"{IMPL_VARIABLE}: {name!r} is not an op; ops are {', '.join(OPS)} or *")
        if family not in FAMILIES:
            raise ValueError(f"{IMPL_VARIABLE}: {family!r} is not an implementation; they are {', '.join(FAMILIES)}")
        overrides[name] = family
    return overrides


def reset() -> None:
    """Forget every choice and read the environment variables again."""
    global _overrides
    _overrides = None
    _chosen.clear()


@contextlib.contextmanager
def using(family: str) -> Iterator[None]:
    """Within the block every op runs in `family`, or fails saying why it cannot. For tests and benchmarks; not thread-safe."""
    global _forced_family
    before, _forced_family = _forced_family, family
    _chosen.clear()
    try:
        yield
    finally:
        _forced_family = before
        _chosen.clear()


_define_all()
