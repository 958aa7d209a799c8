"""Paged decode attention: the reference agrees with torch, and the Triton kernel with the reference.

Compiled where there is a GPU; elsewhere Triton's interpreter runs the same kernel in Python.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from nanoserve.errors import ConfigError
from nanoserve.paged_reference import paged_decode_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton", reason="needs Triton, which there is for Linux only")
assert DEVICE == "cuda" or not isinstance(triton.language.max, triton.JITFunction), (
    "something imported triton before TRITON_INTERPRET was set: it decides once, for all that it defines"
)

from nanoserve import paged_kernel  # noqa: E402
from nanoserve.paged_kernel import paged_decode  # noqa: E402

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def make(contexts, *, block_size=16, group=2, kv_heads=2, head_dim=64, dtype=torch.float32, garbage=None):
    """Arguments of `paged_decode`: blocks dealt at random from a pool in which all that no request sees is NaN.

    `garbage` fills the tables up; nobody's block, by default.
    """
    lengths = [-(-context // block_size) for context in contexts]
    nobodys, *blocks = torch.randperm(sum(lengths) + 1).tolist()
    tables = torch.full((len(contexts), max(lengths) + 1), nobodys if garbage is None else garbage, dtype=torch.int32)
    pool = torch.full((2, 2, kv_heads, (sum(lengths) + 1) * block_size, head_dim), torch.nan, dtype=dtype)
    for table, length, context in zip(tables, lengths, contexts, strict=True):
        table[:length] = torch.tensor([blocks.pop() for _ in range(length)])
        slots = (table[:length, None] * block_size + torch.arange(block_size)).flatten()[:context]
        pool[1, :, :, slots] = torch.randn(2, kv_heads, context, head_dim).to(dtype)
    pool = pool.to(DEVICE)
    return {
        "queries": torch.randn(len(contexts), kv_heads * group, head_dim).to(DEVICE, dtype),
        "keys": pool[1, 0],
        "values": pool[1, 1],
        "tables": tables.to(DEVICE),
        "contexts": torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        "block_size": block_size,
    }


def assert_agrees(args, tolerance=1e-5, **options):
    out, expected = paged_decode(**args, **options), paged_decode_reference(**args)
    assert (out.dtype, out.is_contiguous()) == (args["queries"].dtype, True)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


# The reference.


@pytest.mark.parametrize("group", [1, 3])
def test_the_reference_is_attention_over_what_lies_in_order(group):
    contexts = (1, 16, 41)
    args = make(contexts, kv_heads=1, group=group)
    args["keys"], args["values"] = torch.randn(2, 1, 9 * 16, 64, device=DEVICE)
    args["tables"] = torch.tensor([[0, -1, -1], [1, -1, -1], [2, 3, 4]])
    out = paged_decode_reference(**args)
    for request, (first, context) in enumerate(zip((0, 16, 32), contexts, strict=True)):
        keys, values = (args[name][:, first : first + context] for name in ("keys", "values"))
        expected = F.scaled_dot_product_attention(args["queries"][request][:, None], keys, values, enable_gqa=True)
        torch.testing.assert_close(out[request], expected[:, 0], atol=1e-5, rtol=1e-5)


def test_the_reference_gives_each_kv_head_its_own_group():
    args = make((20,), kv_heads=2, group=3)
    whole = paged_decode_reference(**args)
    for head in range(2):
        one = args | {name: args[name][head : head + 1] for name in ("keys", "values")}
        one["queries"] = args["queries"][:, head * 3 : head * 3 + 3]
        torch.testing.assert_close(paged_decode_reference(**one), whole[:, head * 3 : head * 3 + 3])


def test_the_reference_finds_the_same_content_wherever_its_blocks_are():
    args = make((5, 40), block_size=8)
    order = torch.randperm(args["keys"].shape[1] // 8)
    moved = args | {"tables": order.argsort()[args["tables"].cpu()]}
    for name in ("keys", "values"):
        moved[name] = args[name].unflatten(1, (-1, 8))[:, order].flatten(1, 2)
    torch.testing.assert_close(paged_decode_reference(**moved), paged_decode_reference(**args), atol=0, rtol=0)


# The kernel.


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_ragged_requests_agree_with_the_reference(block_size, group):
    assert_agrees(make((1, block_size, block_size + 1, 64 + block_size + 3), block_size=block_size, group=group))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_dtypes_and_head_dims_agree_with_the_reference(dtype, head_dim):
    assert_agrees(make((3, 70), dtype=dtype, head_dim=head_dim), TOLERANCE[dtype])


def test_the_tile_is_a_matter_of_speed():
    args = make((1, 16, 130))
    outs = [paged_decode(**args, tile_tokens=tile_tokens) for tile_tokens in (16, 32, 64, 128)]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("like_the_query", "scale"), [([0], 100), ([39], 100), (range(40), -100)])
def test_scores_that_exp_cannot_hold_are_no_trouble(like_the_query, scale):
    """The first score is by far the largest, or the last one; or all are far below zero."""
    args = make((40,), group=1, kv_heads=1)
    for position in like_the_query:
        args["keys"][:, args["tables"][0, position // 16] * 16 + position % 16] = args["queries"][0, 0]
    args["queries"] *= scale
    assert_agrees(args, 1e-3, tile_tokens=16)


def test_numbers_beyond_the_blocks_of_a_request_are_not_followed():
    """This one leads out of all memory: who follows it does not live to tell."""
    assert_agrees(make((1, 40), garbage=2**31 - 1))


def test_views_are_read_in_place():
    args = make((5, 33), head_dim=32)
    for name in ("keys", "values"):
        args[name] = args[name].transpose(0, 1).contiguous().transpose(0, 1)
    args["queries"] = F.pad(args["queries"], (0, 0, 0, 3))[:, :4]
    args["tables"] = F.pad(args["tables"], (0, 5))[:, :3]
    assert not any(args[name].is_contiguous() for name in ("keys", "values", "queries", "tables"))
    assert_agrees(args)


@pytest.mark.skipif(DEVICE == "cuda", reason="a file of holes is no memory of a GPU")
def test_a_pool_may_have_more_numbers_than_32_bits_count(tmp_path):
    """A file of holes stands for the pool. An offset cut to 32 bits leads from its middle to its start: all zeros."""
    numbers = torch.from_file(str(tmp_path / "pool"), shared=True, size=2**32 + 2**10, dtype=torch.float16)
    keys = numbers[2**31 :].view(1, -1, 64)
    keys[0, -16:] = torch.randn(16, 64)
    args = make((16,), kv_heads=1, dtype=torch.float16) | {"keys": keys, "values": keys}
    args["tables"][0, 0] = 2**25 // 16
    assert_agrees(args, TOLERANCE[torch.float16])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 12}, "block size 12 .* power of two from 1 on"),
        ({"block_size": 0}, "block size 0 "),
        ({"block_size": -16}, "block size -16 "),
        ({"tile_tokens": 48}, "tile_tokens 48 .* power of two from 16 on"),
        ({"tile_tokens": 8}, "tile_tokens 8 "),
    ],
)
def test_sizes_that_are_no_powers_of_two_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        paged_decode(**make((5,)) | options)


def test_a_device_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(paged_kernel, "_INTERPRETED", False)
    args = make((5,))
    with pytest.raises(ConfigError, match="device 'cpu'; choose cuda or cuda:N, or set TRITON_INTERPRET"):
        paged_decode(**args | {"queries": args["queries"].cpu()})


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nanoserve.paged_kernel import _attend

constants = dict(zip(_attend.arg_names[12:], (4, 80, 16, 128, 16, 64, False), strict=True))
signature = dict(zip(_attend.arg_names, ["*bf16"] * 4 + ["*i32"] * 2 + ["fp32"] + ["i64"] * 5, strict=False))
source = ASTSource(_attend, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
sys.exit("mma.sync" not in compiled.asm["ptx"])
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path):
    """The interpreter accepts any Python; the compiler does not, and gives the products to the tensor cores."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_compiled_kernel_agrees_with_the_reference(dtype):
    contexts = [1, 15, 16, 17, 255, 256, 1000, 3001] * 4
    for block_size, tile_tokens in ((8, 32), (16, 64), (32, 64)):
        args = make(contexts, block_size=block_size, group=4, kv_heads=8, head_dim=128, dtype=dtype)
        assert_agrees(args, TOLERANCE[dtype], tile_tokens=tile_tokens)
