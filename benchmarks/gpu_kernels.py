"""Kernels on one GPU: attention beside FlashInfer and cuDNN, in one process, over the same inputs; and with `--memory` the rows that memory
bandwidth limits, our families beside PyTorch (benchmarks/gpu/memory.py).

    python benchmarks/gpu_kernels.py                                    # ours alone: needs torch and triton only
    python benchmarks/gpu_kernels.py --flashinfer WHEEL_DIR_OR_PATH ... # puts unpacked or packed wheels (flashinfer-python,
                                                                        # apache-tvm-ffi) on the path; it compiles for a few minutes
    python benchmarks/gpu_kernels.py --memory                           # norms, rope, stores, quantisation, sampling, skinny_linear: GB/s

Every repetition times each peer once, ours first and last in turn, with CUDA events over a flushed L2; a ratio is the median of the ratios
of one repetition (above 1: ours is faster), so drift of the clocks cancels. bfloat16, slots of the pool scattered at page size 1. A peer
that is missing or refuses a row is left out with a sentence. Results go to benchmarks/results/gpu_kernels_DATE.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "python")) if path not in sys.path]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.gpu import memory  # noqa: E402
from benchmarks.tuning import FLUSH_BYTES  # noqa: E402
from gristmill_kernels import dispatch  # noqa: E402
from gristmill_kernels.attention import decode_attention, extend_attention, ragged_attention  # noqa: E402
from gristmill_kernels.mla import mla_decode  # noqa: E402

HEADS, KV_HEADS, DIM = 32, 8, 128
LATENT, ROPE = 512, 64
BF16, INT = torch.bfloat16, torch.int32
Call = Callable[[], Tensor]


class Row(NamedTuple):
    """One line of the table. `bytes` and `flops` are the least that the problem needs."""

    name: str
    build: Callable[[], dict[str, Call | str]]  # peer -> call, or why there is none
    bytes: float
    flops: float


def _indptr(batch: int, length: int, device: str = "cuda") -> Tensor:
    return torch.arange(batch + 1, dtype=INT, device=device) * length


def _slots(total: int) -> Tensor:
    return torch.randperm(total, device="cuda").to(INT)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=BF16, device="cuda")


def _workspace() -> Tensor:
    return torch.empty(512 << 20, dtype=torch.uint8, device="cuda")


def _flashinfer(make: Callable[[Any], Call]) -> Call | str:
    """A call of FlashInfer planned by `make`, or why it cannot be had."""
    try:
        import flashinfer
    except ImportError as error:
        return f"flashinfer cannot be imported: {error}"
    try:
        return make(flashinfer)
    except Exception as error:
        return f"flashinfer refuses: {type(error).__name__}: {str(error)[:200]}"


def decode_row(batch: int, length: int) -> Row:
    total = batch * length

    def build() -> dict[str, Call | str]:
        q, k, v = _random(batch, HEADS, DIM), _random(total, KV_HEADS, DIM), _random(total, KV_HEADS, DIM)
        indptr, slots, out = _indptr(batch, length), _slots(total), torch.empty_like(q)

        def theirs(flashinfer: Any) -> Call:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", use_tensor_cores=True)
            last = torch.ones(batch, dtype=INT, device="cuda")
            wrapper.plan(indptr, slots, last, HEADS, KV_HEADS, DIM, 1, q_data_type=BF16, kv_data_type=BF16)
            cache = (k[:, None], v[:, None])
            return lambda: wrapper.run(q, cache)

        return {"gristmill": lambda: decode_attention(q, k, v, indptr, slots, out=out), "flashinfer": _flashinfer(theirs)}

    return Row(f"decode B{batch} S{length}", build, total * KV_HEADS * DIM * 4, 4 * total * HEADS * DIM)


def prefill_row(batch: int, length: int, paged: bool) -> Row:
    total = batch * length

    def build() -> dict[str, Call | str]:
        q, k, v = _random(total, HEADS, DIM), _random(total, KV_HEADS, DIM), _random(total, KV_HEADS, DIM)
        indptr, out = _indptr(batch, length), torch.empty_like(q)
        if paged:
            slots = _slots(total)

            def theirs_paged(flashinfer: Any) -> Call:
                wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend="fa3")
                last = torch.ones(batch, dtype=INT, device="cuda")
                wrapper.plan(indptr, indptr, slots, last, HEADS, KV_HEADS, DIM, 1, causal=True, q_data_type=BF16, kv_data_type=BF16)
                cache = (k[:, None], v[:, None])
                return lambda: wrapper.run(q, cache)

            return {
                "gristmill": lambda: extend_attention(q, k, v, indptr, indptr, slots, out=out),
                "flashinfer": _flashinfer(theirs_paged),
            }

        def theirs(flashinfer: Any) -> Call:
            wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD", backend="fa3")
            wrapper.plan(indptr, indptr, HEADS, KV_HEADS, DIM, causal=True, q_data_type=BF16, kv_data_type=BF16)
            return lambda: wrapper.run(q, k, v)

        batched = [x.view(batch, length, -1, DIM).transpose(1, 2) for x in (q, k, v)]

        def cudnn() -> Tensor:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
                result = torch.nn.functional.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)
            return result.transpose(1, 2)

        return {
            "gristmill": lambda: ragged_attention(q, k, v, indptr, indptr, out=out),
            "flashinfer": _flashinfer(theirs),
            "cudnn": cudnn,
        }

    name = f"causal prefill {'paged' if paged else 'ragged'} B{batch} S{length}"
    return Row(name, build, total * (2 * HEADS + 2 * KV_HEADS) * DIM * 2, 2 * batch * HEADS * length * length * DIM)


def latent_row(heads: int, batch: int, length: int) -> Row:
    total = batch * length
    scale = 192**-0.5

    def build() -> dict[str, Call | str]:
        q_nope, q_rope = _random(batch, heads, LATENT), _random(batch, heads, ROPE)
        cache, indptr, slots = _random(total, LATENT + ROPE), _indptr(batch, length), _slots(total)
        out = torch.empty_like(q_nope)

        def theirs(flashinfer: Any) -> Call:
            wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(), backend="fa3")
            lens = torch.full((batch,), length, dtype=INT, device="cuda")
            wrapper.plan(_indptr(batch, 1), indptr, slots, lens, heads, LATENT, ROPE, 1, True, scale, BF16, BF16)
            latent, rope = cache[:, None, :LATENT], cache[:, None, LATENT:]
            return lambda: wrapper.run(q_nope, q_rope, latent, rope)

        return {
            "gristmill": lambda: mla_decode(q_nope, q_rope, cache, indptr, slots, sm_scale=scale, out=out),
            "flashinfer": _flashinfer(theirs),
        }

    return Row(
        f"MLA decode {heads} heads B{batch} S{length}",
        build,
        total * (LATENT + ROPE) * 2,
        2 * total * heads * (2 * LATENT + ROPE),
    )


ROWS = [
    decode_row(64, 4096),
    decode_row(8, 16384),
    decode_row(1, 65536),
    prefill_row(4, 4096, False),
    prefill_row(1, 16384, False),
    prefill_row(4, 4096, True),
    prefill_row(1, 16384, True),
    latent_row(16, 64, 4096),
    latent_row(128, 64, 4096),
]


def measure(calls: dict[str, Call], repeats: int) -> dict[str, list[float]]:
    """Microseconds of each repetition by peer; the order turns around every time."""
    trash = torch.empty(FLUSH_BYTES // 4, dtype=INT, device="cuda")
    for call in calls.values():
        for _ in range(3):
            call()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {peer: [] for peer in calls}
    order = list(calls)
    for repeat in range(repeats):
        for peer in order if repeat % 2 == 0 else reversed(order):
            trash.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            calls[peer]()
            end.record()
            events[peer].append((begin, end))
    torch.cuda.synchronize()
    return {peer: [begin.elapsed_time(end) * 1000 for begin, end in pairs] for peer, pairs in events.items()}


def run_row(row: Row, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    record: dict[str, Any] = {"row": row.name, "peers": {}, "left_out": {}}
    calls: dict[str, Call] = {}
    expected: Tensor | None = None
    for peer, call in row.build().items():
        if isinstance(call, str):
            record["left_out"][peer] = call
            continue
        try:
            result = call()
            torch.cuda.synchronize()
        except Exception as error:
            record["left_out"][peer] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        wide = result.float()
        if expected is None:
            expected = wide.clone()
        else:
            wide = wide.reshape(expected.shape)
            record["peers"].setdefault(peer, {})["difference"] = float((wide - expected).norm() / expected.norm())
        calls[peer] = call
    times = measure(calls, repeats)
    for peer, us in times.items():
        middle = statistics.median(us)
        entry = record["peers"].setdefault(peer, {})
        entry |= {"us": middle, "us_min": min(us), "us_max": max(us)}
        entry |= {"TB/s": row.bytes / middle * 1e-6, "TFLOP/s": row.flops / middle * 1e-6}
        if peer != "gristmill" and "gristmill" in times:
            entry["ratio"] = statistics.median(theirs / ours for theirs, ours in zip(us, times["gristmill"]))
    return record


def show(record: dict[str, Any]) -> str:
    parts = []
    for peer, entry in record["peers"].items():
        ratio = f", ours {entry['ratio']:.2f}x" if "ratio" in entry else ""
        far = f", DIFFERS by {entry['difference']:.2g}" if entry.get("difference", 0.0) > 1e-2 else ""
        parts.append(f"{peer} {entry['us']:.1f} us {entry['TB/s']:.2f} TB/s {entry['TFLOP/s']:.0f} TFLOP/s{ratio}{far}")
    return "\n    ".join([record["row"], *parts, *(f"{peer} left out: {why}" for peer, why in record["left_out"].items())])


def add_wheels(paths: list[Path]) -> None:
    """Put wheels, or folders of them, at the front of the path: unpacked beside themselves if they are files."""
    for path in paths:
        for wheel in sorted(path.glob("*.whl")) if path.is_dir() and not (path / "flashinfer").is_dir() else [path]:
            target = wheel
            if wheel.suffix == ".whl":
                target = Path("/tmp") / f"unpacked-{wheel.stem}"
                if not target.is_dir():
                    with zipfile.ZipFile(wheel) as archive:
                        archive.extractall(target)
            sys.path.insert(0, str(target))


def run_memory(result: dict[str, Any], rows: str) -> None:
    del result["family"]  # all of them
    result["ceilings TB/s"] = ceilings = memory.ceilings(result["repeats"])
    print(f"ceilings: copy {ceilings['copy']:.2f} TB/s, read {ceilings['read']:.2f} TB/s; xN: times as long as the first of ours")
    for row in memory.memory_rows():
        if rows in row.name:
            result["rows"].append(record := memory.run_row(row, ceilings, result["repeats"]))
            print(memory.show(record), flush=True)
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flashinfer", type=Path, nargs="*", default=[], help="wheels, folders of wheels, or unpacked packages")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--repeats", type=int, default=21, help="repetitions per row")
    parser.add_argument("--family", default="triton", choices=dispatch.FAMILIES, help="our implementation")
    parser.add_argument("--memory", action="store_true", help="the rows that memory bandwidth limits, instead of attention")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the JSON file")
    args = parser.parse_args()
    add_wheels(args.flashinfer)
    if not torch.cuda.is_available():
        raise SystemExit("gpu_kernels.py times kernels on a GPU, and torch sees none")
    import triton

    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "family": args.family,
        "repeats": args.repeats,
        "rows": [],
    }
    if args.memory:
        run_memory(result, args.rows)
    else:
        with dispatch.using(args.family):
            for row in ROWS:
                if args.rows in row.name:
                    result["rows"].append(record := run_row(row, args.repeats))
                    print(show(record), flush=True)
                    torch.cuda.empty_cache()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"gpu_{'memory' if args.memory else 'kernels'}-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
