"""The model against transformers with the same weights: logits within 1e-4, greedy tokens identical."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from nanoserve import Engine, SamplingParams
from nanoserve.cache.contiguous import ContiguousCache
from nanoserve.cache.kv import NoCache
from nanoserve.config import EngineConfig, RopeScaling
from nanoserve.errors import FetchError
from nanoserve.models.llama import Llama, rope_frequencies
from nanoserve.weights import load_model
from tests.conftest import config_like_tiny

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
SHAPES = {
    "mha-tied": (4, 4, True, DEFAULT_ROPE),
    "gqa3-untied": (6, 2, False, DEFAULT_ROPE),
    "gqa4-tied-llama3": (8, 2, True, LLAMA3_ROPE),
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def pair(request, tmp_path):
    """transformers' model and ours, loaded from the folder that theirs was saved in."""
    heads, kv_heads, tied, rope = request.param
    torch.manual_seed(heads)
    config = LlamaConfig(
        vocab_size=256, hidden_size=heads * 16, intermediate_size=96, num_hidden_layers=3, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=16, max_position_embeddings=512, tie_word_embeddings=tied,
        rope_parameters=rope, eos_token_id=None, bos_token_id=None, pad_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return theirs, load_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))


def all_logits(loaded, ids, cache, chunks):
    """Logits of every position, the prompt run in chunks."""
    rows, start = [], 0
    with torch.inference_mode():
        for size in chunks:
            new = torch.tensor(ids[start : start + size])
            rows.append(loaded.model.compute_logits(loaded.model(new, torch.arange(start, start + size), cache)))
            cache.num_cached += size
            start += size
    return torch.cat(rows)


@pytest.mark.parametrize("chunks", [(100,), (1,) * 100, (37, 1, 1, 61)], ids=["whole", "one-by-one", "chunked"])
def test_logits_equal_transformers(pair, chunks):
    theirs, ours = pair
    ids = torch.randint(0, 256, (100,)).tolist()
    cache = ContiguousCache(ours.config, 100, torch.float32, ours.device)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert (all_logits(ours, ids, cache, chunks) - expected).abs().max() < 1e-4


def test_logits_without_a_cache_equal_transformers(pair):
    theirs, ours = pair
    ids = torch.randint(0, 256, (100,)).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert (all_logits(ours, ids, NoCache(), (100,)) - expected).abs().max() < 1e-4


def greedy_of_transformers(model, ids, num_tokens):
    tensor = torch.tensor([ids])
    model.generation_config.eos_token_id = None
    out = model.generate(tensor, attention_mask=torch.ones_like(tensor), do_sample=False, max_new_tokens=num_tokens)
    return tuple(out[0, len(ids) :].tolist())


@pytest.mark.parametrize("cache", ["none", "contiguous", "growing"])
def test_64_greedy_tokens_equal_transformers(pair, cache):
    theirs, ours = pair
    ids = torch.randint(0, 256, (20,)).tolist()
    (done,) = Engine(ours, cache=cache).generate(ids, SamplingParams(max_new_tokens=64))
    assert done.token_ids == greedy_of_transformers(theirs, ids, 64)


@pytest.fixture(scope="module")
def smollm2():
    """The real trained model, ours and transformers', from one folder."""
    from nanoserve.catalog import fetch_smollm2

    try:
        folder = fetch_smollm2()
    except FetchError as error:
        pytest.skip(str(error))
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return theirs, load_model(EngineConfig(model="smollm2-135m", device="cpu", dtype="float32"))


@pytest.mark.slow
def test_real_weights_give_real_text_and_transformers_tokens(smollm2):
    theirs, ours = smollm2
    ids = ours.tokenizer.encode("The capital of France is")
    done = Engine(ours).generate("The capital of France is", SamplingParams(max_new_tokens=32, ignore_eos=True))[0]
    assert done.text.startswith(" Paris.")
    assert done.token_ids == greedy_of_transformers(theirs, ids, 32)


def test_real_weights_give_transformers_logits(smollm2):
    theirs, ours = smollm2
    ids = ours.tokenizer.encode("Measure twice, cut once, and write down what you measured. " * 8)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert (all_logits(ours, ids, NoCache(), (len(ids),)) - expected).abs().max() < 1e-4


def test_the_slowest_llama3_frequency_is_divided_by_exactly_the_factor():
    plain = config_like_tiny(head_dim=64, rope_theta=500_000.0)
    scaling = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=8192)
    scaled = config_like_tiny(head_dim=64, rope_theta=500_000.0, rope_scaling=scaling)
    before, after = (rope_frequencies(config, torch.device("cpu")) for config in (plain, scaled))
    assert after[-1] * 32 == before[-1]
    assert after[0] == before[0]
    assert bool((after[1:] < after[:-1]).all())


def test_kv_bytes_by_formula_equal_the_tensors_own():
    config = config_like_tiny(num_layers=3, num_kv_heads=2, num_heads=4)
    cache = ContiguousCache(config, 10, torch.float16, torch.device("cpu"))
    assert cache.num_bytes == 10 * config.kv_bytes_per_token(2) == 10 * 2 * 3 * 2 * 4 * 2


def test_a_cache_that_is_full_says_so():
    cache = ContiguousCache(config_like_tiny(), 2, torch.float32, torch.device("cpu"))
    keys = torch.zeros(3, 1, 4)
    with pytest.raises(AssertionError, match="position 2 is outside a cache of 2 positions"):
        next(cache.extend(0, keys, keys))


def test_parameters_carry_hugging_face_names(pair):
    theirs, ours = pair
    assert set(ours.model.state_dict()) == set(theirs.state_dict()) - (
        {"lm_head.weight"} if ours.config.tie_embeddings else set()
    )
    assert isinstance(ours.model, Llama)
