"""Round trips, chats, and text that arrives token by token."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from nanoserve import catalog
from nanoserve.errors import ConfigError, FetchError, RequestError, WeightsError
from nanoserve.tokenizer import ByteTokenizer, HFTokenizer, TextStream

CORPUS = ["the quick brown fox jumps over the lazy dog's back", "naïve café 東京 😀👍🏽 привет\n\n  1234"] * 4
CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


def byte_level(**settings_):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
        ),
    )
    return HFTokenizer(backend, {"eos_token": "</s>", "bos_token": {"content": "<s>"}, **settings_})


def byte_fallback():
    """As converted from SentencePiece: words carry their space in front, and the first one's is stripped."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "▁a",
        "é",
        "\ufffd",
    ]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [("a", "b"), ("▁", "a")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return HFTokenizer(backend, {})


KINDS = {"bytes": ByteTokenizer(512), "byte-level": byte_level(), "byte-fallback": byte_fallback()}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="session")
def smollm2():
    try:
        return catalog.fetch_smollm2()
    except FetchError as error:
        pytest.skip(str(error))


def ids_of(kind, size=512):
    """Any ids, some outside of the vocabulary; or a few that meet often: bytes of characters, special tokens."""
    few = [*KINDS[kind].encode("a€ 😀é"), 0, 1, 2, 10, 0x80, 3 + 0xE2, 3 + 0x82, 3 + 0x41, size - 1]
    return st.lists(st.integers(0, size - 1), max_size=80) | st.lists(st.sampled_from(few), max_size=120)


def stream(tokenizer, ids):
    """The pieces; none of them may be taken back, none may end inside a character."""
    out = TextStream(tokenizer)
    return [*(out.push(token_id) for token_id in ids), out.flush()]


@every_kind
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_whole_for_any_ids(kind, data):
    ids = data.draw(ids_of(kind))
    assert "".join(stream(KINDS[kind], ids)) == KINDS[kind].decode(ids)


@every_kind
@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=80).map(lambda text: text * 2))
def test_pieces_join_to_the_text_and_hold_whole_characters(kind, text):
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["bytes", "byte-level"])
@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=80))
def test_round_trip(kind, text):
    assert KINDS[kind].decode(KINDS[kind].encode(text)) == text


@every_kind
@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=60))
def test_the_bytes_of_tokens_join_to_the_text(kind, text):
    tokenizer = KINDS[kind]
    known = "".join(char for char in text if kind != "byte-fallback" or char not in "▁\ufffd")
    ids = tokenizer.encode(known)
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert (joined.removeprefix(b" ") if kind == "byte-fallback" else joined) == known.encode()


def test_bytes_of_tokens_that_are_no_text():
    level, fallback = KINDS["byte-level"], KINDS["byte-fallback"]
    assert [level.token_bytes(token_id) for token_id in (0, 1, 511)] == [b"<s>", b"</s>", b""]
    assert [fallback.token_bytes(token_id) for token_id in (1, 3 + 0xE2)] == [b"<s>", b"\xe2"]
    assert next(level.token_bytes(token_id) for token_id in level.encode("€"))[:1] == b"\xe2"
    assert fallback.token_bytes(fallback.encode(" a")[-1]) == b" a"
    assert ByteTokenizer(512).token_bytes(300) == "⟨300⟩".encode()


def test_every_byte_has_a_character_of_its_own():
    from nanoserve.tokenizer import _BYTES

    assert sorted(_BYTES.values()) == list(range(256))
    assert {*_BYTES} == {*pre_tokenizers.ByteLevel.alphabet()}


def test_a_word_that_was_added_to_a_byte_level_vocabulary_is_itself():
    tokenizer = byte_level()
    tokenizer._backend.add_tokens(["two words"])
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("a two words b"))) == b"a two words b"


def test_the_longer_repeated_text_stays_exact():
    tokenizer = KINDS["byte-level"]
    straddling = [i for byte in b"\x82\xac\xe2" for i in tokenizer.encode(bytes([byte]).decode("latin-1"))[-1:]]
    for ids in ([straddling[0]] * 200, straddling * 100, tokenizer.encode("東京😀 ok " * 60)):
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


class Counting(HFTokenizer):
    """Notes how many ids each call of `decode` gets."""

    def __init__(self, tokenizer):
        self._tokenizer, self.counts = tokenizer, []
        self.is_silent, self.is_byte_fallback = tokenizer.is_silent, tokenizer.is_byte_fallback

    def decode(self, ids, skip_special_tokens=True):
        self.counts.append(len(ids))
        return self._tokenizer.decode(ids, skip_special_tokens)


@pytest.mark.parametrize("text", ["the quick fox ", "a", "    ", "😀", "é"])
@every_kind
def test_a_push_decodes_a_bounded_number_of_ids(kind, text):
    tokenizer = Counting(KINDS[kind])
    ids = KINDS[kind].encode("x" + text * 300)
    assert "".join(stream(tokenizer, ids)) == KINDS[kind].decode(ids)
    # A run of byte tokens decodes as a whole, once, when it ends.
    allowed = len(ids) if kind == "byte-fallback" and text in ("the quick fox ", "😀") else 32
    assert max(tokenizer.counts) <= allowed
    assert sum(tokenizer.counts) <= 64 * len(ids)


@pytest.mark.parametrize("token_id", [0x80, 0xE2, 0xFF, 300])
def test_endless_garbage_costs_no_more(token_id):
    tokenizer = Counting(KINDS["bytes"])
    assert "".join(stream(tokenizer, [token_id] * 600)) == KINDS["bytes"].decode([token_id] * 600)
    assert max(tokenizer.counts) <= 32


def test_a_character_appears_with_its_last_byte():
    assert stream(ByteTokenizer(512), "a😀".encode()) == ["a", "", "", "", "😀", ""]
    assert stream(ByteTokenizer(512), b"a\xf0\x9f") == ["a", "", "", "\ufffd"]


def test_the_byte_tokenizer_shows_what_is_no_byte():
    tokenizer = ByteTokenizer(512)
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([65, 300, 66]) == "A⟨300⟩B"
    assert tokenizer.eos_token_ids == ()
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    with pytest.raises(ConfigError, match="vocab_size 100"):
        ByteTokenizer(100)


def test_special_tokens_end_the_text_but_are_not_in_it():
    tokenizer = byte_level()
    ids = tokenizer.encode("the fox</s>")
    assert ids[-1:] == list(tokenizer.eos_token_ids)
    assert tokenizer.decode(ids) == "the fox"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the fox</s>"


def test_bos_is_added_only_when_asked():
    tokenizer = byte_level()
    tokenizer._backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert tokenizer.encode("fox") == [0, *tokenizer.encode("fox", add_special_tokens=False)]


def test_a_chat_is_rendered_up_to_the_answer():
    tokenizer = byte_level(chat_template=CHAT)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat_text(messages) == "<s>user: hi</s>\n<s>"
    assert tokenizer.render_chat(messages) == tokenizer.encode("<s>user: hi</s>\n<s>", add_special_tokens=False)


def test_a_list_of_templates_has_a_default():
    templates = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y{{ bos_token }}"}]
    assert byte_level(chat_template=templates).render_chat_text([]) == "y<s>"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template refuses"),
        ("{{ messages[0].content + 1 }}", "chat template refuses"),
        ("{{ messages.append(1) }}", "chat template refuses"),
        ("{{ ''.__class__.__mro__ }}", "chat template refuses"),
    ],
)
def test_a_template_that_fails_is_a_request_error(template, words):
    with pytest.raises(RequestError, match=words) as caught:
        byte_level(chat_template=template).render_chat([{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value)


def test_templates_have_the_helpers_of_transformers():
    template = (
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ strftime_now('%Y')|length }}{{ {'é': '<'}|tojson }}"
    )
    assert byte_level(chat_template=template).render_chat_text([]) == '014{"é": "<"}'


@every_kind
def test_half_a_surrogate_pair_is_a_request_error(kind):
    with pytest.raises(RequestError, match="surrogate"):
        KINDS[kind].encode("a\ud83d")


def test_a_folder_may_lack_all_but_the_tokenizer(tmp_path):
    with pytest.raises(WeightsError, match=r"tokenizer\.json is missing"):
        HFTokenizer.from_folder(tmp_path)
    byte_level()._backend.save(str(tmp_path / "tokenizer.json"))
    assert HFTokenizer.from_folder(tmp_path).eos_token_ids == ()
    (tmp_path / "chat_template.jinja").write_text("{{ messages|length }}")
    assert HFTokenizer.from_folder(tmp_path).render_chat_text([{}]) == "1"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_truncated_file_is_named(name, tmp_path):
    byte_level()._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text('{"half":')
    with pytest.raises(WeightsError, match=name):
        HFTokenizer.from_folder(tmp_path)


def test_settings_for_batches_in_the_file_are_ignored(tmp_path):
    backend = byte_level()._backend
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert HFTokenizer.from_folder(tmp_path).encode("the quick brown") == byte_level().encode("the quick brown")


def test_smollm2_reads_as_transformers_reads_it(smollm2):
    from transformers import AutoTokenizer

    ours, theirs = HFTokenizer.from_folder(smollm2), AutoTokenizer.from_pretrained(smollm2)
    for text in ("The capital of France is", "1234 it's\n\n  été 東京 😀 <|im_end|> x", ""):
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.render_chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True).input_ids
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_the_bytes_of_smollm2s_tokens_join_to_the_text(smollm2):
    tokenizer = HFTokenizer.from_folder(smollm2)
    for text in ("The capital of France is", "1234 it's\n\n  été 東京 😀👍🏽 <|im_end|> x"):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_smollm2_streams_any_ids(smollm2):
    tokenizer = HFTokenizer.from_folder(smollm2)

    @settings(max_examples=80, deadline=None)
    @given(ids=st.lists(st.integers(0, 49151), max_size=120))
    def check(ids):
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)

    check()
