"""Who may import whom, and what shape the code keeps. A broken rule is printed as the offending line.

The table below is the layering: a module is missing from it, or imports what is not in its row, and a test says
which file imports what. Left of the bar: at import time. Right of it: only inside functions and type hints.
"""

import ast
import collections
import dataclasses
import fnmatch
import functools
import re
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TREES = ("nanoserve", "benchmarks")
CLOCKS = frozenset({"time", "datetime", "timeit"})

ENGINE = {
    # Standard library only, and no clock.
    "errors": "",
    "config": "errors",
    "request": "errors config",
    "stopping": "",
    "cache": "",
    "cache.blocks": "errors",
    "cache.prefix": "errors",
    "cache.sizing": "errors config",
    "seats": "request cache.blocks cache.prefix",
    "scheduler": "errors config request seats cache.blocks cache.prefix",
    "prompts": "errors config",
    "hf_config": "errors config",
    # Names, files and words: no torch before it is needed.
    "fetch": "errors | filelock gguf_file",
    "catalog": "errors config fetch | huggingface_hub time datetime",
    "tokenizer": "errors tokenizers datetime | jinja2",
    "gguf_tokenizer": "errors tokenizers",
    # The torch side.
    "cache.kv": "torch",
    "cache.contiguous": "config cache.kv torch",
    "cache.growing": "cache.kv torch",
    "staging": "torch",
    "cache.paged": "config cache.blocks cache.kv staging torch",
    "paged_reference": "torch",
    "paged_kernel": "errors torch triton",
    "attention": "errors config cache.kv torch | paged_kernel paged_reference",
    "ops": "attention cache.kv torch",
    "quantized": "ops torch",
    "cpu": "",
    "cpu.build": "errors",
    "cpu.native": "attention cache.kv cpu.packing cpu.watched errors ops quantized torch",
    "cpu.packing": "torch",
    "cpu.watched": "torch",
    "fused": "ops torch",
    "models": "",
    "models.*": "config attention cache.kv ops models.* torch",
    "sampling": "errors config staging torch",
    "gguf_file": "errors config hf_config gguf_tokenizer models.* gguf numpy safetensors tokenizers torch",
    "compute": "errors config cache.kv catalog fused models.* ops quantized torch | cpu.*",
    "weights": "errors config catalog compute cpu.build hf_config models.* ops tokenizer safetensors torch | gguf_file",
    "memory": "errors config cache.sizing models.* psutil torch",
    "answer": "request sampling stopping tokenizer torch",
    "replay": "config errors batch sampling seats staging cache.paged models.causal weights torch",
    "batch": "config ops request seats staging cache.* weights torch",
    "logprobs": "batch request models.causal torch",
    "leaving": "answer batch logprobs request scheduler seats weights",
    "gauges": "seats scheduler cache.prefix weights",
    # Everything meets here.
    "engine": (
        "errors config gauges leaving logprobs request prompts seats scheduler tokenizer cache.* models.* attention "
        "answer batch memory replay sampling weights torch"
    ),
    # HTTP: what clients send and get; the thread that owns the engine; the event loop around it.
    "options": "config typer",
    "server": "",
    "server.settings": "config errors",
    "server.refusals": "errors starlette",
    "server.bodies": "config pydantic pydantic_core",
    "server.thread": "config engine errors request",
    "server.metrics": "engine request server.thread prometheus_client",
    "server.calls": "config engine errors server.bodies server.settings time",
    "server.answers": "request server.calls tokenizer",
    "server.desk": "config errors request server.metrics server.thread",
    "server.connection": "starlette uvicorn",
    "server.reply": (
        "errors tokenizer server.answers server.calls server.connection server.desk server.refusals starlette"
    ),
    "server.gate": "errors server.refusals server.settings starlette",
    "server.app": "errors engine server.* fastapi starlette time",
    "server.serve": "errors server.app server.connection server.settings uvicorn",
    "server.command": "config options server.settings typer | engine server.app server.serve",
    "cli": (
        "errors config options server.command typer | cache.sizing catalog engine memory request weights time datetime"
    ),
    "": "| errors config request engine",
}  # fmt: skip

INSTRUMENT = {
    # The standard library and numpy only: usable for anything that streams tokens.
    "harness": "",
    "harness.errors": "",
    "harness.timing": "harness.errors",
    "harness.traffic": "harness.arrivals harness.errors harness.timing numpy",
    "harness.invariants": "harness.errors harness.timing harness.traffic",
    "harness.workload": "harness.errors",
    "harness.arrivals": "harness.errors numpy datetime",
    "harness.clients": "harness.arrivals harness.errors",
    "harness.serving": "harness.errors harness.timing time",
    "harness.verify": "harness.errors harness.timing harness.workload",
    # Statistics on finished numbers.
    "harness.stats": "harness.errors numpy | scipy",
    "harness.series": "harness.errors harness.stats numpy | scipy",
    "harness.equations": "",
    "harness.least_squares": "harness.stats numpy | scipy",
    "harness.hinges": "harness.least_squares harness.stats numpy | scipy",
    "harness.fits": "harness.equations harness.errors harness.hinges harness.least_squares harness.stats numpy",
    "harness.breakeven": "harness.errors harness.fits harness.least_squares harness.stats numpy",
    "harness.cost_shape": "harness.errors harness.fits harness.least_squares harness.stats numpy",
    "harness.prefill_cost": (
        "harness.breakeven harness.cost_shape harness.errors harness.fits harness.least_squares harness.stats numpy"
    ),
    # What a metric is, and what a benchmark leaves behind.
    "harness.slopes": "harness.fits harness.timing harness.traffic numpy",
    "harness.declaration": "harness.errors harness.fits harness.stats harness.timing harness.traffic",
    "harness.kinds": "harness.declaration",
    "harness.reuse_metrics": (
        "harness.breakeven harness.declaration harness.errors harness.fits harness.kinds harness.prefill_cost "
        "harness.stats harness.timing harness.traffic"
    ),
    "harness.metrics": (
        "harness.declaration harness.errors harness.kinds harness.reuse_metrics harness.slopes harness.traffic"
    ),
    "harness.results": (
        "harness.declaration harness.errors harness.fits harness.metrics harness.series harness.stats harness.timing "
        "harness.traffic"
    ),
    # Work, counted.
    "harness.garbage": "",
    "harness.files": "",
    "harness.markdown": "",
    "harness.counters": "harness.errors harness.garbage harness.gpu.driver | torch",
    "harness.token_counts": "harness.errors",
    "harness.exact": "harness.errors",
    # The machine.
    "harness.gpu": "",
    "harness.gpu.readings": "",
    "harness.gpu.driver": "harness.gpu.readings | harness.gpu.nvidia",
    "harness.gpu.lock": "harness.errors harness.files | filelock psutil",
    "harness.gpu.choice": "harness.errors harness.gpu.driver harness.gpu.lock time",
    "harness.gpu.memory": "harness.gpu.driver",
    "harness.gpu.steadiness": "harness.gpu.readings",
    "harness.gpu.nvml": "",
    "harness.gpu.numbering": "harness.gpu.nvml | torch",
    "harness.gpu.nvidia": (
        "harness.gpu.driver harness.gpu.numbering harness.gpu.nvml harness.gpu.readings | harness.machine psutil "
        "pynvml torch"
    ),
    "harness.clock": "harness.gpu.driver harness.timing time",
    "harness.slowed": "harness.errors harness.loop harness.serving harness.timing harness.wrapped | numpy",
    "harness.overhead": "harness.clock harness.timing",
    "harness.machine": "harness.gpu.readings harness.gpu.steadiness time | psutil",
    "harness.control": "harness.timing time | numpy torch",
    "harness.provenance": "harness harness.errors",
    "harness.band": "harness harness.errors harness.provenance | numpy",
    "harness.watch": (
        "harness harness.band harness.clock harness.control harness.gpu.driver harness.gpu.readings "
        "harness.gpu.steadiness harness.machine harness.overhead harness.results harness.timing"
    ),
    "harness.one_time": "time",
    # The loop, and what it runs. The adapters are the only files that know an engine, inside functions.
    "harness.scenes": "harness.arrivals harness.errors harness.serving harness.workload",
    "harness.proof": "harness.errors harness.timing",
    "harness.loop": (
        "harness.errors harness.garbage harness.invariants harness.metrics harness.proof harness.results "
        "harness.scenes harness.series harness.serving harness.timing harness.traffic harness.verify harness.workload"
    ),
    "harness.kept": "harness.errors harness.results",
    "harness.states": "harness.errors harness.loop harness.metrics harness.proof harness.results harness.scenes",
    "harness.measure": (
        "harness harness.arrivals harness.errors harness.kept harness.loop harness.metrics harness.one_time "
        "harness.results harness.scenes harness.slopes harness.states harness.timing harness.traffic time"
    ),
    "harness.profiles": "harness.errors",
    "harness.pace": "",
    "harness.ceilings": "harness.clock harness.gpu.driver | torch",
    "harness.efficiency": "harness.metrics harness.results harness.slopes harness.timing",
    "harness.stepwise": "harness.loop harness.serving harness.timing harness.wrapped",
    "harness.over_http": (
        "harness.errors harness.kept harness.loop harness.proof harness.results harness.serving "
        "harness.sources.client_loop harness.sources.endpoint harness.sources.server_word "
        "harness.sources.streams harness.timing harness.wrapped"
    ),
    "harness.opening": "harness.loop harness.over_http harness.watch harness.workload",
    "harness.wrapped": "harness.loop harness.proof",
    "harness.work": (
        "harness.counters harness.errors harness.kept harness.loop harness.metrics harness.popularity "
        "harness.prefix_traces harness.replacement harness.results harness.scenes harness.serving harness.timing "
        "harness.token_counts harness.verify harness.workload"
    ),
    "harness.popularity": "harness.errors",
    "harness.prefix_traces": "harness.errors harness.popularity",
    "harness.replacement": "harness.errors numpy",
    "harness.sources": "",
    "harness.sources.sse": "harness.errors",
    "harness.sources.answer": "harness.errors harness.sources.sse harness.timing",
    "harness.sources.openai": "harness.errors harness.sources.answer harness.timing",
    "harness.sources.endpoint": "harness.errors harness.serving harness.sources.answer",
    "harness.sources.client_loop": "harness.timing",
    "harness.sources.streams": (
        "harness.errors harness.serving harness.sources.answer harness.sources.client_loop harness.sources.endpoint "
        "harness.sources.openai harness.timing | httpx2"
    ),
    "harness.sources.elsewhere": (
        "harness.errors harness.proof harness.serving harness.sources.endpoint harness.timing | httpx2"
    ),
    "harness.sources.server_word": "harness.errors time | prometheus_client",
    "harness.sources.nanoserve_server": "harness.errors harness.sources.endpoint time | nanoserve",
    "harness.sources.huggingface": "harness.errors harness.timing | torch transformers",
    "harness.sources.step_cost": "",
    "harness.sources.twin": "| torch transformers",
    "harness.sources.nanoserve": (
        "harness.errors harness.serving harness.sources.nanoserve_reuse harness.timing | "
        "harness.sources.huggingface harness.sources.nanoserve_export harness.sources.nanoserve_parts "
        "harness.sources.nanoserve_prefix "
        "harness.sources.step_cost harness.sources.twin nanoserve nanoserve.* torch"
    ),
    "harness.sources.nanoserve_export": (
        "harness.errors harness.files | harness.sources.step_cost nanoserve nanoserve.* safetensors torch"
    ),
    "harness.sources.nanoserve_worker": "harness.peers.workers.protocol | nanoserve torch",
    "harness.sources.nanoserve_parts": "harness.errors harness.timing | nanoserve nanoserve.* torch",
    "harness.sources.nanoserve_prefix": "harness.errors | nanoserve.*",
    "harness.sources.nanoserve_reuse": (
        "harness.errors harness.sources.nanoserve_prefix harness.timing | nanoserve nanoserve.* torch"
    ),
    "harness.hit_curves": (
        "harness.curves harness.errors harness.prefix_traces harness.replacement time "
        "| harness.gate.progress harness.sources.nanoserve_prefix matplotlib rich"
    ),
    # What people see.
    "harness.report": "harness.metrics harness.one_time harness.results numpy rich | harness.curves",
    "harness.curves": "harness.metrics harness.report harness.results numpy | matplotlib",
    "harness.archive": "harness harness.errors harness.metrics harness.results harness.timing",
    "harness.doubts": "harness.archive harness.report harness.results",
    "harness.tables": "harness.curves harness.doubts harness.metrics harness.report harness.results",
    "harness.figures": "harness.curves harness.report numpy | harness.fits matplotlib",
    "harness.page": (
        "harness.archive harness.curves harness.doubts harness.figures harness.one_time harness.report harness.results "
        "harness.tables | jinja2 markupsafe"
    ),
    "harness.exports": (
        "harness.archive harness.curves harness.doubts harness.errors harness.results harness.tables | harness.page"
    ),
    "harness.count_gate": "harness.archive harness.exact harness.metrics harness.results",
    # The gate. First what knows numbers only: evidence, and what it says.
    "harness.gate": "",
    "harness.gate.evidence": "harness.errors harness.metrics harness.results",
    "harness.gate.sorting": "harness.errors harness.gate.evidence harness.metrics harness.results",
    "harness.gate.paired": "harness.errors harness.stats numpy | scipy",
    "harness.gate.rules": "harness.errors harness.gate.paired harness.stats",
    "harness.gate.rows": (
        "harness.exact harness.gate.evidence harness.gate.paired harness.gate.rules harness.metrics harness.stats"
    ),
    "harness.gate.timed": (
        "harness.gate.evidence harness.gate.paired harness.gate.rows harness.gate.rules harness.metrics harness.stats"
    ),
    "harness.gate.verdict": (
        "harness.errors harness.gate.evidence harness.gate.rows harness.gate.rules harness.gate.timed"
    ),
    "harness.gate.reference": (
        "harness.errors harness.files harness.gate.evidence harness.metrics harness.stats datetime"
    ),
    # What asv has stored, read as evidence.
    "harness.gate.asv_files": "harness.errors",
    "harness.gate.rounds": (
        "harness.archive harness.errors harness.gate.evidence harness.metrics harness.results datetime"
    ),
    "harness.gate.asv_commits": (
        "harness.errors harness.gate.asv_files harness.gate.evidence harness.gate.rounds harness.metrics"
    ),
    "harness.gate.stored": (
        "harness.errors harness.gate.asv_commits harness.gate.asv_files harness.gate.evidence harness.gate.rounds "
        "harness.metrics"
    ),
    # Commits, builds and processes that take turns.
    "harness.gate.revisions": "harness.errors",
    "harness.gate.builds": "harness.errors harness.gate.revisions harness.provenance | filelock",
    "harness.gate.census": "harness.gate.evidence harness.gate.revisions",
    "harness.gate.turns": "harness.errors harness.loop",
    "harness.gate.worker": "| harness.gate.session",
    "harness.gate.spin": "",
    "harness.gate.lockstep": (
        "harness.archive harness.gate.evidence harness.gate.spin harness.gate.turns harness.gate.worker time"
    ),
    "harness.gate.progress": "| rich",
    "harness.gate.comparison": (
        "harness.errors harness.gate.builds harness.gate.census harness.gate.evidence harness.gate.lockstep "
        "harness.gate.progress harness.gate.sorting harness.gate.verdict time"
    ),
    # How often the gate is wrong on this machine.
    "harness.gate.looks": (
        "harness.gate.evidence harness.gate.paired harness.gate.rules harness.gate.timed harness.metrics harness.stats "
        "numpy | scipy"
    ),
    "harness.gate.trials": "harness.gate.looks harness.gate.paired harness.gate.rules numpy",
    "harness.gate.gathering": (
        "harness.errors harness.gate.comparison harness.gate.evidence harness.gate.progress harness.gate.sorting "
        "harness.metrics time"
    ),
    "harness.gate.calibration": (
        "harness.errors harness.gate.comparison harness.gate.evidence harness.gate.rules harness.gate.trials "
        "harness.identity harness.metrics harness.stats"
    ),
    "harness.gate.calibrating": (
        "harness harness.errors harness.gate.calibration harness.gate.comparison harness.gate.evidence "
        "harness.gate.gathering harness.gate.looks harness.gate.paired harness.gate.progress harness.gate.rules "
        "harness.gate.trials harness.identity harness.metrics harness.stats numpy datetime"
    ),
    "harness.gate.calibration_file": (
        "harness harness.errors harness.gate.calibration harness.gate.comparison harness.gate.evidence "
        "harness.gate.rules harness.metrics harness.stats"
    ),
    # What people see of it.
    "harness.gate.telling": (
        "harness.gate.evidence harness.gate.rows harness.gate.rules harness.gate.verdict harness.markdown "
        "harness.metrics harness.report harness.stats rich"
    ),
    "harness.gate.calibration_text": "harness.gate.calibration harness.metrics rich",
    "harness.gate.cli": "harness.errors harness.files harness.gate.progress harness.profiles typer | harness.gate.*",
    # A night of one machine, and the nights of many. It runs commands; what they do is known where they are.
    "harness.nightly": "",
    "harness.nightly.folder": "harness.errors harness.gate.rules datetime",
    "harness.nightly.state": "harness.errors harness.files harness.identity harness.nightly.folder datetime",
    "harness.nightly.status": "harness.errors harness.files harness.gate.rules harness.nightly.folder datetime",
    "harness.nightly.missed": "datetime",
    "harness.nightly.runner": "time | psutil",
    "harness.nightly.plan": "harness.errors",
    "harness.nightly.locks": "harness.errors | filelock",
    "harness.nightly.history": "harness.errors harness.gate.revisions harness.nightly.state",
    "harness.nightly.judging": (
        "harness.errors harness.gate.rules harness.nightly.folder harness.nightly.runner harness.nightly.status"
    ),
    "harness.nightly.asv_store": "harness.errors harness.gate.asv_files harness.unreadable",
    "harness.nightly.site": (
        "harness.errors harness.files harness.nightly.fleet harness.nightly.front_page harness.nightly.plan "
        "harness.nightly.runner | asv"
    ),
    "harness.nightly.steps": "harness.nightly.history harness.nightly.runner harness.nightly.status datetime",
    "harness.nightly.telling": "harness.markdown harness.nightly.plan harness.nightly.status datetime",
    "harness.nightly.closing": "harness.files harness.nightly.* datetime",
    "harness.nightly.night": (
        "harness.asv_process harness.errors harness.gate.revisions harness.gate.rules harness.nightly.* datetime"
    ),
    "harness.nightly.fleet": "harness.gate.rules harness.markdown harness.nightly.* datetime",
    "harness.nightly.merging": "harness.errors harness.files harness.gate.rules harness.identity harness.nightly.*",
    "harness.nightly.cli": (
        "harness.errors harness.markdown harness.nightly.missed typer datetime | harness.asv_process harness.gate.* "
        "harness.identity harness.nightly.* harness.sources.nanoserve time"
    ),
    "harness.nightly.front_page": "harness.files harness.nightly.fleet",
    # What GitHub is told of it.
    "harness.github": "",
    "harness.github.client": "harness.errors | httpx2",
    "harness.github.wording": "| harness.nightly.folder",
    "harness.github.issues": "harness.github.client harness.github.wording | harness.nightly.folder",
    "harness.github.comments": "harness.errors harness.github.client harness.github.issues harness.github.wording",
    "harness.github.cli": (
        "harness.errors time typer | harness.github.client harness.github.comments harness.github.issues "
        "harness.nightly.folder httpx2"
    ),
    # Other engines beside ours. A worker knows its engine, in an environment of its own, and nothing else of this.
    "harness.peers": "",
    "harness.peers.workers": "",
    "harness.peers.workers.protocol": "time",
    "harness.peers.workers.on_transformers": "harness.peers.workers.protocol | torch transformers",
    "harness.peers.workers.on_llama_cpp": "harness.peers.workers.protocol | llama_cpp",
    "harness.peers.workers.on_vllm": "harness.peers.workers.protocol | vllm",
    "harness.peers.workers.on_openvino": "harness.peers.workers.protocol | numpy openvino openvino_genai",
    "harness.peers.registry": "harness.errors",
    "harness.peers.install": "harness.errors harness.files harness.nightly.runner harness.peers.registry",
    "harness.peers.gguf_writer": "harness.errors | gguf numpy safetensors torch",
    "harness.peers.weights": ("harness.errors harness.nightly.runner harness.peers.gguf_writer harness.peers.registry"),
    "harness.peers.process": "harness.errors",
    "harness.peers.columns": "harness.errors harness.peers.process",
    "harness.peers.rounds": "harness.errors harness.peers.columns harness.peers.process",
    "harness.peers.summary": ("harness.peers.columns harness.peers.registry harness.peers.rounds harness.stats"),
    "harness.peers.host": (
        "harness.ceilings harness.efficiency harness.peers.process harness.peers.rounds harness.timing time | psutil"
    ),
    "harness.peers.document": (
        "harness.efficiency harness.peers.columns harness.peers.host harness.peers.registry harness.peers.rounds "
        "harness.peers.summary"
    ),
    "harness.peers.table": "harness.markdown harness.report | rich",
    "harness.peers.session": (
        "harness.errors harness.gate.progress harness.gate.spin harness.peers.columns harness.peers.document "
        "harness.peers.host harness.peers.install harness.peers.process harness.peers.registry harness.peers.rounds "
        "harness.peers.weights"
    ),
    "harness.peers.cli": (
        "harness.errors harness.files harness.gate.progress typer | harness.ceilings harness.nightly.runner "
        "harness.peers.* harness.provenance harness.sources.nanoserve harness.sources.nanoserve_export torch"
    ),
    # The only files that know pytest.
    "harness.gate.session": "harness.* pytest",
    "harness.gate.beside": (
        "harness.fixtures harness.gate.evidence harness.gate.lockstep harness.gate.turns harness.loop pytest time"
    ),
    "harness.gate.anchoring": "harness.gate.* harness.metrics harness.results pytest",
    "harness.guards": "harness.errors harness.fixtures harness.provenance harness.sources.nanoserve pytest",
    "harness.suite": "harness.errors harness.fixtures harness.metrics harness.passes harness.profiles pytest",
    "harness.replay": "",
    "harness.stash": "harness.results pytest",
    "harness.progress": "harness.files harness.loop harness.pace harness.stash pytest time",
    "harness.claim": "harness.gpu.choice harness.gpu.driver harness.gpu.lock harness.sources.nanoserve pytest",
    "harness.http_fixtures": "harness.* pytest",
    "harness.fixtures": "harness.* pytest time",
    "harness.publishing": "harness.* pytest",
    "harness.spread": "harness.* pytest | pytest_benchmark xdist",
    "harness.gpu.care": "harness.* pytest",
    "harness.resume": "harness harness.* pytest",
    # asv's side: what its processes and files say of themselves.
    "harness.apart": "",
    "harness.asv_process": "| psutil",
    "harness.sidecar": "harness.asv_process harness.files harness.results datetime",
    "harness.identity": (
        "harness.asv_process harness.errors harness.files harness.gpu.driver harness.provenance harness.sidecar "
        "| psutil"
    ),
    "harness.unreadable": "harness.errors",
    "harness.passes": "harness.* pytest",
    "harness.bridge": "harness harness.* pytest | asv_runner",
    "harness.doctor": (
        "| harness.clock harness.errors harness.gate.calibration_file harness.gate.reference harness.gpu.choice "
        "harness.gpu.driver harness.gpu.lock harness.overhead harness.unreadable nanoserve nanoserve.catalog torch "
        "packaging"
    ),
    "asv_suite": "harness.bridge",
    "bench_*": "harness.arrivals harness.clients harness.popularity harness.traffic pytest",
    "studies": "",
    "studies.cache_points": "harness.results",
    "studies.claims": "harness.report harness.stats",
    "studies.commands": "harness.results typer | harness.archive harness.errors",
    "studies.cache_claims": (
        "harness.fits harness.results harness.slopes harness.stats harness.timing studies.cache_points studies.claims"
    ),
    "studies.cache_picture": ("harness.curves harness.metrics harness.results studies.cache_points | matplotlib"),
    "studies.cache_curve": (
        "harness.results studies.cache_claims studies.cache_points studies.commands | studies.cache_picture"
    ),
    "studies.prefix_points": "harness.prefill_cost harness.results harness.stats harness.timing studies.claims",
    "studies.prefix_rates": (
        "harness.breakeven harness.popularity harness.report harness.results harness.stats studies.claims "
        "studies.prefix_points"
    ),
    "studies.prefix_claims": (
        "harness.prefill_cost harness.results harness.stats harness.timing studies.claims studies.prefix_points "
        "studies.prefix_rates"
    ),
    "studies.prefix_picture": (
        "harness.curves harness.prefill_cost harness.report harness.results harness.stats studies.claims "
        "studies.prefix_points numpy | matplotlib"
    ),
    "studies.prefix_costs": (
        "harness.report harness.results harness.stats studies.claims studies.commands studies.prefix_claims "
        "studies.prefix_points | studies.prefix_picture"
    ),
    "studies.gate_power": "studies.gates typer time | harness.gate.*",
    "studies.gates": "harness.gate.* harness.metrics harness.stats | asv asv_runner",
    "__main__": (
        "harness.gate.cli harness.github.cli harness.nightly.cli harness.peers.cli typer | harness.archive "
        "harness.count_gate harness.doctor harness.errors harness.exports harness.hit_curves"
    ),
    "": "",
}

TABLE = {"nanoserve": ENGINE, "benchmarks": INSTRUMENT}

WITHOUT_TORCH = (
    "errors", "config", "request", "cache.blocks", "cache.prefix", "cache.sizing", "seats", "scheduler", "stopping",
    "prompts", "hf_config", "catalog", "fetch", "tokenizer", "cli", "",
)  # fmt: skip

MAY_READ_ENVIRONMENT = frozenset({"catalog.py", "server.py", "cli.py"})


@dataclasses.dataclass(frozen=True)
class Edge:
    """One import. `late` means that it happens inside a function or for the type checker only."""

    path: str
    line: int
    importer: str
    imported: str
    late: bool

    def __str__(self):
        return f"{self.path}:{self.line}: {self.importer} -> {self.imported}{' (late)' if self.late else ''}"


# Reading the code.


parse = functools.cache(ast.parse)
imports_of = functools.cache(lambda tree: tuple(imports(tree)))


def sources(root: Path, *trees: str) -> Iterator[tuple[str, str, ast.Module]]:
    """Path, module name and syntax tree of every Python file."""
    for tree in trees:
        for path in sorted((root / tree).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield path.relative_to(root).as_posix(), module, parse(path.read_text())


def edges(root: Path) -> list[Edge]:
    """All imports of the project's modules and of other packages; of the standard library, only the clocks."""
    modules = {module for _, module, _ in sources(root, *TREES)}
    return [
        Edge(path, node.lineno, module, target, late)
        for path, module, tree in sources(root, *TREES)
        for node, late in imports_of(tree)
        for target in targets(node, path, module, modules)
        if target not in sys.stdlib_module_names or target in CLOCKS
    ]


def imports(tree: ast.AST, late: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, late
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(node, late or is_typing or is_function)


def targets(node, path: str, module: str, modules: set[str]) -> set[str]:
    """What a statement imports: modules of the project by their full name, other packages by their first."""
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
    else:
        home = absolute(node, path, module)
        names = {f"{home}.{alias.name}" if f"{home}.{alias.name}" in modules else home for alias in node.names}
    return {name if name.partition(".")[0] in TREES else name.partition(".")[0] for name in names}


def absolute(node: ast.ImportFrom, path: str, module: str) -> str:
    if not node.level:
        return node.module
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    parts = package.split(".")[: 1 - node.level or None]
    return ".".join([*parts, node.module] if node.module else parts)


# The rules. Each returns the offending lines.


def breaks_of_layers(root: Path) -> list[str]:
    found = []
    for edge in edges(root):
        tree, _, name = edge.importer.partition(".")
        row = row_of(TABLE[tree], name)
        if row is None:
            found.append(f"{edge.path}: {edge.importer} is not in the table of {Path(__file__).name}")
        elif not is_allowed(edge, tree, row):
            found.append(str(edge))
    return list(dict.fromkeys(found))


def row_of(table: dict[str, str], name: str) -> str | None:
    """The row of a module: its own, else the one whose pattern it matches."""
    return table.get(name, next((row for pattern, row in table.items() if fnmatch.fnmatchcase(name, pattern)), None))


def is_allowed(edge: Edge, tree: str, row: str) -> bool:
    early, _, late = row.partition("|")
    patterns = early.split() + (late.split() if edge.late else [])
    own = edge.imported.partition(".")[2] if edge.imported.partition(".")[0] == tree else edge.imported
    return any(fnmatch.fnmatchcase(own, pattern) for pattern in patterns)


def cycles(root: Path) -> list[str]:
    """Import-time cycles, each as a path. Importing a module also imports the packages that it lies in."""
    graph = import_time_graph(root)
    found = []

    def walk(module, trail):
        if module in trail:
            found.append(" -> ".join([*trail[trail.index(module) :], module]))
        elif module not in seen:
            for imported in sorted(graph[module]):
                walk(imported, [*trail, module])
            seen.add(module)

    seen: set[str] = set()
    for module in sorted(graph):
        walk(module, [])
    return found


def import_time_graph(root: Path) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = collections.defaultdict(set)
    for edge in edges(root):
        if not edge.late:
            parts = edge.imported.split(".")
            packages = {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
            graph[edge.importer] |= {name for name in packages if not f"{edge.importer}.".startswith(f"{name}.")}
    return collections.defaultdict(set, graph)


def reached(root: Path, module: str) -> set[str]:
    """Everything that importing a module imports."""
    graph, found, open_ends = import_time_graph(root), set(), [module]
    while open_ends:
        name = open_ends.pop()
        if name not in found:
            found.add(name)
            open_ends += graph.get(name, ())
    return found


def prints_and_environment(root: Path) -> list[str]:
    found = []
    for path, _, tree in sources(root, "nanoserve"):
        for node in ast.walk(tree):
            names = {getattr(node, "attr", None), getattr(node, "id", None)}
            if isinstance(node, ast.Name) and node.id == "print":
                found.append(f"{path}:{node.lineno}: prints")
            if names & {"environ", "getenv", "environb"} and path.rpartition("/")[2] not in MAY_READ_ENVIRONMENT:
                found.append(f"{path}:{node.lineno}: reads the environment")
    return found


def taken_by_asv(root: Path) -> list[str]:
    """Functions and methods that asv would take for its own benchmarks: it goes by the name alone."""
    prefix = re.compile(r"(time|timeraw|track|mem|peakmem)_.|(Time|Timeraw|Track|Mem|PeakMem)[A-Z_].")
    return [
        f"{path}:{node.lineno}: {node.name}"
        for path, _, tree in sources(root, "benchmarks")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and prefix.match(node.name)
    ]


def private_names(root: Path) -> list[str]:
    """What the instrument takes from the engine has to be public."""
    return [
        f"{path}:{node.lineno}: {alias.name}"
        for path, _, tree in sources(root, "benchmarks")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanoserve")
        for alias in node.names
        if any(re.match("_[^_]", part) for part in [*node.module.split("."), alias.name])
    ]


# The project keeps them.


RULES = (breaks_of_layers, cycles, prints_and_environment, taken_by_asv, private_names)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_rule_is_broken(rule):
    assert rule(ROOT) == []


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_torch_is_not_imported_before_it_is_needed(name):
    assert "torch" not in reached(ROOT, f"nanoserve.{name}".rstrip("."))


def test_every_row_of_the_table_has_a_module():
    names = {tree: [] for tree in TREES}
    for _, module, _ in sources(ROOT, *TREES):
        tree, _, name = module.partition(".")
        names[tree].append(name)
    for tree, table in TABLE.items():
        assert [row for row in table if not fnmatch.filter(names[tree], row)] == []


# The rules see what they should.


@pytest.fixture
def copy(tmp_path):
    for tree in TREES:
        shutil.copytree(ROOT / tree, tmp_path / tree, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def plant(root: Path, path: str, text: str) -> int:
    """Append a line to a file, which need not exist; return the line's number."""
    file = root / path
    old = file.read_text() if file.exists() else '"""New."""\n'
    file.write_text(f"{old}{text}\n")
    return len(old.splitlines()) + 1


@pytest.mark.parametrize(
    ("path", "text", "offence"),
    [
        ("nanoserve/scheduler.py", "import torch", "nanoserve.scheduler -> torch"),
        ("nanoserve/scheduler.py", "def f(): import torch.cuda", "nanoserve.scheduler -> torch (late)"),
        ("nanoserve/request.py", "from .engine import Engine", "nanoserve.request -> nanoserve.engine"),
        ("nanoserve/request.py", "from . import engine", "nanoserve.request -> nanoserve.engine"),
        ("nanoserve/cache/kv.py", "from ..models import llama", "nanoserve.cache.kv -> nanoserve.models.llama"),
        ("nanoserve/config.py", "from nanoserve import weights", "nanoserve.config -> nanoserve.weights"),
        ("nanoserve/cli.py", "from nanoserve.engine import Engine", "nanoserve.cli -> nanoserve.engine"),
        ("nanoserve/engine.py", "import time", "nanoserve.engine -> time"),
        ("nanoserve/engine.py", "def f(): from time import perf_counter", "nanoserve.engine -> time (late)"),
        ("nanoserve/engine.py", "from benchmarks.harness import clock", "nanoserve.engine -> benchmarks.harness.clock"),
        ("nanoserve/engine.py", "def f(): import tests", "nanoserve.engine -> tests (late)"),
        ("benchmarks/harness/measure.py", "import pytest", "benchmarks.harness.measure -> pytest"),
        ("benchmarks/harness/timing.py", "class C:\n    import torch", "benchmarks.harness.timing -> torch"),
        ("benchmarks/harness/clock.py", "if True: import torch", "benchmarks.harness.clock -> torch"),
        ("benchmarks/harness/fixtures.py", "import nanoserve", "benchmarks.harness.fixtures -> nanoserve"),
        ("benchmarks/harness/fixtures.py", "def f(): import torch", "benchmarks.harness.fixtures -> torch (late)"),
        ("benchmarks/harness/sources/sse.py", "import httpx2", "benchmarks.harness.sources.sse -> httpx2"),
        ("benchmarks/bench_kv_cache.py", "import nanoserve.engine", "benchmarks.bench_kv_cache -> nanoserve.engine"),
    ],
)  # fmt: skip
def test_a_planted_import_is_reported_as_that_edge_and_no_other(copy, path, text, offence):
    before = breaks_of_layers(copy)
    line = plant(copy, path, text) + text.count("\n")
    assert [found for found in breaks_of_layers(copy) if found not in before] == [f"{path}:{line}: {offence}"]


def test_a_planted_type_hint_may_look_up(copy):
    before = breaks_of_layers(copy)
    plant(copy, "nanoserve/cli.py", "if TYPE_CHECKING:\n    from nanoserve.engine import Engine")
    assert breaks_of_layers(copy) == before


def test_a_module_that_the_table_does_not_know_is_reported(copy):
    plant(copy, "nanoserve/colour.py", "import torch")
    assert "nanoserve/colour.py: nanoserve.colour is not in the table of test_layers.py" in breaks_of_layers(copy)


def test_a_planted_cycle_is_reported_as_its_path(copy):
    plant(copy, "nanoserve/errors.py", "from nanoserve.request import Request")
    assert "nanoserve.request -> nanoserve.config -> nanoserve.errors -> nanoserve.request" in cycles(copy)


@pytest.mark.parametrize(
    ("rule", "path", "text", "offence"),
    [
        (prints_and_environment, "nanoserve/engine.py", "print(1)", "prints"),
        (prints_and_environment, "nanoserve/engine.py", "import os; os.environ.get('X')", "reads the environment"),
        (prints_and_environment, "nanoserve/engine.py", "os.getenv('X')", "reads the environment"),
        (taken_by_asv, "benchmarks/harness/report.py", "class A: track_x = 1", None),
        (taken_by_asv, "benchmarks/harness/report.py", "class A:\n    def track_x(self): pass", "track_x"),
        (taken_by_asv, "benchmarks/bench_new.py", "def time_it(): pass", "time_it"),
        (private_names, "benchmarks/harness/sources/nanoserve.py", "def f(): from nanoserve.engine import _x", "_x"),
    ],
)  # fmt: skip
def test_other_planted_offences_are_reported(copy, rule, path, text, offence):
    before = rule(copy)
    line = plant(copy, path, text) + text.count("\n")
    expected = [f"{path}:{line}: {offence}"] if offence else []
    assert [found for found in rule(copy) if found not in before] == expected


# The shape of the code.


def body_lengths(root: Path, tree: str) -> dict[str, int]:
    """Lines of each function's body without its docstring, nested functions included, by file, line and name."""
    return {
        f"{path}:{node.lineno}: {node.name}": body_length(node)
        for path, _, parsed in sources(root, tree)
        for node in ast.walk(parsed)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def body_length(function) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_body_length_counts_neither_signature_nor_docstring():
    text = 'def f(\n    a,\n):\n    """One.\n\n    Two.\n    """\n    b = (\n        a\n    )\n    return b\n'
    assert body_length(ast.parse(text).body[0]) == 4
    assert body_length(ast.parse('def f():\n    """Only words."""\n').body[0]) == 0


@pytest.mark.parametrize("tree", TREES)
def test_functions_are_short(tree):
    lengths = body_lengths(ROOT, tree)
    longest = sorted(lengths, key=lengths.get, reverse=True)[:5]
    assert statistics.median(lengths.values()) <= 8, longest
    assert statistics.quantiles(lengths.values(), n=10)[-1] <= 25, longest


@pytest.mark.parametrize("tree", TREES)
def test_no_file_is_long(tree):
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path, _, _ in sources(ROOT, tree)}
    assert {path: length for path, length in lengths.items() if length > 300} == {}


@pytest.mark.parametrize("tree", TREES)
def test_every_module_says_what_it_is(tree):
    assert [path for path, _, parsed in sources(ROOT, tree) if not ast.get_docstring(parsed)] == []
