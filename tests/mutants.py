"""Wrong formulas, most of them once shipped by a tool that people trusted: a pytest plugin that swaps one in.

    PYTHONPATH=tests python -m pytest -p mutants --mutant "..." tests/test_harness_timing.py

The number behind a name is the public issue of the tool that had the fault. `test_prove_red.py` runs them all, each
against the file that has to see it.
"""

import contextlib
import dataclasses
import sys
import time

from planting import MUTANTS, everywhere, mutant, of_run, of_stream

from benchmarks.harness import (
    band,
    clock,
    declaration,
    exact,
    loop,
    machine,
    metrics,
    one_time,
    over_http,
    proof,
    results,
    reuse_metrics,
    series,
    serving,
    slopes,
    stats,
    timing,
    token_counts,
    traffic,
    verify,
    workload,
)
from benchmarks.harness.errors import GitHubError
from benchmarks.harness.github import client, comments, issues
from benchmarks.harness.gpu import choice, memory, nvidia, steadiness
from benchmarks.harness.nightly import closing, merging, missed
from benchmarks.harness.peers import columns, rounds, summary, table
from benchmarks.harness.sources import client_loop, server_word
from benchmarks.harness.timing import Stamp


def pytest_addoption(parser):
    parser.addoption("--mutant", choices=[*MUTANTS, "none"], default="none")


def pytest_configure(config):
    name = config.getoption("--mutant")
    if name != "none":
        _, plant = MUTANTS[name]
        plant()


# One request.


@mutant("an undefined TPOT is 0", seen_by="timing")
def _():
    of_run("tpot_s", lambda run, right: right or 0.0)


@mutant("a run without tokens took 0 s", seen_by="timing")
def _():
    of_run("e2e_s", lambda run, right: right or 0.0)


@mutant("an undefined rate is 0", seen_by="timing")
def _():
    of_run("decode_tokens_per_s", lambda run, right: right or 0.0)


@mutant("a speedup over nothing is infinite", seen_by="timing")
def _():
    everywhere(timing.speedup, lambda slow_s, fast_s: slow_s / fast_s if fast_s else float("inf"))


@mutant("the clock is read more often than needed", seen_by="timing")
def _():
    right = timing.measure_call
    everywhere(right, lambda call, clock: (clock.now_ns(), right(call, clock))[1])


@mutant("the time to the first token is a gap (vllm 7242)", seen_by="timing")
def _():
    of_run("itls_s", lambda run, right: right and (run.ttft_s, *right))


@mutant("a chunk is one token (vllm 27485)", seen_by="timing")
def _():
    of_run("itls_s", lambda run, right: run.step_gaps_s)


@mutant("a role message is the first token (vllm 15106)", seen_by="timing")
def _():
    of_stream(lambda each: each if each.num_tokens else dataclasses.replace(each, num_without_id=1))


@mutant("a usage message ends the answer (vllm 12288)", seen_by="timing")
def _():
    right = timing.measure_stream

    def wrong(stream, clock, **options):
        last = []
        run = right((last.append(each) or each for each in stream), clock, **options)
        late = last and not last[-1].num_tokens and run.stamps
        stamps = (*run.stamps[:-1], Stamp(clock.now_ns(), run.stamps[-1].num_tokens)) if late else run.stamps
        return dataclasses.replace(run, stamps=stamps)

    everywhere(right, wrong)


@mutant("the first token counts as decoded (llmperf 99)", seen_by="timing")
def _():
    of_run("tpot_s", lambda run, right: right and run.e2e_s / run.num_tokens)


@mutant("a missing end is 0 (vllm-omni 6693)", seen_by="timing")
def _():
    of_run("e2e_s", lambda run, right: 0.0 if run.error else right)
    of_run("tpot_s", lambda run, right: -run.ttft_s / run.num_tokens if run.error else right)


@mutant("the wall clock", seen_by="timing")
def _():
    clock.DeviceClock.now_ns = lambda self: time.time_ns()


@mutant("the clock does not wait for the device", seen_by="clock")
def _():
    nvidia.NvidiaGpu.wait = lambda self: None


@mutant("a short answer is a fast one (perf-eval 20)", seen_by="measure")
def _():
    everywhere(verify.check_length, lambda *_, **__: None)


@mutant("other tokens are as good", seen_by="measure")
def _():
    everywhere(verify.check_same_tokens, lambda *_: [])


# Many requests.


@mutant("latencies count from sending (vllm 54101)", seen_by="traffic")
def _():
    of_run("arrival_ns", lambda run, right: run.sent_ns)


@mutant("those that failed do not count (InferenceX 357)", seen_by="traffic")
def _():
    right = traffic.goodput
    everywhere(right, lambda runs, limits: right([run for run in runs if run.is_finished], limits))


@mutant("nothing finished in 0.00 ms", seen_by="traffic")
def _():
    right = traffic.mean_tokens_per_s
    everywhere(right, lambda runs: right(runs) or 0.0)


@mutant("one token meets every limit", seen_by="traffic")
def _():
    right = traffic._verdict
    everywhere(right, lambda run, limits: "good" if run.num_tokens == 1 and not run.error else right(run, limits))


@mutant("each request weighs the same by token as well", seen_by="traffic")
def _():
    everywhere(traffic.tpot_by_token_s, lambda runs: stats.quantile([r.tpot_s for r in runs if r.tpot_s], 0.5))


@mutant("the peak is the fullest second of a grid", seen_by="traffic")
def _():
    def wrong(runs, least_s=1.0):
        seconds = [int(stamp.at_ns / 1e9) for run in runs for stamp in run.stamps]
        return float(max(map(seconds.count, seconds))) if seconds and traffic.duration_s(runs) else None

    everywhere(traffic.peak_tokens_per_s, wrong)


@mutant("a window's latencies count from sending", seen_by="serving")
def _():
    right = serving._Sent.as_run
    serving._Sent.as_run = lambda self: dataclasses.replace(right(self), scheduled_ns=self.sent_ns)


@mutant("windows are pooled as one", seen_by="windows")
def _():
    right = results.summarise_windows
    everywhere(right, lambda metric, arm, windows, *limits: right(metric, arm, [sum(windows, ())], *limits))


@mutant("requests that shared a window are as many samples", seen_by="batches")
def _():
    right = results.summarise_pairs

    def wrong(metric, arm, pairs):
        return right(metric, arm, [([a], [b]) for pair in pairs for a, b in zip(*pair, strict=True)])

    everywhere(right, wrong)


@mutant("steady throughput counts prefill", seen_by="traffic")
def _():
    everywhere(traffic.steady_tokens_per_s, traffic.mean_tokens_per_s)


@mutant("a price is upside down", seen_by="batches")
def _():
    right = traffic.itl_price
    everywhere(right, lambda dear, plain: right(plain, dear))


@mutant("a knee is upside down", seen_by="slopes")
def _():
    right = slopes.batch_knee_requests
    everywhere(right, lambda windows: (knee := right(windows)) and 1 / knee)


# Statistics, sampling and declarations.


@mutant("a percentile of ten samples is one (hey 120)", seen_by="stats")
def _():
    everywhere(stats.min_samples_for, lambda q: 1)


@mutant("outliers are not seen", seen_by="series")
def _():
    everywhere(series.find_outliers, lambda *_, **__: None)


@mutant("a throttled series is as good as another", seen_by="series")
def _():
    everywhere(series.find_step, lambda *_, **__: None)


@mutant("nothing is warmed up", seen_by="measure")
def _():
    loop.Loop._warm_up = lambda *_: None


@mutant("the measured prompts are warmed up", seen_by="measure")
def _():
    right = workload.Workload.prompt
    workload.Workload.prompt = lambda self, vocab_size, name="", *_: right(self, vocab_size, name)


@mutant("no change is too small", seen_by="metrics")
def _():
    declaration.Metric.is_worse = lambda self, base, head: head > base if self.better == "lower" else head < base


@mutant("an earlier high-water mark is the peak", seen_by="gpu")
def _():
    right = nvidia.NvidiaGpu.peak_memory

    def wrong(self, call):
        torch = sys.modules["torch"]
        torch.cuda.reset_peak_memory_stats = lambda device: None
        return right(self, call)

    nvidia.NvidiaGpu.peak_memory = wrong


@mutant("what stays behind on a GPU is no leak", seen_by="gpu_care")
def _():
    memory.Kept.leak = property(lambda self: "")


@mutant("the frames of an error may keep their tensors", seen_by="gpu_care")
def _():
    everywhere(memory.let_go, lambda error: None)


@mutant("a GPU's clock is what it was before and after", seen_by="watch")
def _():
    everywhere(steadiness._clock_moves, lambda *_: iter(()))


@mutant("a sample that compiled is as good as another", seen_by="one_time")
def _():
    one_time.Account.around = lambda self, arm, sample: contextlib.nullcontext()


@mutant("a kernel that lay on disk was compiled", seen_by="one_time")
def _():
    right = one_time.Kernels.listening

    @contextlib.contextmanager
    def listening(self, knobs):
        with right(self, knobs):
            listen = knobs.compilation.listener
            knobs.compilation.listener = lambda *, cache_hit, **what: listen(cache_hit=False, **what)
            yield

    one_time.Kernels.listening = listening


@mutant("query heads hold keys and values", seen_by="token_counts")
def _():
    right = token_counts.kv_bytes_per_token
    everywhere(right, lambda layers, kv_heads, *rest: right(layers, 4 * kv_heads, *rest))


@mutant("a tenth more memory is the same", seen_by="exact")
def _():
    right = exact._change

    def wrong(key, base, head, better):
        is_close = base is not None and head is not None and abs(head - base) <= 0.1 * abs(base)
        return None if is_close else right(key, base, head, better)

    everywhere(right, wrong)


@mutant("what can not be compared is as good", seen_by="exact")
def _():
    everywhere(exact.is_red, lambda changes: any(change.verdict == "worse" for change in changes))


@mutant("the first GPU is as good as a free one", seen_by="gpu_choice")
def _():
    everywhere(choice.pick, lambda seen: seen[0])


@mutant("every worker measures on the first GPU", seen_by="gpu_choice")
def _():
    everywhere(choice.meant, lambda asked, gpus, worker=None: gpus[:1])


@mutant("a busy machine is as good as another", seen_by="machine")
def _():
    everywhere(machine.what_happened, lambda *_: [])


@mutant("the control is never beside its band", seen_by="control")
def _():
    everywhere(band._beside, lambda *_: iter(()))


@mutant("a cost is a negated rate", seen_by="metrics")
def _():
    declaration.Metric.cost = lambda self, value: value if self.better == "lower" else -value


@mutant("less throughput is better (TensorRT-LLM 18741)", seen_by="metrics")
def _():
    object.__setattr__(metrics.METRICS["decode_tokens_per_s"], "better", "lower")  # declared so, it would be refused


# Reuse.


def of_states(name, wrong):
    metrics.METRICS[name] = dataclasses.replace(metrics.METRICS[name], among=wrong)


@mutant("a speedup is over the first prompt of all (omlx 1803)", seen_by="reuse")
def _():
    right = reuse_metrics.reuse_speedup
    of_states("reuse_speedup", lambda states: right({**states, "unseen": states.get("cold", states["unseen"])}))


@mutant("a suffix alone is a hit", seen_by="reuse")
def _():
    of_states("reuse_speedup", reuse_metrics.reuse_speedup_proxy)


@mutant("nobody looks whether anything was found (mlcommons storage 283)", seen_by="reuse")
def _():
    everywhere(proof.check_hits, lambda *_: None)


@mutant("wrong logits are as good as right ones", seen_by="reuse")
def _():
    everywhere(proof.check_reuse, lambda *_: None)


@mutant("what ran before is still there (vllm 52884)", seen_by="reuse")
def _():
    right = loop._serve_before

    def wrong(subject, prompts, options):
        subject.forget = lambda **arm: None
        right(subject, prompts, options)

    everywhere(right, wrong)


# Nights.


@mutant("what was not done is no reason for red", seen_by="nightly")
def _():
    right = closing.said_by
    everywhere(right, lambda status: (each for each in right(status) if each[0] != "no data"))


@mutant("a runner that is off is green", seen_by="nightly")
def _():
    everywhere(missed.is_stale, lambda last, now, max_age_hours: last is None)


@mutant("the folder that comes last is right", seen_by="fleet")
def _():
    merging._worth = lambda name, place, text: ""


# What GitHub is told.


@mutant("a night that cannot tell is a recovery", seen_by="github")
def _():
    right = issues.steps
    hopeful = {"cannot tell": "same"}

    def wrong(night, *told):
        return right(dataclasses.replace(night, verdict=hopeful.get(night.verdict, night.verdict)), *told)

    everywhere(right, wrong)


@mutant("a comment is never found again", seen_by="github")
def _():
    everywhere(comments._is_own, lambda comment: False)


@mutant("an answer that broke off is not looked at again", seen_by="github")
def _():
    everywhere(issues._is_there, lambda github, step: False)


@mutant("an error shows what was sent", seen_by="github")
def _():
    client.GitHub._error = lambda self, text, wait_s: GitHubError(f"GitHub, {text}", wait_s)


# Other engines beside ours.


@mutant("every round asks the same prompts: a prefix cache answers", seen_by="peers")
def _():
    right = rounds.Prompts.asks
    rounds.Prompts.asks = lambda self, scene: right(rounds.Prompts(1000, 0), scene)


@mutant("the warm-up is what is timed", seen_by="peers")
def _():
    right = rounds._taken
    everywhere(right, lambda turn, worker, warm, timed: turn._replace(replies=[worker.ask(warm[0], 4)]))


@mutant("peers always take turns in one order", seen_by="peers")
def _():
    rounds.random = type("Fixed", (), {"Random": type("Still", (rounds.random.Random,), {
        "sample": lambda self, population, k: list(population)})})  # fmt: skip


@mutant("the ratio is of medians, not of rounds", seen_by="peers")
def _():
    def wrong(ours, other):
        return stats.paired_ratio([ours.median], [other.median])

    everywhere(summary.paired, wrong)


@mutant("the slowest rival is the one to beat", seen_by="peers")
def _():
    right = summary.ratios
    everywhere(right, lambda found, peers, *, is_more_better: right(found, peers, is_more_better=not is_more_better))


@mutant("a median on the good side is ahead, whatever its interval", seen_by="peers")
def _():
    def wrong(ratio, is_more_better):
        return ", ahead" if (ratio["value"] > 1) == is_more_better else ", behind"

    everywhere(table._verdict, wrong)


@mutant("decode throughput counts the prefill", seen_by="peers")
def _():
    everywhere(columns.decode_tokens_per_s, columns.all_tokens_per_s)


# Through HTTP.


@mutant("who sends late was on time", seen_by="http")
def _():
    of_run("schedule_delay_s", lambda run, right: right and 0.0)


@mutant("a token arrives when the client has time for it", seen_by="http")
def _():
    client_loop.Arrivals.seen_ns = lambda self, number: self.clock.now_ns()


@mutant("the next of a closed loop is due when the last was", seen_by="http")
def _():
    right = serving._Schedule.note_end
    serving._Schedule.note_end = lambda self, request_id, at_ns: right(self, request_id, 0)


@mutant("the server's mean is of all that it ever served", seen_by="http")
def _():
    everywhere(server_word.between, lambda before, after: after)


@mutant("the server is held against latencies from when they were due", seen_by="http")
def _():
    right = over_http._seen
    shifted = lambda run: dataclasses.replace(run, sent_ns=run.scheduled_ns)  # noqa: E731
    everywhere(right, lambda name, runs: right(name, [shifted(run) for run in runs]))


@mutant("a client that does not listen is no bottleneck", seen_by="http")
def _():
    client_loop.ClientLog.away_share = property(lambda self: 0.0)
