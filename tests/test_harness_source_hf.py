"""transformers' generate as a stream: the tokens that it gives when called directly, one pull at a time."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.sources.huggingface import hf_stream
from benchmarks.harness.timing import Emission, measure_stream
from nanoserve import Engine, EngineConfig, SamplingParams
from nanoserve.weights import load_model

VOCAB_SIZE = 256
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, rope_parameters=ROPE, initializer_range=0.2,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def set_eos(llama, monkeypatch):
    return lambda ids: monkeypatch.setattr(llama.generation_config, "eos_token_id", ids)


@pytest.fixture
def num_forwards(llama):
    """A list that grows by one with each call of the model."""
    calls = []
    hook = llama.register_forward_pre_hook(lambda *args: calls.append(args))
    yield lambda: len(calls)
    hook.remove()


def num_workers():
    return [thread.name for thread in threading.enumerate()].count("hf_stream")


@pytest.fixture(autouse=True)
def no_worker_is_left():
    yield
    assert num_workers() == 0


def direct(model, num_tokens):
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, eos_token_id=None
    )
    return tuple(out[0, len(PROMPT) :].tolist())


def ids_of(emissions):
    return tuple(token_id for emission in emissions for token_id in emission.token_ids)


def test_the_tokens_are_those_of_generate_and_of_nanoserve(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    engine = Engine(load_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32")))
    (done,) = engine.generate(PROMPT, SamplingParams(max_new_tokens=48, ignore_eos=True))
    streamed = ids_of(hf_stream(llama, PROMPT, 48))
    assert len(set(streamed)) > 4
    assert streamed == direct(llama, 48) == done.token_ids


def test_what_a_stream_says(llama):
    first, second, third = direct(llama, 3)
    assert list(hf_stream(llama, PROMPT, 3)) == [
        Emission(token_ids=(first,), num_cached=0, num_prefilled=len(PROMPT)),
        Emission(token_ids=(second,)),
        Emission(token_ids=(third,)),
        Emission(finish_reason="length"),
    ]


def test_it_can_be_measured(llama):
    ticks = iter(range(0, 10**9, 10**6))
    run = measure_stream(hf_stream(llama, PROMPT, 5), SimpleNamespace(now_ns=lambda: next(ticks)))
    assert (run.ttft_s, run.itls_s, run.finish_reason) == (0.001, (0.001,) * 4, "length")
    assert (run.token_ids, run.num_cached, run.num_prefilled) == (direct(llama, 5), 0, len(PROMPT))


def test_eos_is_ignored_and_the_count_is_exact(llama, set_eos):
    """Every token is an EOS here; they are the tokens of a model that knows none."""
    set_eos(list(range(VOCAB_SIZE)))
    assert ids_of(hf_stream(llama, PROMPT, 16)) == direct(llama, 16)


@pytest.mark.parametrize(("num_budget", "reason"), [(2, "length"), (3, "stop"), (9, "stop")])
@pytest.mark.parametrize("as_argument", [True, False])
def test_eos_ends_the_stream_where_it_is_not_ignored(llama, set_eos, num_budget, reason, as_argument):
    *_, eos = expected = direct(llama, 3)
    assert eos not in expected[:-1]
    set_eos(None if as_argument else eos)
    options = {"eos_token_id": [eos]} if as_argument else {}
    emissions = list(hf_stream(llama, PROMPT, num_budget, ignore_eos=False, **options))
    assert ids_of(emissions) == expected[:num_budget]
    assert emissions[-1].finish_reason == reason


def test_tokens_that_one_step_yields_arrive_together(llama):
    """Guesses from the prompt that the model confirms: several tokens a step, the same ones."""
    emissions = list(hf_stream(llama, PROMPT, 48, prompt_lookup_num_tokens=3))
    assert max(emission.num_tokens for emission in emissions) > 1
    assert ids_of(emissions) == direct(llama, 48)


def test_generate_rests_between_two_pulls(llama, num_forwards):
    stream = hf_stream(llama, PROMPT, 8)
    for num_pulled in (1, 2, 3):
        next(stream)
        time.sleep(0.02)
        assert num_forwards() == num_pulled
    stream.close()


def test_nothing_starts_before_the_first_pull(llama, num_forwards):
    stream = hf_stream(llama, PROMPT, 8)
    assert (num_forwards(), num_workers()) == (0, 0)
    stream.close()


def test_closing_early_stops_generation_without_another_step(llama, num_forwards):
    stream = hf_stream(llama, PROMPT, 200)
    next(stream), next(stream)
    assert num_workers() == 1
    stream.close()
    assert (num_forwards(), num_workers()) == (2, 0)


def test_what_the_consumer_raises_stops_generation_too(llama, num_forwards):
    def pull():
        for _ in hf_stream(llama, PROMPT, 200):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull()
    assert num_forwards() == 1


def test_a_failure_inside_generate_comes_out_of_the_pull(llama):
    def fail(input_ids, scores):
        if input_ids.shape[1] == len(PROMPT) + 2:
            raise RuntimeError("out of memory")
        return scores

    stream = hf_stream(llama, PROMPT, 8, logits_processor=[fail])
    assert (next(stream).num_tokens, next(stream).num_tokens) == (1, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        next(stream)


def test_a_failure_before_the_first_token_comes_out_of_the_first_pull(llama):
    with pytest.raises(ValueError, match="max_new_tokens"):
        next(hf_stream(llama, PROMPT, 0))


@pytest.mark.parametrize("name", ["attention_mask", "past_key_values", "cache", "streamer", "max_new_tokens"])
def test_options_that_would_falsify_the_counts_are_refused(llama, name):
    with pytest.raises((InstrumentError, TypeError), match=name):
        hf_stream(llama, PROMPT, 4, **{name: 1})


class Recorder:
    """A model whose generate notes what it was given."""

    device = torch.device("cpu")
    generation_config = SimpleNamespace(eos_token_id=7)

    def generate(self, input_ids, *, streamer, **options):
        self.given = {"input_ids": input_ids} | options
        streamer.put(input_ids)
        streamer.put(torch.tensor([5]))
        streamer.end()


def test_what_generate_is_given():
    model = Recorder()
    list(hf_stream(model, (1, 2), 1, cache_implementation="static"))
    given = {name: value.tolist() if torch.is_tensor(value) else value for name, value in model.given.items()}
    assert given == {
        "input_ids": [[1, 2]], "attention_mask": [[1, 1]], "do_sample": False, "max_new_tokens": 1,
        "eos_token_id": None, "cache_implementation": "static",
    }  # fmt: skip
