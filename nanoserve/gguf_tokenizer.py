"""Builds the tokenizer that a GGUF file's metadata describes: byte-level BPE with one of the known pre-tokenizers.

Knows the keys `tokenizer.*` and how the families behind them split text. Refuses to know files and weights, and
refuses SentencePiece vocabularies and unknown pre-tokenizers by name rather than splitting text in a similar way.
"""

from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from nanoserve.errors import WeightsError, unknown

Lookup = Callable[[str, Any], Any]  # (key, default) -> value

# The pattern of GPT-4's tokenizer, with the number of digits in one piece left open.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4  # values in tokenizer.ggml.token_type
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def build_tokenizer(get: Lookup) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and what a tokenizer_config.json would say of it; WeightsError for a kind that is not supported."""
    kind, pre = get("tokenizer.ggml.model", None), get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise WeightsError(unknown("tokenizer.ggml.model", kind, ["gpt2 (byte-level BPE)"]))
    if pre not in PRE_TOKENIZERS:
        raise WeightsError(unknown("tokenizer.ggml.pre", pre, PRE_TOKENIZERS))
    tokens: list[str] = get("tokenizer.ggml.tokens", [])
    merges = [tuple(merge.split(" ", 1)) for merge in get("tokenizer.ggml.merges", [])]
    tokenizer = _byte_level_bpe(tokens, merges, pre)
    _add_tokens(tokenizer, tokens, get("tokenizer.ggml.token_type", []))
    settings = _settings(get, tokens, pre)
    if settings["add_bos_token"]:
        _put_in_front(tokenizer, settings["bos_token"])
    return tokenizer, settings


def _byte_level_bpe(tokens: list[str], merges: list[Any], pre: str) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.normalizer = normalizers.NFC() if pre == "qwen2" else None
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    for token, token_type in zip(tokens, types, strict=False):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _settings(get: Lookup, tokens: list[str], pre: str) -> dict[str, Any]:
    ids = {name: get(f"tokenizer.ggml.{key}_token_id", None) for name, key in _ROLES.items()}
    special = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
    # Llama 3 wants its BOS token, and files older than this key leave that to whoever reads them.
    add_bos = bool(get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")) and "bos_token" in special
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    template = get("tokenizer.chat_template", None)
    chat = {} if template is None else {"chat_template": template}
    return {**settings, "add_bos_token": add_bos, **special, **chat}


def _put_in_front(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _gpt4(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_WORDS.replace("DIGITS", digits)), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# tokenizer.ggml.pre -> how text is split before the merges
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _gpt4("{1,3}"),
    "qwen2": lambda: _gpt4(""),
}
