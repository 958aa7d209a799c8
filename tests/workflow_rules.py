"""What a workflow may be, as rules over its text; each returns what breaks it, a line per offence."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".github" / "workflows"

READS = {"contents": "read"}
PERMISSIONS = {
    "ci.yml": {"check": READS, "compare": READS},
    "comment.yml": {"comment": {"actions": "read", "contents": "read", "pull-requests": "write"}},
    "nightly-gpu.yml": {
        "measure": {"contents": "write", "issues": "write"},
        "site": {"contents": "read", "id-token": "write", "pages": "write"},
        "watchdog": READS,
    },
}
"""All that a job may do. A job that is not here may do nothing, and is an offence."""

PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
HAVE_TOKEN = frozenset({"GITHUB_TOKEN", "github-token"})
LETS_OUT = re.compile(r"\bsecrets\b|toJSON\((github|env)\)|\bset -x\b|github\.token\b")


def texts():
    """Every workflow, by name."""
    return {path.name: path.read_text() for path in sorted(FOLDER.iterdir())}


def jobs(text):
    """By name."""
    return yaml.safe_load(text)["jobs"]


def steps(text):
    """Each with the name of its job."""
    return [(name, step) for name, job in jobs(text).items() for step in job["steps"]]


def commands(text):
    """What steps run, in order."""
    return [step["run"] for _, step in steps(text) if "run" in step]


def triggers(text):
    return yaml.safe_load(text)[True]  # YAML 1.1 reads `on` as a truth value


# The rules.


def loose_actions(name, text):
    """An action is the commit that was looked at, and says of which version that is."""
    used = [line.partition("uses:")[2].strip() for line in text.splitlines() if "uses:" in line]
    return [f"{name}: {each}" for each in used if not PINNED.fullmatch(each)]


def loose_permissions(name, text):
    """Nothing for the workflow, and for each job what the table says."""
    whole = yaml.safe_load(text).get("permissions")
    found = [] if whole == {} else [f"{name}: permissions {whole}"]
    allowed = PERMISSIONS.get(name, {})
    given = {job: told.get("permissions") for job, told in jobs(text).items()}
    return found + [f"{name}: {job}: {told}" for job, told in given.items() if told is None or told != allowed.get(job)]


def pasted_expressions(name, text):
    """What GitHub puts into a command is code there; into a variable it is a value."""
    return [f"{name}: {command}" for command in commands(text) if "${{" in command]


def loose_secrets(name, text):
    """The run's own token goes where it is needed and nowhere else; there are no other secrets."""
    lines = [line.strip() for line in text.splitlines()]
    allowed = {f"{key}: ${{{{ github.token }}}}" for key in HAVE_TOKEN}
    return [f"{name}: {line}" for line in lines if LETS_OUT.search(line) and line not in allowed]


def kept_credentials(name, text):
    """A checkout says whether git may push afterwards, and only in a job that pushes it may."""
    writes = {job for job, told in PERMISSIONS.get(name, {}).items() if told.get("contents") == "write"}
    checkouts = [(job, step) for job, step in steps(text) if "actions/checkout@" in step.get("uses", "")]
    kept = [(job, step.get("with", {}).get("persist-credentials")) for job, step in checkouts]
    return [f"{name}: {job}: persist-credentials {told}" for job, told in kept if told is not (job in writes)]


def unguarded(name, text):
    """Nothing runs for ever, and nothing runs beside itself."""
    whole = "concurrency" in yaml.safe_load(text)
    told = jobs(text).items()
    endless = [f"{name}: {job}: no timeout" for job, each in told if "timeout-minutes" not in each]
    writers = {job: each for job, each in told if each.get("permissions") != READS}
    crowds = [job for job, each in writers.items() if not whole and "concurrency" not in each]
    return endless + [f"{name}: {job}: no concurrency" for job in crowds]


def strangers(name, text):
    """Code of a pull request never runs with the rights of the main branch."""
    found = [f"{name}: on {each}" for each in triggers(text) if each == "pull_request_target"]
    refs = [step.get("with", {}).get("ref", "") for _, step in steps(text)]
    return found + [f"{name}: checks out {ref}" for ref in refs if "github." in ref]


RULES = (
    loose_actions, loose_permissions, pasted_expressions, loose_secrets, kept_credentials, unguarded, strangers
)  # fmt: skip
