"""The exact bytes of each vocabulary entry, for the two spellings that language models use.

Byte-level vocabularies (GPT-2, Llama 3, Qwen) spell every byte as one printable character; SentencePiece ones spell a space as
U+2581 and bytes outside the vocabulary as `<0xNN>`. Text made from these bytes never depends on how ids are grouped.
"""

from __future__ import annotations

import json
import re
from enum import Enum

from tokenizers import Tokenizer as Backend

from gristmill.errors import ModelError

SPACE_MARK = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(Enum):
    BYTE_LEVEL = "byte-level"
    SENTENCEPIECE = "sentencepiece"


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character -> byte table (openai/gpt-2 src/encoder.py, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in printable)
    table |= {chr(256 + i): byte for i, byte in enumerate(hidden)}
    return table


_ALPHABET = byte_alphabet()


def spelling_of(backend: Backend, where: str) -> tuple[Spelling, bool]:
    """How `backend` spells bytes, and whether its decoder drops one space at the start of a text.

    Raises ModelError when the decoder is neither byte-level nor SentencePiece-like.
    """
    decoder = backend.decoder
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    steps = state.get("decoders", [state])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return Spelling.BYTE_LEVEL, False
    if kinds & {"ByteFallback", "Metaspace"}:
        strips = any(step.get("type") == "Strip" and step.get("start", 0) > 0 for step in steps)
        strips |= any(step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in steps)
        return Spelling.SENTENCEPIECE, strips
    raise ModelError(f"the tokenizer in {where} has a decoder of type {state.get('type')!r}; byte-level and byte-fallback are supported")


def piece_bytes(piece: str, spelling: Spelling) -> bytes:
    """Bytes of a piece of the model vocabulary (an added token's content is plain text instead)."""
    if spelling is Spelling.BYTE_LEVEL:
        try:
            return bytes([_ALPHABET[char] for char in piece])
        except KeyError:
            return piece.encode()
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace(SPACE_MARK, " ").encode()
