"""The compiled CPU kernels against plain torch: the same numbers in any batch, and what happens without them."""

import dataclasses
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.harness.counters import count_work
from nanoserve import Engine, EngineConfig, SamplingParams
from nanoserve.cache.contiguous import ContiguousCache
from nanoserve.cache.kv import ALL_ROWS, InBlocks, NoCache, Stored
from nanoserve.catalog import SHAPES, cache_dir
from nanoserve.compute import choose_ops, prepare
from nanoserve.config import FAMILIES
from nanoserve.cpu import build
from nanoserve.errors import ConfigError, FetchError, KernelError, ModelError
from nanoserve.models.families import build_model
from nanoserve.ops import TORCH
from nanoserve.tokenizer import ByteTokenizer
from nanoserve.weights import LoadedModel, load_model

BF16_STEP = 2**-8


def has_kernels():
    try:
        build.load_library(cache_dir() / "kernels")
    except KernelError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(has_kernels()), reason=has_kernels() or "kernels are here")


def make_ops(**changes):
    ops, notes = choose_ops(EngineConfig(**changes), SHAPES["tiny"], torch.device("cpu"), torch.bfloat16)
    assert ops is not TORCH
    assert not notes
    return ops


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def matrix(num_inputs, num_outputs, *, bias=False):
    linear = nn.Linear(num_inputs, num_outputs, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight.copy_(numbers(num_outputs, num_inputs, seed=num_outputs))
    return linear


def assert_close(found, wanted):
    """Within two roundings of bfloat16, of the largest number there is."""
    worst = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert worst <= 2 * BF16_STEP, f"{worst:.5f}"


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 61])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 32), (30, 70), (2050, 33)])
@torch.inference_mode()
def test_a_product_is_torchs(rows, num_inputs, num_outputs):
    inputs, several = numbers(rows, num_inputs), [matrix(num_inputs, num) for num in (num_outputs, 1, 32)]
    wanted = [F.linear(inputs.float(), each.weight.float()) for each in several]
    for found, right in zip(make_ops().project(inputs, several), wanted, strict=True):
        assert_close(found, right)
    assert not any(each.weight.numel() for each in several)


@torch.inference_mode()
def test_biases_and_residuals_are_added():
    inputs, residual, linear = numbers(3, 64), numbers(3, 40, seed=1), matrix(64, 40, bias=True)
    wanted = residual.float() + F.linear(inputs.float(), linear.weight.float(), linear.bias.float())
    assert_close(make_ops().add_projection(residual, inputs, linear), wanted)


@torch.inference_mode()
def test_an_int8_product_is_that_of_the_rounded_matrix():
    inputs, linear = numbers(13, 576), matrix(576, 70)
    weight, ops = linear.weight.clone(), make_ops(quantize="int8")
    (found,) = ops.project(inputs, (linear,))
    rounded = ops.tensors(nn.Sequential(linear))["0.weight"]
    assert_close(found, F.linear(inputs.float(), rounded.float()))
    assert ((rounded.float() - weight.float()).abs() <= weight.float().abs().amax(1)[:, None] / 127).all()


@torch.inference_mode()
def test_rows_are_norms_rotations_and_gates():
    ops, hidden, norm = make_ops(), numbers(5, 48), nn.RMSNorm(48, eps=1e-5, dtype=torch.bfloat16)
    norm.weight.copy_(numbers(48, seed=2))
    assert_close(ops.norm(hidden, norm), TORCH.norm(hidden, norm))
    gates, ups = numbers(5, 2, 300, seed=3).unbind(1)
    assert_close(ops.gate(gates, ups), TORCH.gate(gates, ups))
    assert_close(ops.gelu(hidden), TORCH.gelu(hidden))
    layer_norm = nn.LayerNorm(48, dtype=torch.bfloat16)
    layer_norm.weight.copy_(norm.weight)
    layer_norm.bias.copy_(numbers(48, seed=4))
    assert_close(ops.layer_norm(hidden, layer_norm), TORCH.layer_norm(hidden, layer_norm))
    frequencies, positions = 10000.0 ** (-torch.arange(8) / 8), torch.tensor([0, 1, 77, 4095, 131071])
    heads = hidden.view(5, 3, 16)
    right = TORCH.rotate(heads, TORCH.rope(frequencies, positions, torch.float32))
    assert_close(ops.rotate(heads.clone(), ops.rope(frequencies, positions, torch.bfloat16)), right)


@pytest.mark.parametrize("largest", [400, 1e30])
@torch.inference_mode()
def test_an_activation_of_a_number_far_from_zero_is_a_number(largest):
    """Where exp is infinite, its reciprocal is 0, in vectors and in what is left over behind them."""
    ops, inputs = make_ops(), torch.linspace(-largest, largest, 61).bfloat16()[None]
    assert_close(ops.gate(inputs, torch.ones_like(inputs)), TORCH.gate(inputs.float(), torch.ones_like(inputs)))
    assert_close(ops.gelu(inputs), TORCH.gelu(inputs.double()))


@pytest.mark.parametrize("quantize", ["none", "int8"])
@torch.inference_mode()
def test_no_rows_have_no_product(quantize):
    (found,) = make_ops(quantize=quantize).project(numbers(0, 64), [matrix(64, 40)])
    assert found.shape == (0, 40)


def dense(queries, keys, values):
    """The obvious way, in float32: the last rows of a causal attention. Keys and values [kv_heads, context, dim]."""
    group, num_new, context = queries.shape[1] // keys.shape[0], queries.shape[0], keys.shape[1]
    keys, values = (each.float().repeat_interleave(group, 0) for each in (keys, values))
    scores = torch.einsum("qhd,hkd->hqk", queries.float(), keys) / queries.shape[2] ** 0.5
    hidden = torch.ones(num_new, context, dtype=torch.bool).triu(context - num_new + 1)
    return torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


@pytest.mark.parametrize(("num_new", "context"), [(1, 1), (1, 70), (9, 9), (40, 65), (130, 131)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (7, 1, 80)])
@torch.inference_mode()
def test_attention_is_torchs_for_a_request_in_one_piece(num_new, context, heads, kv_heads, dim):
    queries, stored = numbers(num_new, heads, dim), numbers(2, context, kv_heads, dim, seed=1).transpose(1, 2)
    found = make_ops().attend(queries, Stored(ALL_ROWS, stored[0][None], stored[1][None]))
    assert_close(found, dense(queries, *stored))


@pytest.mark.parametrize("block_size", [1, 2, 16])
@torch.inference_mode()
def test_attention_follows_block_tables_and_sees_nothing_else(block_size):
    """Blocks in random order; what no request holds is NaN."""
    contexts, num_new, heads, kv_heads, dim = [5, 33, 64], [1, 7, 64], 6, 2, 32
    longest = -(-max(contexts) // block_size)
    order = torch.randperm(3 * longest, generator=torch.Generator().manual_seed(0)).view(3, longest)
    pool = torch.full((2, kv_heads, 3 * longest * block_size, dim), torch.nan).bfloat16()
    requests = [numbers(2, kv_heads, context, dim, seed=context) for context in contexts]
    for table, request in zip(order, requests, strict=True):
        positions = torch.arange(request.shape[2])
        pool[:, :, table[positions // block_size] * block_size + positions % block_size] = request
    starts = torch.tensor([0, *num_new]).cumsum(0)
    queries = numbers(int(starts[-1]), heads, dim)
    stored = InBlocks(
        ALL_ROWS, pool[0], pool[1], order.int(), torch.tensor(contexts).int(), block_size, "native", starts.int()
    )
    found = make_ops().attend(queries, stored)
    for place, request in enumerate(requests):
        rows = slice(int(starts[place]), int(starts[place + 1]))
        assert_close(found[rows], dense(queries[rows], *request))


def load(model="tiny", **changes) -> LoadedModel:
    return load_model(EngineConfig(model=model, device="cpu", dtype="bfloat16", **changes))


@pytest.fixture(scope="module", name="loaded")
def loaded_once():
    return load()


@pytest.fixture(scope="module", name="varied")
@torch.inference_mode()
def varied_once():
    """A model whose answers depend on everything that it has read: its weights are ten times as large."""
    config, ops, generator = SHAPES["tiny"], make_ops(), torch.Generator().manual_seed(0)
    model = build_model(config, ops).bfloat16().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(0, 0.2, generator=generator)
    prepare(model, ops, torch.device("cpu"))
    tokenizer = ByteTokenizer(config.vocab_size)
    return LoadedModel(model, tokenizer, config, "varied", torch.device("cpu"), torch.bfloat16, ops=ops)


def small_shape(family):
    """A shape of its own for each family that random weights can be drawn for."""
    same = SHAPES["tiny"].num_heads if family == "gpt2" else SHAPES["tiny"].num_kv_heads
    return dataclasses.replace(SHAPES["tiny"], family=family, num_kv_heads=same)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_model_of_each_family_is_no_further_from_float32_than_torch_is(family):
    config = small_shape(family)
    torch.manual_seed(0)
    plain = build_model(config).bfloat16().requires_grad_(False)
    for name, weight in plain.named_parameters():
        weight.normal_(0, 0.2 if weight.ndim > 1 else 0.1)
        if weight.ndim == 1 and "bias" not in name:
            weight.add_(1)
    native = build_model(config, make_ops()).bfloat16().requires_grad_(False)
    native.load_state_dict(plain.state_dict())
    ids, positions = torch.arange(40) % config.vocab_size, torch.arange(40)
    usual, found = (each.compute_logits(each(ids, positions, NoCache())) for each in (plain, native))
    exact = plain.float().compute_logits(plain(ids, positions, NoCache()))
    assert (found - exact).square().mean() <= 1.2 * (usual.float() - exact).square().mean()


@torch.inference_mode()
def test_a_row_does_not_depend_on_what_stands_beside_it(loaded):
    """To the last bit: alone, in a batch, and however a prompt is cut."""
    ids, positions = torch.arange(97) % 512, torch.arange(97)

    def run(*cuts):
        cache = ContiguousCache(loaded.config, 97, torch.bfloat16, torch.device("cpu"))
        rows = []
        for start, stop in zip((0, *cuts), (*cuts, 97), strict=True):
            cache.num_cached = start
            rows.append(loaded.model(ids[start:stop], positions[start:stop], cache).clone())
        return torch.cat(rows)

    whole = run()
    assert torch.equal(run(1, 2, 50), whole)
    assert torch.equal(run(40), whole)
    each = torch.cat([loaded.model.compute_logits(row[None]).clone() for row in whole])
    assert torch.equal(each, loaded.model.compute_logits(whole))


def test_a_request_has_the_same_tokens_alone_in_a_batch_and_after_a_preemption(varied):
    prompts = [[number, *range(length)] for number, length in enumerate((3, 40, 17, 90, 5))]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    alone = [Engine(varied, num_blocks=64).generate([prompt], params)[0].token_ids for prompt in prompts]
    tight = Engine(varied, num_blocks=12, max_step_tokens=33)
    assert [each.token_ids for each in tight.generate(prompts, params)] == alone
    assert tight.counts.num_preemptions


def test_weights_come_out_of_their_panels_as_they_went_in():
    plain, native = load(kernels="torch"), load()
    assert native.is_native
    wanted, found = plain.model.state_dict(), native.ops.tensors(native.model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


def test_no_matrix_is_in_memory_twice():
    assert sum(weight.nbytes for weight in load().model.parameters() if weight.ndim > 1) == 0


def test_int8_computes_the_same_with_kernels_and_without(loaded):
    prompts, params = [[7, *range(30)], [9]], SamplingParams(max_new_tokens=12, ignore_eos=True)
    kernels, plain = load(quantize="int8"), load(quantize="int8", kernels="torch")
    assert kernels.is_native
    assert not plain.is_native
    found, wanted, original = (each.ops.tensors(each.model) for each in (kernels, plain, loaded))
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    assert not torch.equal(found["model.embed_tokens.weight"], original["model.embed_tokens.weight"])
    answers = [[each.token_ids for each in Engine(of).generate(prompts, params)] for of in (kernels, plain)]
    assert answers[0] == answers[1]


def perplexity(loaded, ids):
    """Of each token after the first, given those before it."""
    with torch.inference_mode():
        hidden = loaded.model(torch.tensor(ids), torch.arange(len(ids)), NoCache())
        logits = loaded.model.compute_logits(hidden[:-1])
        return F.cross_entropy(logits.float(), torch.tensor(ids[1:])).exp().item()


@pytest.mark.slow
def test_int8_costs_less_than_a_hundredth_of_perplexity():
    """On the trained model, and on some hundred tokens of English."""
    try:
        original, rounded = load("smollm2-135m"), load("smollm2-135m", quantize="int8")
    except FetchError as error:
        pytest.skip(str(error))
    ids = original.tokenizer.encode((Path(__file__).parent / "prose.txt").read_text("utf-8"))
    right, found = perplexity(original, ids), perplexity(rounded, ids)
    assert len(ids) > 450
    assert 1 < found < 1.01 * right, f"{found:.3f} in 8 bits, {right:.3f} in bfloat16"


@pytest.mark.parametrize("cache", ["contiguous", "growing", "none"])
def test_requests_with_caches_of_their_own_have_the_same_tokens_together_and_alone(varied, cache):
    prompts, params = [[7, *range(30)], [9], [1, 2, 3]], SamplingParams(max_new_tokens=9, ignore_eos=True)
    right = [Engine(varied).generate(prompt, params)[0].token_ids for prompt in prompts]
    assert [each.token_ids for each in Engine(varied, cache=cache).generate(prompts, params)] == right
    assert [Engine(varied, cache=cache).generate(prompt, params)[0].token_ids for prompt in prompts] == right
    assert [each.token_ids for each in Engine(varied, graphs="off").generate(prompts, params)] == right


@pytest.mark.parametrize("options", [{}, {"graphs": "off"}, {"cache": "contiguous"}])
def test_whoever_watches_sees_every_product_of_every_step(loaded, options):
    """Of a prompt of 9 positions, and of one behind it, with the head's one row each."""
    engine, shape = Engine(loaded, max_running=1, **options), loaded.config
    engine.warm_up()
    engine.add_request([*range(9)], SamplingParams(max_new_tokens=4, ignore_eos=True))
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size
    for num_new, context in ((9, 9), (1, 10)):
        _, work = count_work(engine.step, warmups=0)
        pairs = 4 * num_new * context * shape.num_heads * shape.head_dim
        products = shape.num_layers * (2 * num_new * layer + pairs) + 2 * shape.vocab_size * shape.hidden_size
        assert work.flops == products


@torch.inference_mode()
def test_what_was_recorded_runs_again_on_new_inputs(loaded):
    ids, positions = torch.tensor([3]), torch.tensor([0])

    def run():
        return loaded.model.compute_logits(loaded.model(ids, positions, NoCache()))

    replay = loaded.ops.record(run)
    ids.fill_(200)
    positions.fill_(9)
    found = replay().clone()
    assert torch.equal(found, run())
    ids.fill_(3)
    assert not torch.equal(found, run())


@pytest.mark.slow
def test_the_first_step_that_is_recorded_does_not_import_a_compiler():
    code = (
        "import sys; from nanoserve import Engine; Engine.load('tiny', dtype='bfloat16', device='cpu').generate('Hi'); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_are_for_bfloat16_on_a_cpu():
    with pytest.raises(KernelError, match="'native' are for bfloat16 on a CPU, not for torch"):
        load_model(EngineConfig(model="tiny", device="cpu", dtype="float32", kernels="native"))
    assert not load(kernels="torch").is_native
    with pytest.raises(ConfigError, match="'sdpa' is part of kernels 'torch'"):
        Engine(load(), attention="sdpa")


@pytest.mark.parametrize(
    ("planted", "value", "reason"),
    [
        ("_processor", lambda: "fpu sse2 avx512f", "does not multiply bfloat16"),
        ("_COMPILERS", ("no-compiler-of-this-name",), "no C[+][+] compiler is here"),
        ("_COMPILE", ("-c", "-no-such-flag"), "could not compile the kernels: .*error"),
    ],
)
def test_without_kernels_torch_computes_and_says_why(monkeypatch, tmp_path, planted, value, reason):
    monkeypatch.setattr(build, planted, value)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    build.load_library.cache_clear()
    loaded = load()
    assert not loaded.is_native
    with pytest.raises(KernelError, match=reason) as raised:
        load(kernels="native")
    assert loaded.notes == (f"plain torch computes the model: {raised.value}",)
    assert not [*tmp_path.rglob("*.so"), *tmp_path.rglob("*.o")]
    build.load_library.cache_clear()


def test_kernels_that_were_asked_for_and_cannot_be_are_told_whatever_the_dtype(monkeypatch, tmp_path):
    """A file that is no program stands where the compiler is sought."""
    compiler = tmp_path / "g++"
    compiler.write_text("no program")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "_COMPILERS", (str(compiler),))
    build.load_library.cache_clear()
    with pytest.raises(KernelError, match=r"the compiler does not run: .*Exec format"):
        load_model(EngineConfig(model="tiny", device="cpu", kernels="native"))
    loaded = load_model(EngineConfig(model="tiny", device="cpu"))
    assert loaded.dtype == torch.bfloat16
    assert "the compiler does not run" in loaded.notes[0]
    build.load_library.cache_clear()


@pytest.mark.parametrize(
    ("odd", "number"),
    [({"intermediate_size": 127}, 127), ({"family": "gpt2", "head_dim": 5, "hidden_size": 20, "num_kv_heads": 4}, 5)],
)
def test_a_shape_with_an_odd_width_is_left_to_torch(odd, number):
    shape = dataclasses.replace(SHAPES["tiny"], **odd)
    ops, (note,) = choose_ops(EngineConfig(), shape, torch.device("cpu"), torch.bfloat16)
    assert (ops, note) == (TORCH, f"plain torch computes the model: compiled kernels need even widths, not {number}")


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_broken_weights_are_told_and_give_no_tokens(quantize, broken, num_tokens):
    """The kernels are compiled for finite numbers: what is not one has to come through all the same."""
    loaded = load(quantize=quantize)
    loaded.model.model.layers[1].post_attention_layernorm.weight[3] = broken
    with pytest.raises(ModelError, match="broken weights"):
        Engine(loaded).generate([5] * num_tokens)


def test_what_is_compiled_is_kept(monkeypatch, tmp_path):
    (made,) = (cache_dir() / "kernels").glob(build.load_library(cache_dir() / "kernels")._name.rpartition("/")[2])
    compiled = []

    def compile_(compiler, path):
        compiled.append(path)
        shutil.copy(made, path)

    monkeypatch.setattr(build, "_compile", compile_)
    for _ in range(2):
        build.load_library.cache_clear()
        build.load_library(tmp_path)
    assert compiled == [tmp_path / made.name]
    monkeypatch.setattr(build, "_version", lambda _: "another compiler")
    build.load_library.cache_clear()
    build.load_library(tmp_path)
    assert len({*compiled}) == 2


def test_an_installed_package_has_the_sources_of_its_kernels():
    root = Path(build.__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-data"]
    sources = {path.relative_to(root / "nanoserve") for path in (root / "nanoserve" / "cpu").glob("*.[ch]*")}
    assert {build._SOURCE.name, *build._PARTS} == {path.name for path in sources}
    assert all(any(path.match(pattern) for pattern in patterns["nanoserve"]) for path in sources)
