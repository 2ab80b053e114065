"""Entry point of process D: load the model, say Ready, serve Steps. The same function runs in a thread of gristmill.Engine."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from typing import Any

import zmq

from gristmill import progress
from gristmill.errors import GristmillError, OptionError
from gristmill.launch_config import LaunchConfig
from gristmill.trace import NullTracer, open_tracer
from gristmill.transport import Endpoints, Pull, Push
from gristmill.worker import null
from gristmill.worker.loop import Stopped, run_loop

log = logging.getLogger(__name__)


def run(config: LaunchConfig, context: zmq.Context, stop: threading.Event) -> None:
    """Serve until Control shutdown or until `stop` is set. Raises GristmillError when the model cannot be loaded."""
    endpoints = Endpoints(config.endpoint_prefix)
    tracer = open_tracer(config.trace_dir, f"worker{config.rank}")
    source = Pull(context, endpoints.b_to_d(config.rank))
    sink = Push(context, endpoints.d_to_b(config.rank), f"worker{config.rank}")
    try:
        with _no_autograd(config), contextlib.suppress(Stopped):
            with _device_failures(config, "loading"):
                runner = _load(config, tracer, stop)
            sink.send(runner.ready(config.rank))
            with _device_failures(config, "running"):
                run_loop(runner, source, sink, stop, config.rank)
    finally:
        source.close()
        sink.close()
        tracer.close()


def _bound_spinning() -> None:
    """Let OpenMP threads sleep after about 50 us without work, unless the user has chosen otherwise; heeded only before torch is loaded.

    By default libgomp spins for some 10 ms at every barrier. As soon as another process wants one of the cores, each of the hundreds of
    barriers of a step waits for a thread that was descheduled: on two busy cores a step took 25 times as long.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _no_autograd(config: LaunchConfig) -> contextlib.AbstractContextManager[Any]:
    if null.is_null(config.model_path):
        return contextlib.nullcontext()
    _bound_spinning()
    import torch

    return torch.inference_mode()


def _device_failures(config: LaunchConfig, doing: str) -> contextlib.AbstractContextManager[Any]:
    if null.is_null(config.model_path) or config.options.device == "cpu":
        return contextlib.nullcontext()
    from gristmill.worker import gpu_failures

    return gpu_failures.named(doing)


def _load(config: LaunchConfig, tracer: NullTracer, stop: threading.Event) -> Any:
    if null.is_null(config.model_path):
        return null.NullRunner(config.model_path, config.options, tracer=tracer)
    try:
        from gristmill.worker.runner import ModelRunner
    except ModuleNotFoundError as error:
        raise GristmillError(f"the model worker needs {error.name}, which is not installed: pip install 'gristmill[cpu]'") from error

    def show(done: int, total: int) -> None:
        if stop.is_set():
            raise Stopped
        progress.report("weights", done, total)

    with tracer.span("load"):
        try:
            return ModelRunner(config.model_path, config.options, progress=show, tracer=tracer)
        except ValueError as error:
            if str(error).startswith("GRISTMILL_KERNELS_"):  # a variable of the kernels that asks for what cannot be had
                raise OptionError(str(error)) from error
            raise
