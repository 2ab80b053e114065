"""Building a tokenizer from the `tokenizer.*` metadata of a GGUF file: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

The splitting rules follow the models' own tokenizer.json files and llama.cpp's llama-vocab.cpp, which agree on them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from gristmill.errors import ModelError
from gristmill.loading.gguf_file import GgufFile
from gristmill.tokenizer.pieces import SPACE_MARK

# llama.cpp's enum llama_token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# tokenizer.ggml.pre -> kind of pre-tokenizer
_PRE = {
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "smollm": "digits",
    "starcoder": "digits",
    "gpt-2": "gpt2",
}

# Control tokens that end a turn; one counts as EOS when the file's own chat template writes it.
_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<|endoftext|>"})


class GgufVocab:
    """The parts of a tokenizer that `load_tokenizer` needs; `named` are bos_token, eos_token, ... as text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        meta = GgufFile(path).metadata
        self._meta = {k.removeprefix("tokenizer.ggml."): v for k, v in meta.items() if k.startswith("tokenizer.ggml.")}
        self.tokens = self._list("tokens", str)
        kinds = self._list("token_type", int) if "token_type" in self._meta else [_NORMAL] * len(self.tokens)
        if len(kinds) != len(self.tokens):
            raise ModelError(f"{path}: token_type has {len(kinds)} entries and tokens {len(self.tokens)}")
        while kinds and kinds[-1] == _UNUSED:  # the converter's padding up to the embedding's rows
            kinds.pop()
            self.tokens.pop()
        if len(set(self.tokens)) != len(self.tokens):
            raise ModelError(f"{path}: a token appears twice in tokenizer.ggml.tokens")
        self.kinds = kinds
        template = meta.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) and template else None
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        self.named = {name: self.tokens[i] for name, key in names.items() if (i := self._id(f"{key}_token_id")) is not None}
        self.bos_id = self._id("bos_token_id")
        ends = {i for key in ("eos_token_id", "eot_token_id", "eom_token_id") if (i := self._id(key)) is not None}
        if self.chat_template:
            ends |= {i for i, t in enumerate(self.tokens) if t in _TURN_ENDS and kinds[i] == _CONTROL and t in self.chat_template}
        self.eos_ids = tuple(sorted(ends))

    def build(self) -> Backend:
        """The backend, without the BOS/EOS that it may add to a text (`add_bos`, `add_eos`)."""
        model = self._meta.get("model")
        if model == "gpt2":
            backend = self._byte_level()
        elif model == "llama":
            backend = self._sentencepiece()
        else:
            raise ModelError(f"{self.path}: tokenizer model {model!r} is not supported (gpt2 and llama are)")
        added = [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(self.tokens, self.kinds)
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]
        backend.add_tokens(added)
        return backend

    @property
    def add_bos(self) -> bool:
        # Files without the flag: llama.cpp adds BOS to SentencePiece and Llama 3 vocabularies and to no other.
        default = self._meta.get("model") == "llama" or _PRE.get(str(self._meta.get("pre"))) == "llama3"
        return bool(self._meta.get("add_bos_token", default)) and self.bos_id is not None

    @property
    def add_eos(self) -> bool:
        return bool(self._meta.get("add_eos_token", False)) and "eos_token" in self.named

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self._meta.get(key)
        if not isinstance(values, list) or not values or not isinstance(values[0], kind):
            raise ModelError(f"{self.path} has no readable tokenizer: tokenizer.ggml.{key} is missing or malformed")
        return values

    def _id(self, key: str) -> int | None:
        value = self._meta.get(key)
        return value if type(value) is int and 0 <= value < len(self.tokens) else None

    def _byte_level(self) -> Backend:
        pre = self._meta.get("pre", "gpt-2")
        kind = _PRE.get(pre)
        if kind is None:
            raise ModelError(f"{self.path}: pre-tokenizer {pre!r} is not supported; known: {', '.join(_PRE)}")
        merges = []
        for merge in self._list("merges", str):
            left, _, right = merge.partition(" ")
            merges.append((left, right))
        vocab = {token: i for i, token in enumerate(self.tokens)}
        try:
            backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind == "llama3"))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{self.path}: the merges do not fit the vocabulary: {error}") from error
        steps: list[Any]
        if kind in ("llama3", "qwen2"):
            regex = Regex(_LLAMA3 if kind == "llama3" else _QWEN2)
            steps = [pre_tokenizers.Split(regex, behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        elif kind == "digits":
            steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        else:
            steps = [pre_tokenizers.ByteLevel(add_prefix_space=bool(self._meta.get("add_space_prefix", False)))]
        backend.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
        if kind == "qwen2":
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self) -> Backend:
        scores = self._list("scores", float)
        vocab = {token: i for i, token in enumerate(self.tokens)}
        unknown = self._id("unknown_token_id")
        backend = Backend(
            models.BPE(
                vocab=vocab,
                merges=self._merges(vocab, scores),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefix = bool(self._meta.get("add_space_prefix", True))
        # As SentencePiece and llama.cpp do: one more space at the start of a text, also where it starts with one, and after each
        # control token.
        spaces = [normalizers.Replace(" ", SPACE_MARK)]
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), *spaces] if prefix else spaces)
        steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        if prefix:
            steps.append(decoders.Strip(" ", 1, 0))
        backend.decoder = decoders.Sequence(steps)
        return backend

    def _merges(self, vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
        """SentencePiece BPE joins any two neighbours whose union is a piece, best score first; as an explicit merge list."""
        pieces = {token for token, kind in zip(self.tokens, self.kinds) if kind in (_NORMAL, _USER_DEFINED)}
        found = []
        for whole in pieces:
            for cut in range(1, len(whole)):
                left, right = whole[:cut], whole[cut:]
                if left in pieces and right in pieces:
                    found.append((-scores[vocab[whole]], -len(left), -len(right), vocab[whole], left, right))
        found.sort()
        return [(left, right) for *_, left, right in found]
