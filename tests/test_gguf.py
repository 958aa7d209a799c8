"""GGUF files written here from random Llamas; the reading side has to give the original weights back."""

import json
import math

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nanoserve import catalog, gguf_file
from nanoserve.config import RopeScaling
from nanoserve.errors import FetchError, WeightsError
from nanoserve.gguf_tokenizer import PRE_TOKENIZERS
from nanoserve.hf_config import parse_hf_config

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
ROWS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NORMS = ("norm", "layernorm")


@pytest.fixture(scope="module")
def vocabulary():
    """A small byte-level BPE: the tokenizer it came from, its tokens, types and merges."""
    source = tokenizers.Tokenizer(models.BPE())
    source.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    source.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<bos>", "<eos>"], show_progress=False
    )
    source.train_from_iterator(["the capital of France is Paris, it's 1234"] * 9, trainer)
    saved = json.loads(source.to_str())["model"]
    tokens = [token for token, _ in sorted(saved["vocab"].items(), key=lambda item: item[1])]
    types = [3 if token in ("<bos>", "<eos>") else 1 for token in tokens]
    return source, tokens, types, [" ".join(pair) for pair in saved["merges"]]


@pytest.fixture(scope="module")
def llama(vocabulary):
    torch.manual_seed(0)
    return make_llama(len(vocabulary[1]), tie=True)


def make_llama(vocab_size, tie):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=256, tie_word_embeddings=tie,
            rope_theta=50_000.0, rms_norm_eps=1e-6, eos_token_id=1,
        )
    )  # fmt: skip


def interleave(weight, num_heads):
    """Rows 0, half, 1, half + 1, ... of each head, as llama.cpp wants them."""
    order = [
        head * HEAD_DIM + i + half
        for head in range(num_heads)
        for i in range(HEAD_DIM // 2)
        for half in (0, HEAD_DIM // 2)
    ]
    return weight[order]


def write(
    path, model, vocabulary, *, quantize=None, extra=(), architecture="llama", pre="smollm", kind="gpt2", rope=None
):
    writer = gguf.GGUFWriter(path, architecture)
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _, tokens, types, merges = vocabulary
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for method, *arguments in extra:
        getattr(writer, method)(*arguments)
    for hf_name, weight in model.named_parameters():
        name, data = rename(hf_name), weight.detach()
        for part, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
            data = interleave(data, heads) if part in name else data
        add_tensor(writer, name, data.contiguous().numpy(), None if "norm" in name else quantize)
    if rope is not None:
        writer.add_tensor("rope_freqs.weight", rope)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rename(name):
    stem = name.removesuffix(".weight")
    if stem in TOP:
        return f"{TOP[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{ROWS[rest]}.weight"


def add_tensor(writer, name, data, quantize):
    if quantize is None:
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, gguf.quants.quantize(data, quantize), raw_dtype=quantize)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, llama, vocabulary):
    return write(tmp_path_factory.mktemp("gguf") / "plain.gguf", llama, vocabulary)


def test_the_shape_is_that_of_the_original(plain, llama):
    assert gguf_file.read_config(plain) == parse_hf_config(llama.config.to_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_come_back_exactly(plain, llama, dtype):
    found = dict(gguf_file.read_tensors(plain, dtype))
    assert set(found) == {name for name, _ in llama.named_parameters()}
    for name, weight in llama.named_parameters():
        assert torch.equal(found[name], weight.detach().to(dtype)), name


def test_an_untied_model_has_an_output_matrix(tmp_path, vocabulary):
    model = make_llama(len(vocabulary[1]), tie=False)
    path = write(tmp_path / "untied.gguf", model, vocabulary)
    assert not gguf_file.read_config(path).tie_embeddings
    assert torch.equal(dict(gguf_file.read_tensors(path, torch.float32))["lm_head.weight"], model.lm_head.weight)


@pytest.mark.parametrize(("kind", "error"), [("F16", 1e-4), ("BF16", 5e-4), ("Q8_0", 1e-3), ("Q4_1", 1e-2)])
def test_quantised_weights_come_back_nearly(tmp_path, llama, vocabulary, kind, error):
    path = write(tmp_path / "q.gguf", llama, vocabulary, quantize=gguf.GGMLQuantizationType[kind])
    found = dict(gguf_file.read_tensors(path, torch.float32))
    worst = max((found[name] - weight).abs().max().item() for name, weight in llama.named_parameters())
    assert 0 < worst < error


def test_rows_are_separated_as_transformers_does_it(plain, llama):
    pytest.importorskip("accelerate", reason="transformers reads GGUF with it")
    theirs = AutoModelForCausalLM.from_pretrained(plain.parent, gguf_file=plain.name, dtype=torch.float32)
    ours = dict(gguf_file.read_tensors(plain, torch.float32))
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.named_parameters())


def llama3_divisors(factor, low=1.0, high=4.0, original=8192):
    """Written from the model card's wording: slow waves divided, fast ones kept, smooth in between."""
    divisors = []
    for i in range(HEAD_DIM // 2):
        wavelength = 2 * math.pi * 50_000.0 ** (2 * i / HEAD_DIM)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path, llama, vocabulary):
    path = write(tmp_path / "l3.gguf", llama, vocabulary, rope=llama3_divisors(32.0))
    assert gguf_file.read_config(path).rope_scaling == RopeScaling(
        factor=32, low_freq_factor=1, high_freq_factor=4, original_context_tokens=8192
    )
    assert "rope_freqs.weight" not in dict(gguf_file.read_tensors(path, torch.float32))


def test_divisors_of_one_scale_nothing(tmp_path, llama, vocabulary):
    path = write(tmp_path / "one.gguf", llama, vocabulary, rope=np.ones(HEAD_DIM // 2, dtype=np.float32))
    assert gguf_file.read_config(path).rope_scaling is None


@pytest.mark.parametrize("rope", [llama3_divisors(8.0, high=8.0), np.full(HEAD_DIM // 2, 2.0, dtype=np.float32)])
def test_other_divisors_are_refused(tmp_path, llama, vocabulary, rope):
    path = write(tmp_path / "other.gguf", llama, vocabulary, rope=rope)
    with pytest.raises(WeightsError, match="rope_freqs"):
        gguf_file.read_config(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "qwen2"}, "unknown general.architecture 'qwen2'; choose one of: llama"),
        ({"extra": [("add_expert_count", 8)]}, "llama.expert_count 8"),
        ({"extra": [("add_rope_scaling_type", gguf.RopeScalingType.YARN)]}, "llama.rope.scaling.type 'yarn'"),
        ({"extra": [("add_rope_scaling_factor", 4.0)]}, "llama.rope.scaling.factor 4.0"),
        ({"extra": [("add_value_length", 64)]}, "llama.attention.value_length 64"),
    ],
)
def test_foreign_variants_are_refused_by_name(tmp_path, llama, vocabulary, options, words):
    path = write(tmp_path / "foreign.gguf", llama, vocabulary, **options)
    with pytest.raises(WeightsError) as caught:
        gguf_file.read_config(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("options", [{"pre": "deepseek-llm"}, {"kind": "llama"}])
def test_foreign_tokenizers_are_refused_by_name(tmp_path, llama, vocabulary, options):
    path = write(tmp_path / "foreign.gguf", llama, vocabulary, **options)
    with pytest.raises(WeightsError, match=f"unknown .*{next(iter(options.values()))}"):
        gguf_file.read_tokenizer(path)


def test_an_unexpected_tensor_is_named(tmp_path, llama, vocabulary):
    extra = [("add_tensor", "blk.0.attn_q.bias", np.zeros(4, dtype=np.float32))]
    path = write(tmp_path / "bias.gguf", llama, vocabulary, extra=extra)
    with pytest.raises(WeightsError, match=r"unexpected tensor blk\.0\.attn_q\.bias"):
        list(gguf_file.read_tensors(path, torch.float32))


@pytest.mark.parametrize("keep", [0, 3, 4, 10, 100, 1000, 5000, 0.3, 0.6, 0.9, 0.9999])
def test_a_truncated_file_is_named(plain, tmp_path, keep):
    data = plain.read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(WeightsError, match=r"short\.gguf is truncated"):
        gguf_file.GgufFile(path)


@pytest.mark.parametrize(
    "data", [b"hello world" * 99, b"GGUF\x00\x00\x00\x03" + b"\xff" * 64, b"GGUF\x63\0\0\0" + b"\0" * 64]
)
def test_another_kind_of_file_is_named(tmp_path, data):
    path = tmp_path / "other.gguf"
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"other\.gguf"):
        gguf_file.GgufFile(path)


def test_smollm_splits_digits_and_words(plain, vocabulary):
    tokenizer, settings = gguf_file.read_tokenizer(plain)
    text = "the capital<eos> it's 1234\n  é😀"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]
    assert (settings["bos_token"], settings["eos_token"], settings["add_bos_token"]) == ("<bos>", "<eos>", False)
    assert settings["chat_template"] == "{{ messages[0]['content'] }}"


def test_gpt2_reads_as_the_tokenizer_it_was_made_from(tmp_path, llama, vocabulary):
    tokenizer, _ = gguf_file.read_tokenizer(write(tmp_path / "g.gguf", llama, vocabulary, pre="gpt-2"))
    for text in ("the capital of France", " it's 1234\n\n é😀", "<bos>x<eos>"):
        assert tokenizer.encode(text).ids == vocabulary[0].encode(text).ids


def test_llama3_takes_its_bos_from_the_file_or_from_habit(tmp_path, llama, vocabulary):
    habit = write(tmp_path / "a.gguf", llama, vocabulary, pre="llama-bpe")
    assert gguf_file.read_tokenizer(habit)[0].encode("the").tokens[0] == "<bos>"
    stated = write(tmp_path / "b.gguf", llama, vocabulary, pre="llama-bpe", extra=[("add_add_bos_token", False)])
    assert gguf_file.read_tokenizer(stated)[0].encode("the").tokens[0] != "<bos>"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["it", "'s", "Ġ12345", "Ġ", "Ġok", "!"]),
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġok", "!"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "45", "Ġ", "Ġok", "!"]),
        ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġok", "!"]),
    ],
)
def test_each_pre_tokenizer_splits_in_its_own_way(pre, pieces):
    assert [piece for piece, _ in PRE_TOKENIZERS[pre]().pre_tokenize_str("it's 12345  ok!")] == pieces


def test_a_converted_folder_is_a_hugging_face_checkpoint(plain, llama, tmp_path):
    gguf_file.convert(plain, tmp_path, {"source": "here", "version": "1"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == torch.bfloat16
    for (_, found), (_, weight) in zip(theirs.named_parameters(), llama.named_parameters(), strict=True):
        assert torch.equal(found, weight.detach().to(torch.bfloat16))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("the capital 12").input_ids == gguf_file.read_tokenizer(plain)[0].encode("the capital 12").ids
    assert tokenizer.eos_token == "<eos>"
    manifest = json.loads((tmp_path / "nanoserve.json").read_text())
    assert manifest["source"] == "here"
    assert manifest["file_bytes"]["model.safetensors"] == (tmp_path / "model.safetensors").stat().st_size


def test_a_full_disk_leaves_convert_as_an_oserror(plain, tmp_path, monkeypatch):
    def full(*_, **__):
        raise gguf_file.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(gguf_file, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        gguf_file.convert(plain, tmp_path, {})


def test_smollm2_has_the_weights_that_transformers_reads():
    try:
        folder = catalog.fetch_smollm2()
    except FetchError as error:
        pytest.skip(str(error))
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)("The capital of France is", return_tensors="pt").input_ids
    assert ids.tolist() == [[504, 3575, 282, 4649, 314]]
    assert AutoTokenizer.from_pretrained(folder).decode(theirs(ids).logits[0, -1].argmax()) == " Paris"
