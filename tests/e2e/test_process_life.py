"""How a server starts, fails and ends: children and parent killed, signals, ports, bad models, and what listens meanwhile."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import zmq

from tests.support.served import Served, served
from tests.support.tiny_model import make_tiny_model
from tests.support.traces import process_names, spans

pytestmark = pytest.mark.e2e

LONG = {"max_tokens": 480, "ignore_eos": True, "stream": True, "n": 32}  # some seconds of work


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("life") / "M")


class Stream:
    """An open streaming completion; `first` is set when its first chunk is there."""

    def __init__(self, server: Served, **fields: object) -> None:
        self.body = {"model": "M", "prompt": "Once there was a lamp", "temperature": 0, **LONG, **fields}
        self.server = server
        self.lines: list[str] = []
        self.first = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        connection = self.server.connect()
        try:
            connection.request("POST", "/v1/completions", json.dumps(self.body), {"Content-Type": "application/json"})
            for raw in connection.getresponse():
                if line := raw.decode().strip():
                    self.lines.append(line)
                    self.first.set()
        finally:
            self.first.set()
            connection.close()

    def end(self) -> list[dict]:
        self.thread.join(60)
        assert not self.thread.is_alive(), "the stream never ended"
        return [json.loads(line.removeprefix("data: ")) for line in self.lines if line != "data: [DONE]"]


def opened(server: Served, **fields: object) -> Stream:
    stream = Stream(server, **fields)
    assert stream.first.wait(60)
    return stream


def socket_directory(server: Served) -> Path:
    """The private directory, found by the sockets that the server's own processes hold."""
    for process in server.session():
        for connection in process.net_connections("unix"):
            if "gristmill-" in connection.laddr:
                return Path(connection.laddr).parent
    raise AssertionError("no socket in a private directory")


# --- children and parent killed


@pytest.mark.parametrize("role", ["scheduler", "detokenizer", "worker"])
def test_a_killed_child_ends_everything_with_one_sentence(role: str, model: Path) -> None:
    with served(model) as server:
        folder = socket_directory(server)
        stream = opened(server)
        start = time.monotonic()
        server.children()[role].kill()
        assert server.wait(5.0) == 1
        assert time.monotonic() - start < 5.0
        server.wait_gone(1.0)
        errors = [line for line in server.log if line.startswith("error: ")]
        name = "model worker" if role == "worker" else role
        assert len(errors) == 1 and errors[0].startswith(f"error: the {name} was killed by SIGKILL")
        assert "Traceback" not in server.text
        assert f"the {name} was killed" in stream.end()[-1]["error"]["message"]
        assert not folder.exists()


def test_health_is_honest_while_loading_and_after_a_child_died(model: Path) -> None:
    with served(model) as server:
        connection = server.connect()
        connection.request("GET", "/health")
        response = connection.getresponse()
        assert response.status == 200 and response.read()
        server.children()["worker"].kill()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                connection.request("GET", "/health")
                response = connection.getresponse()
                response.read()
            except OSError:
                break  # it has ended
            if response.status == 503:
                break
        assert response.status == 503 or server.wait(5) == 1
        connection.close()


@pytest.mark.parametrize("role", ["server", "scheduler", "detokenizer", "worker", "all"])
def test_after_a_kill_9_a_new_start_on_the_same_port_works_at_once(role: str, tmp_path: Path) -> None:
    null = ("null:2", "--served-model-name=M", "--pool-tokens=65536")
    temporary = {"TMPDIR": str(tmp_path)} if len(str(tmp_path)) < 70 else {}
    with served(*null, env=temporary) as server:
        port, folder = server.address[1], socket_directory(server)
        streams = [opened(server), opened(server)]
        start = time.monotonic()
        if role == "all":
            os.killpg(server.process.pid, signal.SIGKILL)  # the parent and, at the same moment, all children
        else:
            (server.process if role == "server" else server.children()[role]).kill()
        server.wait(5.0)
        server.wait_gone(5.0)
        took = time.monotonic() - start
        assert took < 5.0 and (role == "all" or not folder.exists())
        for stream in streams:
            stream.thread.join(10)
            assert not stream.thread.is_alive()
        with served(*null, f"--port={port}", env=temporary) as again:
            assert again.address[1] == port and again.complete()["text"]
            assert not folder.exists() and socket_directory(again).is_dir()
    assert not [path for path in folder.parent.glob("gristmill-*") if path == folder]


@pytest.mark.parametrize("loading", [False, True], ids=["serving", "loading"])
def test_kill_9_of_the_parent_leaves_nothing_behind(loading: bool, model: Path) -> None:
    with served(model, ready=not loading) as server:
        if loading:
            deadline = time.monotonic() + 60
            while len(server.children()) < 3:
                assert time.monotonic() < deadline, server.text
                psutil.Process(server.process.pid).cpu_percent(0.01)
            folder = None
        else:
            folder = socket_directory(server)
            opened(server)
        server.signal(signal.SIGKILL)
        server.wait(5)
        server.wait_gone(5.0)
        assert folder is None or not folder.exists()


# --- signals


def test_sigterm_finishes_open_requests_and_takes_no_more(model: Path) -> None:
    with served(model) as server:
        expected = server.complete(max_tokens=200, ignore_eos=True)["text"]
        stream = opened(server, max_tokens=200, n=16)
        server.signal(signal.SIGTERM)
        chunks = stream.end()
        assert server.wait(10) == 0, server.text
        server.wait_gone(1.0)
        assert "finishing 1 open requests" in server.text
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        for index in range(16):
            assert "".join(choice["text"] for choice in choices if choice["index"] == index) == expected
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"] * 16
        assert stream.lines[-1] == "data: [DONE]"
        with pytest.raises(OSError):
            server.request("GET", "/health")


def test_a_drain_that_takes_too_long_is_cut_with_an_error(model: Path) -> None:
    with served(model, "--drain-s=0.05") as server:
        streams = [opened(server) for _ in range(2)]
        server.signal(signal.SIGTERM)
        assert server.wait(10) == 0
        ends = [stream.end()[-1] for stream in streams]
        assert any("error" in end for end in ends), ends
        server.wait_gone(1.0)


def test_a_second_signal_ends_at_once(model: Path) -> None:
    with served(model) as server:
        for _ in range(4):
            opened(server)
        start = time.monotonic()
        server.signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while "finishing" not in server.text:
            assert time.monotonic() < deadline, server.text
            server.process.poll()
        server.signal(signal.SIGTERM)
        assert server.wait(5) == 128 + signal.SIGTERM
        assert time.monotonic() - start < 5
        server.wait_gone(1.0)


def test_ctrl_c_reaches_the_whole_group_and_ends_cleanly(model: Path) -> None:
    with served(model) as server:
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait(10) == 130
        server.wait_gone(1.0)
        assert "Traceback" not in server.text and "KeyboardInterrupt" not in server.text


def test_sigterm_while_loading_ends_cleanly(model: Path) -> None:
    with served(model, ready=False) as server:
        deadline = time.monotonic() + 60
        while len(server.children()) < 3:
            assert time.monotonic() < deadline, server.text
            psutil.Process(server.process.pid).cpu_percent(0.01)
        server.signal(signal.SIGTERM)
        assert server.wait(10) in (0, -signal.SIGTERM)
        server.wait_gone(3.0)
        assert "Traceback" not in server.text


# --- ports


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_a_taken_port_ends_the_start_before_weights_are_read(family: int, model: Path) -> None:
    try:
        holder = socket.socket(family)
        holder.bind(("127.0.0.1" if family == socket.AF_INET else "::", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with holder:
        holder.listen()
        port = holder.getsockname()[1]
        start = time.monotonic()
        with served(model, f"--port={port}", ready=False) as server:
            assert server.wait(30) == 1
            took = time.monotonic() - start
            assert server.log == [
                f"error: port {port} on 127.0.0.1 is already in use; stop the program that holds it or choose another with --port"
            ]
            server.wait_gone(0.5)
    assert took < 3.0


def test_port_0_prints_the_real_port(model: Path) -> None:
    with served(model) as server:
        assert server.address[1] > 0
        assert re.match(r"ready: M at http://127\.0\.0\.1:\d+ \(pool of \d+ tokens, loaded in [\d.]+ s\)$", server.out[0])


# --- models that cannot be loaded


def _rewrite(path: Path, change: Callable[[dict], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda folder: _shards(folder)[1].unlink(), "model-00002-of-00002.safetensors"),
    "cut shard": (lambda folder: _cut(_shards(folder)[0]), "model-00001-of-00002.safetensors"),
    "unknown architecture": (
        lambda folder: _rewrite(folder / "config.json", lambda c: c.update(model_type="mamba", architectures=["MambaForCausalLM"])),
        "mamba",
    ),
    "missing config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
    "missing tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    "broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text('{"model": 3}'), "tokenizer.json"),
    "no such model": (lambda folder: [path.unlink() for path in folder.iterdir()] and folder.rmdir(), "does not exist"),
}


def _start_broken(folder: Path, *options: str) -> tuple[int, list[str], float]:
    start = time.monotonic()
    with served(folder, *options, ready=False) as server:
        code = server.wait(60)
        server.wait_gone(1.0)
        return code, server.log, time.monotonic() - start


def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    folders = {name: make_tiny_model(tmp_path / name.replace(" ", "-")) for name in BROKEN}
    for name, (damage, _) in BROKEN.items():
        damage(folders[name])
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(BROKEN, pool.map(_start_broken, folders.values())))
    for name, (code, log, _) in results.items():
        errors = [line for line in log if line.startswith("error: ")]
        assert code == 1 and len(errors) == 1, (name, code, log)
        assert BROKEN[name][1] in errors[0], (name, errors)
        assert not any("Traceback" in line for line in log), (name, log)


def test_a_pool_that_does_not_fit_into_memory_is_one_sentence(model: Path) -> None:
    code, log, _ = _start_broken(model, f"--pool-tokens={10**12}")
    errors = [line for line in log if line.startswith("error: ")]
    assert code == 1 and len(errors) == 1, log
    assert "--pool-tokens" in errors[0] and "MiB are free" in errors[0]


def test_a_working_directory_full_of_decoys_is_not_imported(tmp_path: Path, model: Path) -> None:
    for name in ("torch", "zmq", "gristmill_kernels", "logging", "trace"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(97)")
    script = f"import os, sys; os.chdir({str(tmp_path)!r}); from gristmill.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "serve", str(model), "--port=0", "--dtype=float32"]
    if sys.version_info < (3, 11):
        pytest.skip("PYTHONSAFEPATH came with Python 3.11")
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready: ")
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors


# --- what listens


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(model, "--max-running=8", f"--trace={tmp_path_factory.mktemp('trace') / 'trace.json'}") as running:
        yield running


def test_only_http_listens_on_tcp(server: Served) -> None:
    listening = [
        connection.laddr
        for process in server.session()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert [tuple(address) for address in listening] == [server.address]


def test_internal_sockets_are_private_to_the_user(server: Served) -> None:
    folder = socket_directory(server)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    sockets = [path for path in folder.iterdir() if path.is_socket()]
    assert len(sockets) == 5  # a-b, b-c, c-a, b-d0, d0-b
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in sockets)


def _pickled(marker: Path) -> bytes:
    """A protocol-0 pickle that would create `marker`, written by hand so that this file needs no pickle either."""
    return f"cbuiltins\nopen\n(S'{marker}'\nS'w'\ntR.".encode()


def test_hostile_bytes_on_internal_sockets_change_nothing(server: Served, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    before = server.complete()
    pids = {role: child.pid for role, child in server.children().items()}
    sockets = sorted(path for path in socket_directory(server).iterdir() if path.is_socket())
    payloads = [[_pickled(marker)], [os.urandom(1024)], [b""], [b"", b""], [b"\x80" * 50, b"x"], [bytes(100 << 20)]]
    for path in sockets:
        with zmq.Context() as context:
            for payload in payloads:
                with context.socket(zmq.PUSH) as push:
                    push.setsockopt(zmq.LINGER, 3000)
                    push.connect(f"ipc://{path}")
                    push.send_multipart(payload)
        for raw in (b"", _pickled(marker), os.urandom(1024), b"\xff" + bytes(8) + b"\x7f"):
            with socket.socket(socket.AF_UNIX) as plain:
                plain.connect(str(path))
                try:
                    plain.sendall(raw)
                except OSError:
                    continue  # it was cut off, which is right
    assert server.complete() == before
    assert server.request("GET", "/health")[0] == 200
    assert {role: child.pid for role, child in server.children().items()} == pids and server.process.poll() is None
    assert not marker.exists()


# --- the trace


def test_step_t_plus_1_is_planned_inside_the_forward_of_step_t(tmp_path: Path) -> None:
    slower = make_tiny_model(tmp_path / "M", layers=6, hidden=256, intermediate=1024, heads=8, kv_heads=4)  # a forward takes milliseconds
    trace = tmp_path / "trace.json"
    with served(slower, f"--trace={trace}", "--threads=1") as server:
        stream = opened(server, n=8, max_tokens=48)
        stream.end()
        server.signal(signal.SIGTERM)
        assert server.wait(10) == 0, server.text
    assert {name.split(" (")[0] for name in process_names(trace)} == {"server", "scheduler", "worker0", "detokenizer"}
    assert len(set(process_names(trace))) == 4
    forward, plan, apply = (spans(trace, name) for name in ("forward", "plan", "apply"))
    steps = [step for step in forward if step + 1 in forward]  # a plan that found nothing to do is a span too
    assert len(steps) > 30 and all(plan[step + 1][1] <= apply[step][0] for step in steps)  # planned without the result of t
    # the result of t-1 starts both the planning of t+1 and the forward of t, and on a busy machine either process may be a moment earlier
    ended = [step for step in steps if plan[step + 1][1] <= forward[step][1]]
    inside = [step for step in ended if forward[step][0] <= plan[step + 1][0]]
    print(f"of {len(steps)} plans {len(ended)} end before the forward before them does, {len(inside)} lie wholly inside")
    assert len(ended) > len(steps) / 2 and inside


_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
_CALLS = {"recv_pyobj", "send_pyobj", "eval", "exec"}


def _deserialisers(path: Path) -> Iterator[str]:
    """What in a source file could turn bytes into objects or code."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [(node.module or "").split(".")[0]]
        if bad := _MODULES.intersection(names):
            yield f"{path}:{node.lineno} imports {bad}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
            if called in _CALLS or called.split(".")[-1] in _CALLS - {"eval", "exec"} or (called == "torch.load" and not safe):
                yield f"{path}:{node.lineno} calls {called}"


def test_no_code_that_runs_turns_bytes_into_objects_or_code() -> None:
    root = Path(__file__).parents[2]
    files = [path for folder in ("runtime/gristmill", "python/gristmill_kernels", "examples") for path in (root / folder).rglob("*.py")]
    assert len(files) > 50
    assert [found for path in files for found in _deserialisers(path)] == []


def test_ctrl_c_at_any_moment_of_the_start_is_one_quiet_end(model: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for delay in (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.2, 1.6, 2.0):
        with served(model, "--threads=1", f"--port={port}", ready=False) as server:
            deadline = time.monotonic() + 30
            while socket.socket().connect_ex(("127.0.0.1", port)):  # it listens before all that is slow
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(delay)  # the moment is what is tested: imports, start of the children, loading
            os.killpg(server.process.pid, signal.SIGINT)
            try:
                code = server.wait(15)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"after {delay} s the signal was lost: {server.out} {server.text}") from None
            assert code == 130, (delay, code, server.text)
            assert "Traceback" not in server.text and "KeyboardInterrupt" not in server.text, (delay, server.text)
            server.wait_gone(5)


def test_sigterm_does_not_wait_for_a_request_that_never_arrives(model: Path) -> None:
    with served(model, "--threads=1", "--drain-s=60") as server:
        connection = socket.create_connection(server.address, timeout=20)
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"mo')
        assert server.request("GET", "/health")[0] == 200
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert "Traceback" not in server.text
        connection.close()
