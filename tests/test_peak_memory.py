"""What the memory plan promises is what a full pool takes, in a process of its own: the pool, and a step beside it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from child_process import inherited

ROOT = Path(__file__).parents[1]

FILL = """
import json, random, sys
from pathlib import Path
import torch
from nanoserve import Engine, ModelConfig, SamplingParams, catalog
from nanoserve.config import EngineConfig
from nanoserve.weights import load_model

device, kv_memory, max_step_tokens = sys.argv[1:]
catalog.SHAPES["made"] = ModelConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_layers=32, num_heads=4, num_kv_heads=4, head_dim=32,
    max_context_tokens=16384,
)
loaded = load_model(EngineConfig(model="made", device=device))
rng, how = random.Random(0), {"max_running": 8, "max_step_tokens": int(max_step_tokens)}

def status_bytes(name):
    return 1024 * int(Path("/proc/self/status").read_text().partition(name)[2].split()[0])

def fill(engine, num_new=32):
    "Requests that hold all blocks together when the first of them ends. Returns the fewest bytes without a position."
    config, least = engine._scheduler.config, engine.kv_unused_bytes
    for place in range(config.max_running):
        num_blocks = (config.num_blocks + place) // config.max_running
        prompt = [rng.randrange(256) for _ in range(num_blocks * config.block_size - num_new + 1)]
        engine.add_request(prompt, SamplingParams(max_new_tokens=num_new, ignore_eos=True))
    while engine.has_work:
        engine.step()
        least = min(least, engine.kv_unused_bytes + engine.kv_waste_bytes)
    assert engine.counts.num_preemptions == 0
    return least

fill(Engine(loaded, num_blocks=32, **how))
before = torch.cuda.memory_allocated() if device == "cuda" else status_bytes("VmRSS:")
engine = Engine(loaded, kv_memory=kv_memory, **how)
least = fill(engine)
peak = torch.cuda.max_memory_allocated() if device == "cuda" else status_bytes("VmHWM:")
plan = engine.pool_plan
print(json.dumps({
    "grown": peak - before, "promised": plan.peak_bytes, "free": least / plan.num_bytes
}))
"""


def growth(device, kv_memory, max_step_tokens):
    """Bytes by which a full pool raises the peak, over those that were promised."""
    ran = subprocess.run(
        [sys.executable, "-c", FILL, device, kv_memory, str(max_step_tokens)],
        env=inherited() | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["free"] < 0.01, "the pool was never full"
    return told["grown"] / told["promised"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the peak of a process")
def test_a_full_pool_takes_what_was_promised():
    assert growth("cpu", "96MiB", 512) == pytest.approx(1, abs=0.10)


@pytest.mark.gpu
def test_a_full_pool_on_a_gpu_takes_what_was_promised():
    assert growth("cuda", "1GiB", 128) == pytest.approx(1, abs=0.02)
