"""`gristmill doctor`: what works on this machine and why not, one line per check; exit code 1 when something needed does not work."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gristmill import device, resources
from gristmill.catalogue import CATALOGUE, installed_path
from gristmill.errors import GristmillError
from gristmill.logs import escape

OK, WARN, FAIL = "ok", "warn", "fail"
MIN_TORCH = (2, 10)  # the op libraries are built against this stable ABI
_LIBRARIES = ("zmq", "msgspec", "numpy", "tokenizers", "jinja2", "safetensors", "gguf", "huggingface_hub", "starlette", "uvicorn", "rich")


class Finding(NamedTuple):
    status: str
    what: str
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--brief", action="store_true", help="print only what is not ok, and a summary")


def run(arguments: argparse.Namespace) -> int:
    findings = list(examine())
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        if not arguments.brief or finding.status != OK:
            print(f"{finding.status:4}  {finding.what:{width}}  {escape(finding.reason)}")
    counts = {status: sum(finding.status == status for finding in findings) for status in (OK, WARN, FAIL)}
    verdict = "something needed does not work" if counts[FAIL] else "ready"
    print(f"doctor: {verdict} ({counts[OK]} ok, {counts[WARN]} warnings, {counts[FAIL]} failures)")
    return 1 if counts[FAIL] else 0


def examine() -> Iterator[Finding]:
    """All findings, in the order in which things depend on each other. A check that breaks is itself a finding."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _libraries,
        _cores,
        _memory,
        _torch,
        _kernels,
        _sockets,
        _models,
        _hub,
    )
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding(FAIL, check.__name__.strip("_"), f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def _python() -> Iterator[Finding]:
    good = sys.version_info >= (3, 10)
    where = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding(OK if good else FAIL, "python", where if good else f"{where}; 3.10 or later is needed")


def _libraries() -> Iterator[Finding]:
    broken = []
    for name in _LIBRARIES:
        try:
            importlib.import_module(name)
        except Exception as error:
            broken.append(f"{name} ({type(error).__name__}: {error})")
    if broken:
        yield Finding(FAIL, "libraries", f"cannot import {', '.join(broken)}; pip install gristmill brings them")
    else:
        yield Finding(OK, "libraries", f"all {len(_LIBRARIES)} import")


def _cores() -> Iterator[Finding]:
    usable, machine, quota = resources.cpu_count(), os.cpu_count() or 1, resources.cpu_quota()
    limits = [f"the machine has {machine}"] if usable < machine else []
    if quota is not None:
        limits.append(f"the cgroup's quota is {quota:g}")
    note = f" ({', '.join(limits)})" if limits else ""
    slow = quota is not None and quota < 1
    yield Finding(
        WARN if slow else OK, "cores", f"{usable} usable{note}" + ("; expect pauses: the quota is below one core" if slow else "")
    )


def _memory() -> Iterator[Finding]:
    available, total, limit = resources.available_memory_bytes(), resources.total_memory_bytes(), resources.memory_limit_bytes()
    text = f"{available / 2**30:.1f} GiB available of {total / 2**30:.1f} GiB" + (" (the cgroup's limit)" if limit is not None else "")
    low = available < 2**30
    yield Finding(WARN if low else OK, "memory", text + ("; even a small model needs about 1 GiB" if low else ""))


def _torch() -> Iterator[Finding]:
    start = time.monotonic()
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        yield Finding(FAIL, "torch", f"cannot be imported: {error}; the model worker needs torch >= {MIN_TORCH[0]}.{MIN_TORCH[1]}")
        return
    version = str(torch.__version__)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < MIN_TORCH:
        yield Finding(FAIL, "torch", f"{version} is older than {MIN_TORCH[0]}.{MIN_TORCH[1]}, which the kernels are built for")
    else:
        yield Finding(OK, "torch", f"{version}, imported in {time.monotonic() - start:.1f} s")
    yield from _accelerator(torch)


def _accelerator(torch: Any) -> Iterator[Finding]:
    """The GPU that --device auto takes, or why the CPU is used."""
    reason = device.why_no_cuda()
    if reason is not None:
        yield Finding(OK, "accelerator", f"none is used, models run on the CPU: {reason}")
        return
    if not torch.cuda.is_available():
        yield Finding(WARN, "accelerator", "the NVIDIA driver shows a device that torch cannot use; --device cpu runs models on the CPU")
        return
    facts = torch.cuda.get_device_properties(0)
    gpu = importlib.import_module("gristmill_kernels").capabilities()["native_gpu"]
    about = f"{facts.name}, compute capability {facts.major}.{facts.minor}, {facts.total_memory / 2**30:.0f} GiB"
    if gpu["reason"]:
        yield Finding(WARN, "accelerator", f"{about}; without C++ kernels, Triton's are used: {gpu['reason']}")
    else:
        yield Finding(OK, "accelerator", about)


def _kernels() -> Iterator[Finding]:
    installed = [name for name in ("kernels-cpu", "kernels-cuda", "kernels-rocm", "kernels-metal") if _version(name)]
    if len(installed) > 1:
        yield Finding(FAIL, "kernels", f"{' and '.join(installed)} are both installed and own the same files; pip uninstall all but one")
        return
    try:
        host = importlib.import_module("gristmill_kernels._host")
    except ImportError as error:
        yield Finding(FAIL, "kernels", f"{error}; pip install kernels-cpu")
        return
    yield Finding(OK, "kernels", f"{installed[0]} {_version(installed[0])}" if installed else "from a source tree")
    features = {name for name, there in host.cpu_features().items() if there}
    vector = [name for name in ("avx2", "avx512f", "avx512", "avx512_bf16", "avx512bf16", "amx_bf16", "amx", "neon") if name in features]
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in features:
        yield Finding(WARN, "cpu", "no AVX2: the kernels run as plain PyTorch, several times slower")
    else:
        yield Finding(OK, "cpu", f"{platform.machine()} with {', '.join(vector) or 'no vector extension known to us'}")
    yield from _implementations(importlib.import_module("gristmill_kernels").capabilities())


def _implementations(capabilities: dict[str, Any]) -> Iterator[Finding]:
    """Which implementation the ops use on the CPU; plain PyTorch where native code was to be expected is a warning with its reason."""
    chosen: dict[str, list[str]] = {}
    reasons: dict[str, None] = {}
    for name, devices in capabilities["ops"].items():
        for choice in devices.get("cpu", []):
            chosen.setdefault(str(choice["implementation"]), []).append(f"{name} ({choice['dtype']})")
            if choice["implementation"] == "reference":
                reasons[str(choice["why"])] = None
    native = capabilities["native"]
    counts = ", ".join(f"{len(names)} {implementation}" for implementation, names in sorted(chosen.items()))
    if native["isa"] is None:
        yield Finding(WARN, "ops", f"plain PyTorch, several times slower: {native['reason']}")
    elif "reference" in chosen:
        names = ", ".join(chosen["reference"][:4])
        yield Finding(WARN, "ops", f"instruction set {native['isa']}; {counts}; plain PyTorch for {names}: {'; '.join(list(reasons)[:2])}")
    else:
        yield Finding(OK, "ops", f"instruction set {native['isa']}; {counts} (op and dtype)")


def _sockets() -> Iterator[Finding]:
    """A message goes through an ipc socket in the kind of directory that the server uses."""
    import threading

    import zmq

    from gristmill.messages import Control
    from gristmill.private_directory import private_directory
    from gristmill.transport import Pull, Push

    context = zmq.Context()
    try:
        with private_directory() as folder:
            pull = Pull(context, f"ipc://{folder}/check")
            push = Push(context, f"ipc://{folder}/check", "doctor")
            push.send(Control(seq=1, op="check"))
            arrived = pull.recv(2000)
            push.close()
            pull.close()
            if arrived is None:
                yield Finding(FAIL, "sockets", f"a message sent through a unix socket in {folder.parent} did not arrive within 2 s")
            else:
                yield Finding(OK, "sockets", f"unix sockets work in {folder.parent}")
    except GristmillError as error:
        yield Finding(FAIL, "sockets", str(error))
    finally:
        threading.Thread(target=context.destroy, daemon=True).start()


def _models() -> Iterator[Finding]:
    for entry in CATALOGUE.values():
        path = installed_path(entry)
        yield Finding(OK if path else WARN, f"model {entry.name}", str(path) if path else f"not installed: {entry.install}")


def _hub() -> Iterator[Finding]:
    from huggingface_hub import constants

    mode = "offline (HF_HUB_OFFLINE): only models in the cache" if constants.HF_HUB_OFFLINE else constants.ENDPOINT
    cache = constants.HF_HUB_CACHE
    parent = cache
    while not os.path.exists(parent) and os.path.dirname(parent) != parent:
        parent = os.path.dirname(parent)
    if not os.access(parent, os.W_OK):
        yield Finding(WARN, "hub", f"{mode}; its cache {cache} cannot be written: set HF_HUB_CACHE")
    else:
        yield Finding(OK, "hub", f"{mode}; cache in {cache}")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
