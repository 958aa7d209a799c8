"""Text to token ids and back, whole or token by token, and the rendering of chats.

Knows `tokenizers` and Jinja chat templates. Refuses to know torch, requests and where a model comes from.
"""

import datetime
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from nanoserve.errors import ConfigError, RequestError, WeightsError, one_line

_LONG = 4096  # characters
REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no UTF-8, an unfinished character among them


_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _PRINTED)
}
"""The characters in which byte-level BPE writes bytes (GPT-2's encoder.py): each a visible one."""


class Tokenizer(ABC):
    """What the engine asks of a tokenizer."""

    eos_token_ids: tuple[int, ...] = ()

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text, with the BOS token in front if the model was trained with one."""

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these ids; bytes that are no UTF-8 become U+FFFD, ids without a meaning leave no text."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """What this token adds behind others: half a character stays half, a special token is its word.

        Those of a text's ids join to its UTF-8, but for the space that some tokenizers take from a text's beginning.
        """

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises RequestError if the model has no chat template or the template refuses the messages.
        """
        raise RequestError("this model has no chat template; send a plain prompt instead")

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves this token out wherever it stands."""
        return False

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether this token is a byte of a run that decodes as a whole: its text depends on what follows."""
        return False


class ByteTokenizer(Tokenizer):
    """For models with random weights: ids 0 to 255 are UTF-8 bytes, any higher one shows as its number, like ⟨300⟩."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 256:
            raise ConfigError(f"vocab_size {vocab_size} has no room for the 256 bytes of this tokenizer")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(_utf8(text))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else f"⟨{token_id}⟩".encode()


class HFTokenizer(Tokenizer):
    """A `tokenizers` pipeline together with the settings of a tokenizer_config.json."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._settings = settings
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._byte_ids = _byte_fallback_ids(backend)
        eos = backend.token_to_id(self._token("eos_token") or "")
        self.eos_token_ids = () if eos is None else (eos,)

    @classmethod
    def from_folder(cls, folder: Path) -> "HFTokenizer":
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja; only the first has to be there.

        Raises WeightsError, naming the file, if it is missing or no tokenizer.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise WeightsError(f"{path} is missing; a checkpoint needs its tokenizer in this format")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception, whatever is wrong
            raise WeightsError(f"{path} is no tokenizer: {one_line(error)}") from error
        return cls(backend, _read_settings(folder))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _utf8(text)
        if len(text) > _LONG:  # only a batch lets other threads run meanwhile
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        else:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        if token_id in self._special or self._backend.decoder is None:
            return token.encode()
        if self.is_byte_fallback(token_id):
            return bytes.fromhex(token[3:5])  # <0xE2>
        if "ByteLevel" in str(self._backend.decoder) and all(char in _BYTES for char in token):
            return bytes(_BYTES[char] for char in token)
        # Behind another token: a decoder may take a space from the first one.
        text: str = self._backend.decoder.decode(["a", token])
        return text[1:].encode()

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode(self.render_chat_text(messages), add_special_tokens=False)

    def render_chat_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as the template writes it; special tokens are still words in it."""
        template = self._settings.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if not isinstance(template, str):
            return str(super().render_chat(messages))
        tokens = {name: self._token(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        known = {name: token for name, token in tokens.items() if token is not None}
        return _render(template, messages=list(messages), add_generation_prompt=True, **known)

    def is_silent(self, token_id: int) -> bool:
        return token_id in self._special or self._backend.id_to_token(token_id) is None

    def is_byte_fallback(self, token_id: int) -> bool:
        return token_id in self._byte_ids

    def _token(self, name: str) -> str | None:
        value = self._settings.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) else None


class TextStream:
    """Turns ids into text one by one. The pieces, `flush` included, join to what `decode` makes of all ids at once.

    Never returns half a character. The cost of a push does not grow with the length of the text: only a window of
    recent ids is decoded again, enough of it for the tokenizer to see what stands before the new token.
    """

    _LONGEST, _KEPT = 24, 8

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_sent = 0  # characters of the window's text that have been returned

    def push(self, token_id: int) -> str:
        """The text that this token finished, often but not always its own; "" while a character is incomplete."""
        if self._tokenizer.is_silent(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte_fallback(token_id):
            return ""
        text = self._tokenizer.decode(self._window)
        # However many bytes of a character are there, they show as one U+FFFD, and it is the last one.
        num_final = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._num_sent : num_final]
        self._num_sent = max(self._num_sent, num_final)
        if len(self._window) > self._LONGEST:
            self._shorten(text)
        return piece

    def flush(self) -> str:
        """The text held back so far, with U+FFFD for a character that never became whole."""
        text = self._tokenizer.decode(self._window)[self._num_sent :]
        self._num_sent += len(text)
        return text

    def _shorten(self, text: str) -> None:
        """Drop old ids, if the rest provably decodes to the same continuation."""
        num_unsent = len(text) - self._num_sent
        kept = self._window[-self._KEPT :]
        tail = self._tokenizer.decode(kept)
        if _share_a_character(text, tail, num_unsent) or self._splits_cleanly(text, tail, num_unsent):
            self._window = kept
            self._num_sent = len(tail) - num_unsent

    def _splits_cleanly(self, text: str, tail: str, num_unsent: int) -> bool:
        """True between two characters, for decoders that do not look back: a run of invalid bytes, say."""
        return len(tail) > num_unsent and self._tokenizer.decode(self._window[: -self._KEPT]) + tail == text


def _share_a_character(text: str, tail: str, num_unsent: int) -> bool:
    """Whether both end alike, back to a sent character that is valid: whatever comes later then reads alike, too."""
    for position in range(1, min(len(text), len(tail)) + 1):
        if text[-position] != tail[-position]:
            return False
        if position > num_unsent and text[-position] != REPLACEMENT:
            return True
    return False


def _byte_fallback_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    if "ByteFallback" not in str(backend.decoder):
        return frozenset()
    ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)


def _read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the template of chat_template.jinja if there is one. Raises WeightsError."""
    path, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        settings = json.loads(_read_text(path)) if path.is_file() else {}
    except ValueError as error:
        raise WeightsError(f"{path} is no JSON: {one_line(error)}") from error
    if not isinstance(settings, dict):
        raise WeightsError(f"{path} holds a JSON {type(settings).__name__}, not an object")
    return {**settings, "chat_template": _read_text(template)} if template.is_file() else settings


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path} cannot be read: {one_line(error)}") from error


def _render(template: str, **values: Any) -> str:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own filter escapes for HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(**values)
    except Exception as error:  # a template is a program of somebody else's and fails in its own ways
        raise RequestError(f"the chat template refuses these messages: {one_line(error)}") from error


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise RequestError(f"text holds {half!r}, half of a surrogate pair, which is no character") from error
