"""The tokenizer of a served model, torch-free: text to ids, ids to bytes, and chat messages to ids.

Loaded from a Hugging Face directory (tokenizer.json) or from the metadata of a GGUF file. Control tokens are encoded as such only
where the engine itself wrote them (BOS, a chat template) or where the caller asks for it: in a user's text they are text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from gristmill.errors import ModelError
from gristmill.tokenizer import chat_template as chat
from gristmill.tokenizer.chat_template import ChatTemplateError
from gristmill.tokenizer.gguf_vocab import GgufVocab
from gristmill.tokenizer.pieces import Spelling, byte_alphabet, piece_bytes, spelling_of

__all__ = ["ChatTemplateError", "PromptTooLong", "Tokenizer", "load_tokenizer"]

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class PromptTooLong(ValueError):
    """A text has more tokens than the caller can use; it was refused before the work of encoding it."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens")
        self.at_least = at_least


class Tokenizer:
    """See the module's docstring. Encoding is thread-safe.

    Attributes:
        vocab_size: one more than the largest id; embeddings may be padded beyond it.
        special_ids: control tokens, hidden from generated text unless asked for.
        eos_ids, bos_id: as the tokenizer's own files name them (the model's config may name more).
        chat_template: Jinja source, or None when the model has none.
        strips_space: a text's first token loses its leading space when decoded (SentencePiece).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        where: str = "memory",
        named: dict[str, str] | None = None,
        eos_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        extra_bos: bool = False,
        extra_eos: bool = False,
    ) -> None:
        self.named = dict(named or {})
        self.chat_template = chat_template
        self._backend = backend
        self._spelling, self.strips_space = spelling_of(backend, where)
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content.encode() for i, token in added.items()}
        self._specials = {i: token.content for i, token in added.items() if token.special}
        self.special_ids = frozenset(self._specials)
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added)])
        self.bos_id = self._named_id("bos_token")
        eos = self._named_id("eos_token")
        self.eos_ids = tuple(sorted({*eos_ids, *(() if eos is None else (eos,))}))
        self._unknown_id = self._named_id("unk_token")
        self._bytes: dict[int, bytes] = {}

        # The same tokenizer with control tokens switched off, for everything that a user wrote.
        self._plain = Backend.from_str(backend.to_str())
        self._plain.encode_special_tokens = True
        self._guard = chat.Guard(self._specials.values())
        self._prefix_once = self._prepends_first_only()
        self._adds_prefix = b"".join(map(self.id_to_bytes, self._encode_plain("a"))) != b"a"
        self._before, self._after = self._affixes(extra_bos, eos if extra_eos else None)

    # --- text to ids

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = False, limit: int | None = None) -> list[int]:
        """Ids of `text`. `add_special` adds what the model expects around a text (BOS); with `allow_special`, control tokens
        spelt in `text` become their ids, and a BOS spelt at its start is not added twice.

        Raises PromptTooLong when the length of `text` alone shows that it has more than `limit` tokens.
        """
        self._check_limit(text, limit)
        ids = self._special_encoding(text).ids if allow_special else self._encode_plain(text)
        if not add_special:
            return ids
        before = self._before
        if before and ids[: len(before)] == before:
            before = []
        return [*before, *ids, *self._after]

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """Prompt ids of a conversation. Raises ChatTemplateError when there is no template or it refuses the messages, and
        PromptTooLong like `encode`."""
        guarded, mark = self._guard.protect({"messages": list(messages), "tools": tools, "variables": variables or {}})
        text = self._render(guarded["messages"], guarded["tools"], add_generation_prompt, guarded["variables"])
        self._check_limit(text, limit)
        if not mark:
            return self._special_encoding(text).ids
        return self._encode_marked(text, mark)

    def render_chat(
        self, messages: Sequence[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the template writes it, for people to read."""
        return self._render(list(messages), tools, add_generation_prompt, {})

    def _render(self, messages: Any, tools: Any, add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions with a prompt")
        values = {**self.named, "messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        return chat.render(self.chat_template, {**values, **variables})

    def _check_limit(self, text: str, limit: int | None) -> None:
        """No token stands for more characters than the longest piece has; normalisation joins a few at most."""
        if limit is None or len(text) <= limit:
            return
        at_least = len(text) // self._longest_piece // (1 if self._backend.normalizer is None else 4)
        if at_least > limit:
            raise PromptTooLong(at_least)

    @cached_property
    def _longest_piece(self) -> int:
        vocab = self._backend.get_vocab(with_added_tokens=True)
        if self._spelling is Spelling.SENTENCEPIECE and "<0x00>" not in vocab:
            return sys.maxsize  # one unknown token may stand for any number of characters
        return max(map(len, vocab), default=1)

    def _special_encoding(self, text: str) -> Encoding:
        return self._backend.encode(text, add_special_tokens=False)

    def _encode_plain(self, text: str) -> list[int]:
        encoding = self._plain.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        forbidden = self.special_ids - {self._unknown_id}
        if forbidden.isdisjoint(ids):
            return ids
        # The model itself joined a control token (a SentencePiece piece spelt like one): break it after its first character.
        i = next(i for i, token in enumerate(ids) if token in forbidden)
        cut = encoding.offsets[i][0] + 1
        return self._encode_plain(text[:cut]) + self._without_prefix(text[cut:])

    def _without_prefix(self, text: str) -> list[int]:
        """Ids of plain text that goes on after other text: no prefix space is added."""
        if not text or not self._adds_prefix:
            return self._encode_plain(text)
        newline = self._encode_plain("\n")
        ids = self._encode_plain("\n" + text)
        return ids[len(newline) :] if ids[: len(newline)] == newline else self._encode_plain(text)

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """Ids of rendered `text`: control tokens in it are the template's; between them, text with `mark` removed."""
        encoding = self._special_encoding(text)
        ids: list[int] = []
        at = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets):
            if token not in self._specials or self._specials[token] not in text[start:end]:
                continue
            ids += self._encode_section(text[at:start], mark, at)
            ids.append(token)
            at = end
        return ids + self._encode_section(text[at:], mark, at)

    def _encode_section(self, text: str, mark: str, at: int) -> list[int]:
        text = text.replace(mark, "")
        return self._without_prefix(text) if at and self._prefix_once else self._encode_plain(text)

    # --- ids to text

    def id_to_bytes(self, token_id: int) -> bytes:
        """The exact bytes that `token_id` stands for; empty for ids that the tokenizer does not have."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._added.get(token_id)
            if known is None:
                piece = self._backend.id_to_token(token_id) if token_id >= 0 else None
                known = b"" if piece is None else piece_bytes(piece, self._spelling)
            self._bytes[token_id] = known
        return known

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of a whole sequence of ids; bytes that are no UTF-8 become U+FFFD."""
        raw = b"".join(self.id_to_bytes(i) for i in map(int, ids) if not (skip_special and i in self.special_ids))
        if self.strips_space and raw.startswith(b" "):
            raw = raw[1:]
        return raw.decode("utf-8", errors="replace")

    # --- set-up

    def _named_id(self, name: str) -> int | None:
        token = self.named.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _prepends_first_only(self) -> bool:
        """Whether a prefix space is added at the start of a text and not after each control token."""
        pre = self._backend.pre_tokenizer
        state = json.loads(pre.__getstate__()) if pre is not None and self._spelling is Spelling.SENTENCEPIECE else {}
        steps = state.get("pretokenizers", [state])
        return any(step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first" for step in steps)

    def _affixes(self, extra_bos: bool, extra_eos: int | None) -> tuple[list[int], list[int]]:
        """What the post-processor puts before and after a text."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        before, after = [], []
        for i in range(len(full) - len(bare) + 1):
            if full[i : i + len(bare)] == bare:
                before, after = full[:i], full[i + len(bare) :]
                break
        if extra_bos and not before and self.bos_id is not None:
            before = [self.bos_id]
        if extra_eos is not None and not after:
            after = [extra_eos]
        return before, after


def load_tokenizer(path: str | Path, made_up: int = 0) -> Tokenizer:
    """The tokenizer of the model at `path`: a directory with tokenizer.json, a .gguf file, or "null:<ms>[:<vocabulary>]".

    With `made_up`, a directory without a tokenizer gets one of so many made-up words.

    Raises ModelError, one sentence, when it is missing, unreadable or of an unsupported kind.
    """
    if str(path).startswith("null:"):
        return _for_null_worker(str(path))
    path = Path(path)
    if made_up and path.is_dir() and not (path / "tokenizer.json").exists():
        return _made_up(str(path), made_up)
    if path.is_dir():
        return _from_directory(path)
    if path.suffix == ".gguf":
        vocab = GgufVocab(path)
        return Tokenizer(
            vocab.build(),
            where=str(path),
            named=vocab.named,
            eos_ids=vocab.eos_ids,
            chat_template=vocab.chat_template,
            extra_bos=vocab.add_bos,
            extra_eos=vocab.add_eos,
        )
    raise ModelError(f"cannot load a tokenizer from {path}: it is neither a directory nor a .gguf file")


def _for_null_worker(path: str) -> Tokenizer:
    size = path.split(":")[2:]
    return _made_up(path, int(size[0]) if size and size[0].isdecimal() else 600)


def _made_up(where: str, wanted: int) -> Tokenizer:
    """Three control tokens, the 256 bytes, then made-up words up to the vocabulary of a null worker (worker/null.py) or a dummy model."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), *(f"\u0120w{i}" for i in range(wanted))][:wanted]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.add_special_tokens(tokens[:3])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    return Tokenizer(backend, where=where, named={"eos_token": tokens[-1] if wanted < 3 else "<|im_end|>"}, chat_template=template)


def _from_directory(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        hint = " (tokenizer.model alone is not enough)" if (folder / "tokenizer.model").exists() else ""
        raise ModelError(f"{folder} has no tokenizer.json{hint}")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file} is not a readable tokenizer: {str(error)[:200]}") from error
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    special_map = _read_json(folder / "special_tokens_map.json")
    named = {name: text for name in _NAMED if (text := _token_text(config.get(name, special_map.get(name)))) is not None}
    _add_missing(backend, config, special_map, named, folder)
    return Tokenizer(
        backend,
        where=str(folder),
        named=named,
        chat_template=_template(folder, config),
        extra_bos=config.get("add_bos_token") is True,
        extra_eos=config.get("add_eos_token") is True,
    )


def _add_missing(backend: Backend, config: dict[str, Any], special_map: dict[str, Any], named: dict[str, str], folder: Path) -> None:
    """Tokens that only the config files name: added tokens missing in tokenizer.json, and named tokens not yet marked special."""
    table = config.get("added_tokens_decoder", {})
    present = backend.get_added_tokens_decoder()
    for key in sorted(table, key=int) if isinstance(table, dict) and all(k.isdecimal() for k in table) else ():
        entry = table[key]
        if int(key) in present or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            continue
        flags = {name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
        backend.add_tokens([AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags)])
        if backend.token_to_id(entry["content"]) != int(key):
            raise ModelError(f"{folder}: tokenizer_config.json gives {entry['content']!r} the id {key}, which tokenizer.json cannot hold")
    more = config.get("additional_special_tokens", special_map.get("additional_special_tokens")) or []
    wanted = [*named.values(), *(text for entry in more if (text := _token_text(entry)) is not None)]
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    # A named token that is in no vocabulary would get a new id beyond the embedding: it is left out instead.
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in wanted if t not in special and backend.token_to_id(t) is not None]
    )


def _token_text(entry: Any) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) and entry else None


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, chat_template.json or tokenizer_config's chat_template (of several, the one named "default")."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {file}: {error}") from error
    found = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):
        found = next((entry.get("template") for entry in found if isinstance(entry, dict) and entry.get("name") == "default"), None)
    return found if isinstance(found, str) and found else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value
