"""A night without processes: a runner that plays a script, a clock that it moves, and folders of other machines."""

import datetime
import json
import subprocess
from pathlib import Path

from child_process import inherited

from benchmarks.harness.gate.rules import EXIT_CODES
from benchmarks.harness.nightly.folder import as_json, name_of_night, nights_folder
from benchmarks.harness.nightly.night import run_night
from benchmarks.harness.nightly.plan import COUNTING, Asked, Places
from benchmarks.harness.nightly.runner import Ended
from benchmarks.harness.nightly.state import State, claim_name, save_state
from benchmarks.harness.nightly.steps import Tools

START = datetime.datetime(2026, 3, 1, 2, 0, tzinfo=datetime.UTC)
HOUR_S = 3600.0
CPU = {"cpu": "EPYC", "num_cpus": 2, "memory_gib": 24, "gpu": None}
GPU = {"cpu": "Xeon", "num_cpus": 16, "memory_gib": 128, "gpu": "H200"}
IDENTITY = {f"GIT_{who}_{what}": "test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def git(folder, *arguments):
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env=inherited() | IDENTITY, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def make_repository(folder, subjects):
    """A commit for each subject, tagged by its first word."""
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "asv.conf.json").write_text('{\n    // nothing much\n    "version": 1, "repo": "."\n}')
    git(folder, "add", "-A")
    for subject in subjects:
        git(folder, "commit", "-q", "--allow-empty", "-m", subject)
        git(folder, "tag", subject.split()[0])
    return folder


def comparison(verdict, num_gated=1, sources=("one", "two")):
    """What `compare` writes, as far as a night reads it."""
    rows = [{"gate": True, "verdict": verdict, "metric": "itl_p50_s"}] * num_gated
    provenance = {side: {"source_sha256": each} for side, each in zip(("base", "head"), sources, strict=True) if each}
    return {"verdict": verdict, "headline": f"{verdict}: so it is", "rows": rows, "provenance": provenance}


def asv_file(commit, started_at=0, value=1.0):
    return json.dumps(
        {
            "commit_hash": commit, "env_name": "env", "params": {"machine": "m"}, "version": 2, "durations": {},
            "result_columns": ["result", "params", "version", "started_at"],
            "results": {"bench_x.test_y.track_num_operators": [[value], [], "v", started_at]},
        }
    )  # fmt: skip


class Script:
    """Plays each step: `seconds` it takes, `ends` with an exit status or an exception; a comparison says `said`."""

    def __init__(self, places, clock):
        self.places, self.clock, self.ran = places, clock, []
        self.seconds, self.ends, self.said, self.files = {}, {}, {}, True

    def name_of(self, words):
        words = [*words][2:]
        if words[:2] == ["benchmarks", "compare"]:
            return "counts" if COUNTING in words else "compare"
        if words[:1] == ["asv"] and "run" in words:
            return f"asv {words[4][:12]}"
        known = {"benchmarks": "report", "pytest": "measure"}
        return known.get(words[0], "publish" if "publish" in words else "machine")

    def run(self, command, began):
        name = self.name_of(command.words)
        self.ran.append(name)
        began(1, 0.0)
        command.log.parent.mkdir(parents=True, exist_ok=True)
        command.log.write_text(f"{name} said this last\n")
        took_s = min(self.seconds.get(name, 60.0), command.limit_s)
        self.clock.now_s += took_s
        if self.seconds.get(name, 60.0) > command.limit_s:
            return Ended(None, took_s)
        code = self._work(name, command)
        code = self.ends.get(name, code)
        if isinstance(code, BaseException):
            raise code
        return Ended(code, took_s)

    def _work(self, name, command):
        words = [*command.words]
        if name in ("counts", "compare"):
            told = self.said.get(name, comparison("same"))
            if self.files:
                texts = {"--json": json.dumps(told), "--markdown": f"### Benchmarks: {told['headline']}"}
                for option, text in texts.items():
                    Path(words[words.index(option) + 1]).write_text(text)
            return EXIT_CODES[told["verdict"]]
        if name.startswith("asv "):
            commit = words[6].removesuffix("^!")
            path = self.places.store / "m" / f"{commit[:8]}-env.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(asv_file(commit))
        return 0


class Clock:
    now_s = 0.0

    @property
    def now(self):
        return START + datetime.timedelta(seconds=self.now_s)


class Runner:
    """One machine that has its nights in a repository."""

    def __init__(self, root, folder):
        self.places = Places(root=root, results=folder / "nightly", site=folder / "site")
        self.clock, self.broken, self.said = Clock(), {}, []
        self.script = Script(self.places, self.clock)
        self.asked = Asked(machine="m")

    def night(self, *, max_hours=8.0, **asked):
        """One more, which begins now."""
        tools = Tools(
            runner=self.script, why_not_built=lambda commit: self.broken.get(commit, ""), now=lambda: self.clock.now,
            clock=lambda: self.clock.now_s, say=self.said.append,
        )  # fmt: skip
        self.script.ran = []
        asked = Asked(**{"machine": "m", **asked})
        return run_night(
            asked, claim_name(self.places.results, "m", CPU, asked.measured), self.places, tools, max_hours * HOUR_S
        )


def write_night(results, machine, *, identity=CPU, began=START, verdict="same", finished=True, head="a" * 40, **told):
    """What a night of some machine has left, without running one."""
    sku = claim_name(results, machine, identity, {})
    folder = nights_folder(results, machine) / name_of_night(began, head)
    folder.mkdir(parents=True)
    ended = began + datetime.timedelta(hours=1)
    status = {
        "schema": 1, "machine": machine, "sku": sku, "head": head, "base": "b" * 40, "verdict": verdict,
        "exit_code": EXIT_CODES[verdict], "headline": f"{verdict}: of {machine}",
        "finished": ended.isoformat() if finished else None, "steps": [],
    }  # fmt: skip
    (folder / "status.json").write_text(as_json(status | told))
    (folder / "summary.md").write_text(f"## {machine}\n")
    save_state(results, machine, State(last_good="b" * 40, last_measured=head, at=ended.isoformat()))
    for place, text in ((f"asv/{machine}/{head[:8]}-env.json", asv_file(head)), ("asv/benchmarks.json", machine)):
        (results / place).parent.mkdir(parents=True, exist_ok=True)
        (results / place).write_text(text)
    passes = results / "asv" / "provenance" / machine / f"{head[:12]}-env.jsonl"
    passes.parent.mkdir(parents=True, exist_ok=True)
    passes.write_text(json.dumps({"pass": machine, "at": ended.isoformat()}) + "\n")
    return folder
