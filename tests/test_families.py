"""Each family against transformers' own class on random small shapes: through a folder, every position, every cache."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness.sources.nanoserve import TWIN, NanoserveSubject
from nanoserve import Engine, SamplingParams
from nanoserve.cache.contiguous import ContiguousCache
from nanoserve.cache.kv import NoCache
from nanoserve.catalog import SHAPES
from nanoserve.config import FAMILIES, EngineConfig, ModelConfig
from nanoserve.errors import ConfigError, RequestError, WeightsError
from nanoserve.hf_config import to_hf_config
from nanoserve.models.families import CLASSES, build_model
from nanoserve.models.gpt2 import GPT2
from nanoserve.models.llama import SelfAttention
from nanoserve.models.qwen2 import Qwen2
from nanoserve.models.qwen3 import NormedAttention
from nanoserve.weights import load_model

IDS = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(3)).tolist()
CLOSE = 3e-5
WINDOW = 48  # of mistral's shapes: shorter than their positions

# heads, KV heads, head size, layers, tied. A head is as wide as it likes where the family says so.
SHAPES_OF = {
    "llama": [(4, 2, 8, 2, False)],
    "mistral": [(4, 1, 16, 2, False), (6, 3, 8, 1, True)],
    "qwen2": [(4, 2, 8, 2, True), (3, 1, 16, 3, False)],
    "qwen3": [(4, 2, 24, 2, True), (2, 2, 16, 3, False)],
    "gpt2": [(4, 4, 8, 2, True), (3, 3, 16, 3, False)],
}
CASES = [(family, *shape) for family, shapes in SHAPES_OF.items() for shape in shapes]


def shape_of(family, heads, kv_heads, head_dim, layers, tied):  # noqa: PLR0917 - a line of the table
    hidden = heads * head_dim if family == "gpt2" else heads * 8
    return ModelConfig(
        family=family, vocab_size=96, hidden_size=hidden, intermediate_size=hidden + 10, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, max_context_tokens=WINDOW, tie_embeddings=tied,
        norm_eps=1e-6, rope_theta=5000.0,
    )  # fmt: skip


def transformers_model(config):
    """transformers' model of a shape, each of its numbers drawn, biases and norms among them."""
    written = to_hf_config(config)
    if config.family == "mistral":
        written |= {"sliding_window": WINDOW, "max_position_embeddings": 10 * WINDOW}
    torch.manual_seed(config.num_heads)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written)).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.3)
    return model


def load(folder):
    return load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32"))


def save(theirs, folder):
    theirs.save_pretrained(folder)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def pair(request, tmp_path_factory):
    """transformers' model and ours, loaded from the folder that theirs was saved in."""
    folder = tmp_path_factory.mktemp("model")
    theirs = transformers_model(shape_of(*request.param))
    save(theirs, folder)
    return theirs, load(folder)


@torch.inference_mode()
def logits_of(loaded, cache, *chunks, ids=IDS):
    """Logits of every position, the ids run in chunks."""
    rows, start = [], 0
    for size in chunks:
        positions = torch.arange(start, start + size)
        rows.append(loaded.model.compute_logits(loaded.model(torch.tensor(ids)[positions], positions, cache)))
        cache.num_cached = start = start + size
    return torch.cat(rows)


@torch.inference_mode()
def logits_of_transformers(theirs, ids=IDS):
    return theirs(torch.tensor([ids])).logits[0]


def worst_difference(found, expected):
    """The largest, as a share of how much the logits vary."""
    return ((found - expected).abs().max() / expected.std()).item()


def test_every_family_has_a_class():
    assert tuple(CLASSES) == FAMILIES == tuple(SHAPES_OF)
    with pytest.raises(ConfigError, match="unknown family 'gemma2'; choose one of: llama, mistral, qwen2, qwen3, gpt2"):
        shape_of("gemma2", 2, 2, 8, 1, True)


def test_all_logits_equal_transformers(pair):
    theirs, ours = pair
    assert worst_difference(logits_of(ours, NoCache(), len(IDS)), logits_of_transformers(theirs)) < CLOSE


def test_a_prompt_in_chunks_and_single_tokens_gives_the_same_logits(pair):
    _, ours = pair
    dense = logits_of(ours, NoCache(), len(IDS))
    cache = ContiguousCache(ours.config, len(IDS), torch.float32, ours.device)
    assert worst_difference(logits_of(ours, cache, 17, 1, 1, 20, 1), dense) < CLOSE


def test_greedy_tokens_equal_transformers_in_every_cache_to_the_end_of_the_context(pair):
    """What transformers would say next after each token of ours, in one forward, is what ours goes on with."""
    theirs, ours = pair
    prompts, params = [IDS, IDS[5:8]], SamplingParams(max_new_tokens=WINDOW - len(IDS), ignore_eos=True)
    for options in ({"cache": "paged", "max_step_tokens": 17, "max_running": 2}, {"cache": "contiguous"}):
        for prompt, done in zip(prompts, Engine(ours, **options).generate(prompts, params), strict=True):
            said = logits_of_transformers(theirs, [*prompt, *done.token_ids]).argmax(-1)
            assert list(done.token_ids) == said[len(prompt) - 1 : -1].tolist()


def test_parameters_are_those_of_the_checkpoint_and_lie_in_rows(pair):
    theirs, ours = pair
    parameters = dict(ours.model.named_parameters())
    assert set(parameters) == {name for name, _ in theirs.named_parameters()}
    assert all(weight.is_contiguous() for weight in parameters.values())
    assert sum(map(torch.numel, parameters.values())) == sum(map(torch.numel, theirs.parameters()))


def test_transformers_runs_on_our_weights(pair):
    """The twin: nothing is copied, however transformers turns its matrices."""
    _, ours = pair
    subject = NanoserveSubject(ours, "pair")
    of_theirs, of_ours = (
        [token for each in subject.stream(IDS[:20], 6, **arm) for token in each.token_ids]
        for arm in (TWIN, {"cache": "contiguous"})
    )
    assert of_theirs == of_ours
    shared = {weight.data_ptr() for weight in ours.model.parameters()}
    assert {weight.data_ptr() for weight in subject._twin.parameters()} == shared


# What these comparisons see.


def without_bias(monkeypatch):
    monkeypatch.setattr(Qwen2, "attention", staticmethod(SelfAttention))
    monkeypatch.setattr(
        Qwen2, "adopt", staticmethod(lambda name, tensor: {} if "_proj.bias" in name else {name: tensor})
    )


def without_head_norms(monkeypatch):
    monkeypatch.setattr(NormedAttention, "place", SelfAttention.place)


def one_position_late(monkeypatch):
    right = GPT2.forward
    monkeypatch.setattr(GPT2, "forward", lambda self, ids, positions, cache: right(self, ids, positions + 1, cache))


def not_turned(monkeypatch):
    """Only a square matrix fits either way."""
    monkeypatch.setattr("nanoserve.models.gpt2._TURNED", ("c_attn.weight", "c_fc.weight", "mlp.c_proj.weight"))


def keys_first(monkeypatch):
    right = torch.Tensor.chunk
    monkeypatch.setattr(
        torch.Tensor, "chunk", lambda self, num, dim: [right(self, num, dim=dim)[i] for i in ((1, 0, 2)[:num])]
    )


def exact_gelu(monkeypatch):
    right = torch.nn.functional.gelu
    monkeypatch.setattr("torch.nn.functional.gelu", lambda inputs, approximate: right(inputs))


FAULTS = [
    ("qwen2", without_bias),
    ("qwen3", without_head_norms),
    *(("gpt2", fault) for fault in (one_position_late, not_turned, keys_first, exact_gelu)),
]


@pytest.mark.parametrize(("family", "fault"), FAULTS, ids=lambda part: getattr(part, "__name__", part))
def test_a_planted_fault_is_seen(tmp_path, monkeypatch, family, fault):
    theirs = transformers_model(shape_of(family, *SHAPES_OF[family][0]))
    expected = logits_of_transformers(theirs)
    save(theirs, tmp_path)
    fault(monkeypatch)
    assert worst_difference(logits_of(load(tmp_path), NoCache(), len(IDS)), expected) > 5 * CLOSE


# Checkpoints as they are found.


def test_gpt2_as_openai_left_it_reads_like_transformers_own(tmp_path):
    """Without the prefix, and with what was kept of the mask."""
    theirs = transformers_model(shape_of("gpt2", *SHAPES_OF["gpt2"][0]))
    save(theirs, tmp_path)
    path, masks = (
        tmp_path / "model.safetensors",
        {"attn.bias": torch.ones(1, 1, 4, 4), "attn.masked_bias": -torch.ones(1)},
    )
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    assert "h.0.attn.c_attn.weight" in tensors
    save_file(tensors | {f"h.1.{name}": mask for name, mask in masks.items()}, path)
    assert worst_difference(logits_of(load(tmp_path), NoCache(), len(IDS)), logits_of_transformers(theirs)) < CLOSE


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("transformer.h.1.attn.c_attn.bias"), "lacks the tensor transformer.h.1.attn.c_attn.bias"),
        (lambda t: t.update({"h.0.crossattention.q_attn.bias": torch.ones(1)}), "unexpected tensor transformer.h.0.cr"),
        (lambda t: t.update({"transformer.wpe.weight": torch.ones(1, 2, 3)}), "wpe.weight has shape [1, 2, 3]"),
        (lambda t: t.update({"h.0.mlp.c_fc.weight": torch.ones(5, 7)}), "c_fc.weight has shape [7, 5], the model"),
    ],
)  # fmt: skip
def test_a_gpt2_that_does_not_fit_is_refused(tmp_path, edit, words):
    save(transformers_model(shape_of("gpt2", *SHAPES_OF["gpt2"][0])), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    assert words in str(caught.value)


def test_mistral_refuses_what_does_not_fit_into_its_window(tmp_path):
    """Behind it transformers looks at fewer positions: attention to all of them would be another model."""
    theirs = transformers_model(shape_of("mistral", *SHAPES_OF["mistral"][0]))
    save(theirs, tmp_path)
    ours = load(tmp_path)
    with pytest.raises(RequestError, match="48 tokens"):
        Engine(ours).generate(IDS, SamplingParams(max_new_tokens=WINDOW - len(IDS) + 1))
    longer = (IDS * 2)[: WINDOW + 2]
    found = logits_of(ours, NoCache(), len(longer), ids=longer)
    expected = logits_of_transformers(theirs, longer)
    assert worst_difference(found[:WINDOW], expected[:WINDOW]) < CLOSE
    assert worst_difference(found[WINDOW:], expected[WINDOW:]) > 5 * CLOSE


def test_random_biases_are_zero_and_norms_one(monkeypatch):
    monkeypatch.setitem(SHAPES, "small gpt2", dataclasses.replace(shape_of("gpt2", 4, 4, 8, 2, True), vocab_size=300))
    loaded = load("small gpt2")
    flat = {name: set(w.tolist()) for name, w in loaded.model.named_parameters() if w.ndim == 1}
    assert {values.pop() for name, values in flat.items() if name.endswith("bias")} == {0.0}
    assert {values.pop() for name, values in flat.items() if name.endswith("weight")} == {1.0}
    assert not any(flat.values())


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5-0.5b", "qwen3-0.6b"])
def test_shapes_are_built_as_transformers_builds_them(name):
    with torch.device("meta"):
        ours = build_model(SHAPES[name])
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf_config(SHAPES[name])))
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()}
