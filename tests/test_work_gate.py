"""The gate for counts, as people use it: the real benchmark twice, and a planted operator per layer between.

What no clock can see is red here, and named. The sessions run in processes of their own, on the tiny shape.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.count_gate import SAME, WORSE
from nanoserve.catalog import SHAPES

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow

PLANTS = {
    "nothing": "",
    "an operator": """
from nanoserve.models.llama import DecoderLayer
right = DecoderLayer.forward
DecoderLayer.forward = lambda self, hidden, rope, cache: right(self, hidden, rope, cache) + 0
""",
    "a forgotten buffer": """
import torch
from nanoserve.cache.contiguous import ContiguousCache
right, kept = ContiguousCache.extend, []
def extend(self, layer, keys, values):
    if not layer:
        kept.append(torch.empty(1))
    return right(self, layer, keys, values)
ContiguousCache.extend = extend
""",
    "a second forward": """
from nanoserve.engine import Engine
right = Engine._forward
def forward(self, scheduled):
    if scheduled[0].num_new == 1:
        right(self, scheduled)
    return right(self, scheduled)
Engine._forward = forward
""",
}


def count(folder, plant):
    """Run the decode benchmark with something planted; return the results file."""
    name = plant.replace(" ", "_")
    (folder / f"plant_{name}.py").write_text(PLANTS[plant])
    results = folder / f"{name}.json"
    options = [
        "--benchmark-only",
        "--model=tiny",
        "--device=cpu",
        f"--benchmark-json={results}",
        "-k",
        "decode_step and 16",
    ]
    command = [sys.executable, "-c", RUN, str(folder), f"plant_{name}", *options, "benchmarks/bench_work.py"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(command, cwd=ROOT, env=inherited, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return results


RUN = """
import importlib, sys
sys.path[:0] = ["", sys.argv[1]]
importlib.import_module(sys.argv[2])
import pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[3:]]))
"""


def gate(base, head):
    command = [sys.executable, "-m", "benchmarks", "counts", str(base), str(head)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("counts")


@pytest.fixture(scope="module")
def base(folder):
    return count(folder, "nothing").rename(folder / "base.json")


def test_an_untouched_engine_is_green(folder, base):
    code, told = gate(base, count(folder, "nothing"))
    assert code == SAME
    assert told.startswith("0 counts worse, 0 better, 0 without data, 18 the same\n")


def test_one_operator_more_per_layer_is_red_and_named(folder, base):
    code, told = gate(base, count(folder, "an operator"))
    assert code == WORSE
    num_layers = SHAPES["tiny"].num_layers
    assert f"(+{num_layers}, " in next(line for line in told.splitlines() if "cached num_operators" in line)
    assert f"cached: aten.add.Tensor +{num_layers}" in told


@pytest.mark.parametrize(("plant", "grown"), [("a forgotten buffer", "allocated_bytes"), ("a second forward", "flops")])
def test_more_memory_or_more_work_is_red(folder, base, plant, grown):
    code, told = gate(base, count(folder, plant))
    assert code == WORSE
    assert f"worse: benchmarks/bench_work.py::test_decode_step[16] cached {grown}" in told
