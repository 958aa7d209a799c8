"""Matrices that are multiplied as one give what they give one by one, and no weight is there twice."""

import itertools

import pytest
import torch
from many_requests import PROMPTS, run, varied_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanoserve import Engine, EngineConfig, SamplingParams, compute, fused, weights
from nanoserve.fused import FusedOps, fuse
from nanoserve.ops import TORCH

SOME = SamplingParams(max_new_tokens=24, ignore_eos=True)


class Products(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += str(func) in ("aten.linear.default", "aten.addmm_.default")
        return func(*args, **kwargs or {})


def storage_bytes(model):
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in model.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize("options", [{"cache": "contiguous"}, {"attention": "sdpa"}, {"attention": "reference"}])
def test_a_fused_model_has_the_same_answers_with_fewer_products_and_no_more_bytes(options):
    plain, joined = varied_model(), varied_model()
    fuse(joined.model)
    assert storage_bytes(joined.model) == storage_bytes(plain.model)
    answers, products = [], []
    for loaded in (plain, joined):
        with Products() as counted:
            answers.append(run(Engine(loaded, **options), PROMPTS, SOME))
        products.append(counted.num)
    assert answers[0] == answers[1]
    assert products[0] / products[1] == (7 * 2 + 1) / (4 * 2 + 1), "of each layer 7 become 4, beside the logits'"


def test_the_matrices_of_a_group_are_views_that_lie_side_by_side():
    model = varied_model().model
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    ops = fuse(model)
    after = dict(model.named_parameters())
    assert all(after[name].equal(weight) for name, weight in before.items())
    layer = model.model.layers[1]
    for group in ([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
                  [layer.mlp.gate_proj, layer.mlp.up_proj]):  # fmt: skip
        for one, next_one in itertools.pairwise(group):
            assert one.weight.data_ptr() + one.weight.nbytes == next_one.weight.data_ptr()
    assert {module.ops for module in model.modules() if hasattr(module, "ops")} == {ops}


@pytest.mark.parametrize("bias", [True, False])
def test_a_group_is_multiplied_in_its_order_with_its_biases(bias):
    matrices = [nn.Linear(6, size, bias=bias).requires_grad_(False) for size in (4, 2, 8)]
    inputs = torch.randn(5, 6)
    expected = TORCH.project(inputs, matrices)
    ops = FusedOps()
    ops.join(matrices)
    for ours, theirs, again in zip(
        ops.project(inputs, matrices), expected, TORCH.project(inputs, matrices), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
        assert again.equal(theirs)


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_added_to_what_was_there(bias):
    matrix, inputs, residual = nn.Linear(6, 4, bias=bias).requires_grad_(False), torch.randn(3, 6), torch.randn(3, 4)
    expected = TORCH.add_projection(residual.clone(), inputs, matrix)
    torch.testing.assert_close(FusedOps().add_projection(residual, inputs, matrix), expected)


def test_what_is_no_group_stays_as_it_is():
    ops, matrices = FusedOps(), [nn.Linear(3, 2), nn.Linear(3, 4)]
    inputs = torch.randn(1, 3)
    for ours, theirs in zip(ops.project(inputs, matrices), TORCH.project(inputs, matrices), strict=True):
        assert ours.equal(theirs)
    odd = nn.Module()
    odd.gate_proj, odd.up_proj = nn.Linear(3, 2), nn.Linear(3, 2, bias=False)
    assert fuse(odd).project(inputs, [odd.gate_proj, odd.up_proj])[0].shape == (1, 2)
    assert odd.gate_proj.weight.untyped_storage().nbytes() == 3 * 2 * 4


@pytest.mark.parametrize(("device", "is_fused"), [("cpu", False), ("cuda:0", True)])
def test_a_model_is_fused_where_it_is_loaded_onto_a_gpu(monkeypatch, device, is_fused):
    joined = []
    monkeypatch.setattr(weights, "resolve_device", lambda _: torch.device(device))
    monkeypatch.setattr(weights, "_fill", lambda *_, **__: None)
    monkeypatch.setattr(compute, "fuse", joined.append)
    loaded = weights.load_model(EngineConfig(model="tiny", dtype="float32"))
    assert joined == [loaded.model] * is_fused


def test_groups_in_the_wrong_order_are_seen(monkeypatch):
    monkeypatch.setattr(fused, "GROUPS", (("k_proj", "q_proj", "v_proj"), ("up_proj", "gate_proj")))
    with pytest.raises(AssertionError, match="of each layer"):
        test_a_fused_model_has_the_same_answers_with_fewer_products_and_no_more_bytes({"attention": "sdpa"})
