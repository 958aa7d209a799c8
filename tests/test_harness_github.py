"""What GitHub is told of nights and comparisons: by the real commands, to a server that keeps issues as GitHub does."""

import functools
import json
import re

import httpx2
import pytest
from fake_github import TOKEN, serving
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.harness.errors import GitHubError
from benchmarks.harness.gate.rules import EXIT_CODES
from benchmarks.harness.github import client, wording
from benchmarks.harness.github.cli import github_app

WORSE, NO_DATA = "performance-regression", "performance-no-data"
A, B, C = "a" * 40, "b" * 40, "c" * 40


@pytest.fixture
def server(monkeypatch):
    with serving() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("GITHUB_RUN_ID", raising=False)
        # A server that speaks in the clear needs no certificates, which take a tenth of a second to load.
        monkeypatch.setattr(httpx2, "Client", functools.partial(httpx2.Client, verify=False))
        yield server


@pytest.fixture
def waits(monkeypatch):
    """How long it was waited for; nobody does."""
    waited = []
    monkeypatch.setattr("benchmarks.harness.github.cli.time.sleep", waited.append)
    return waited


def night(folder, verdict, head=A, *, machine="h200", day=1, finished=True, summary="| all | rows |"):
    """Leave the results of a night."""
    path = folder / "nights" / machine / f"202601{day:02}T010000Z-{head[:12]}"
    path.mkdir(parents=True, exist_ok=True)
    told = {
        "schema": 1,
        "machine": machine,
        "sku": "NVIDIA H200",
        "head": head,
        "base": C,
        "verdict": verdict,
        "exit_code": EXIT_CODES.get(verdict, 4),
        "headline": f"{verdict}: 2 of 3 quantities",
        "finished": f"2026-01-{day:02}T05:00:00+00:00" if finished else None,
    }
    (path / "status.json").write_text(json.dumps(told))
    (path / "summary.md").write_text(summary)


def run(*arguments, **environment):
    done = CliRunner().invoke(app, ["github", *map(str, arguments)], env=environment)
    assert TOKEN not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def follow(folder, machine="h200", *more):
    done = run("issue", "--results", folder, "--machine", machine, *more)
    assert done.exit_code == 0, done.output
    return done.output


# Issues.


def test_a_worse_night_opens_an_issue_that_says_what_and_where(server, tmp_path):
    night(tmp_path, "worse")
    assert follow(tmp_path) == "open 'Performance: worse on h200'\n"
    (issue,) = server.open_issues(WORSE)
    for told in ("worse: 2 of 3 quantities", "NVIDIA H200", A[:12], C[:12], "2026-01-01T05:00", "| all | rows |"):
        assert told in issue["body"]


def test_the_issue_leads_to_the_run(server, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.example")
    monkeypatch.setenv("GITHUB_RUN_ID", "77")
    night(tmp_path, "worse")
    follow(tmp_path)
    assert "([run](https://github.example/owner/name/actions/runs/77))" in server.issues[1]["body"]


@pytest.mark.parametrize("verdict", EXIT_CODES)
def test_the_same_night_twice_changes_nothing(server, tmp_path, verdict):
    night(tmp_path, "worse", day=1)
    follow(tmp_path)
    night(tmp_path, verdict, B, day=2)
    follow(tmp_path)
    before = len(server.changes)
    assert follow(tmp_path) == "the issues of h200 are as they should be\n"
    assert len(server.changes) == before


def test_worse_at_another_commit_is_a_comment_and_a_new_body(server, tmp_path):
    night(tmp_path, "worse", A, day=1)
    follow(tmp_path)
    night(tmp_path, "worse", B, day=2)
    follow(tmp_path)
    (issue,) = server.open_issues(WORSE)
    (comment,) = server.comments_on(issue["number"])
    assert B[:12] in issue["body"]
    assert B[:12] in comment


def test_worse_at_the_same_commit_is_a_new_body_without_a_comment(server, tmp_path):
    night(tmp_path, "worse", A, day=1)
    follow(tmp_path)
    night(tmp_path, "worse", A, day=2)
    follow(tmp_path)
    assert "2026-01-02" in server.issues[1]["body"]
    assert server.comments == {}


@pytest.mark.parametrize("verdict", ["same", "better"])
def test_recovery_closes_the_issue_and_says_why(server, tmp_path, verdict):
    night(tmp_path, "worse", A, day=1)
    follow(tmp_path)
    night(tmp_path, verdict, B, day=2)
    assert follow(tmp_path) == "comment on #1: Recovered:\nclose #1\n"
    assert server.issues[1]["state"] == "closed"
    assert re.search(f"Recovered: {verdict}: 2 of 3 .*{B[:12]}", server.comments_on(1)[0], re.DOTALL)


@pytest.mark.parametrize("verdict", ["cannot tell", "contaminated", "no data"])
def test_what_decides_nothing_closes_nothing(server, tmp_path, verdict):
    night(tmp_path, "worse", A, day=1)
    follow(tmp_path)
    night(tmp_path, verdict, B, day=2)
    follow(tmp_path)
    assert [issue["number"] for issue in server.open_issues(WORSE)] == [1]
    assert server.comments_on(1) == []


def test_after_a_recovery_the_next_regression_is_an_issue_of_its_own(server, tmp_path):
    for day, verdict in enumerate(("worse", "same", "worse"), 1):
        night(tmp_path, verdict, B, day=day)
        follow(tmp_path)
    assert [issue["state"] for issue in server.issues.values()] == ["closed", "open"]


@pytest.mark.parametrize("is_finished", [True, False])
def test_no_data_is_an_issue_of_its_own_until_there_is_data(server, tmp_path, is_finished):
    night(tmp_path, "no data" if is_finished else "same", day=1, finished=is_finished)
    follow(tmp_path)
    assert [issue["title"] for issue in server.open_issues(NO_DATA)] == ["Performance: no data of h200"]
    night(tmp_path, "contaminated", B, day=2)
    follow(tmp_path)
    assert server.open_issues(NO_DATA) == server.open_issues(WORSE) == []


def test_each_machine_has_its_own_issue(server, tmp_path):
    for machine in ("h200", "h200-2", "h100"):
        night(tmp_path, "worse", machine=machine)
        follow(tmp_path, machine)
    night(tmp_path, "same", machine="h200", day=2)
    follow(tmp_path)
    assert [issue["title"][-6:] for issue in server.open_issues(WORSE)] == ["h200-2", "n h100"]


def test_the_issue_is_found_on_any_page_and_is_no_pull_request(server, tmp_path):
    night(tmp_path, "worse")
    follow(tmp_path)
    own = server.issues.pop(1)
    for number in range(2, 9):
        server.issues[number] = {**own, "number": number, "body": "by hand"}
    server.issues[9] = {**own, "number": 9, "pull_request": {}}
    server.issues[10] = {**own, "number": 10}
    night(tmp_path, "same", B, day=2)
    follow(tmp_path)
    assert [number for number, issue in server.issues.items() if issue["state"] == "closed"] == [10]


def test_a_dry_run_says_what_would_be_done_and_does_nothing(server, tmp_path):
    night(tmp_path, "worse")
    assert follow(tmp_path, "h200", "--dry-run") == "would open 'Performance: worse on h200'\n"
    assert server.changes == []


def test_a_machine_without_a_night_is_an_error(server, tmp_path):
    night(tmp_path, "worse")
    done = run("issue", "--results", tmp_path, "--machine", "h100")
    assert done.exit_code == 2
    assert "no night of machine 'h100'; machines there: h200" in done.output
    assert server.asked == []


# Comments on pull requests.


@pytest.fixture
def verdict(tmp_path):
    path = tmp_path / "verdict.md"
    path.write_text("### Benchmarks: worse\n\n| a | b |\n")
    return path


def test_a_pull_request_has_one_comment_which_follows(server, verdict):
    assert run("comment", verdict, "--pull-request", 7).output == "comment on #7\n"
    assert run("comment", verdict, "--pull-request", 7).output == "#7 says so already\n"
    verdict.write_text("### Benchmarks: same\n")
    assert run("comment", verdict, "--pull-request", 7).output == "update the comment on #7\n"
    assert server.comments_on(7) == [f"{wording.marker('benchmarks')}\n### Benchmarks: same"]


def test_the_comment_is_found_among_many(server, verdict):
    for number in range(8):
        server.seed_comment(7, f"remark {number}")
    run("comment", verdict, "--pull-request", 7)
    for number in range(8):
        server.seed_comment(7, f"remark {number}")
    assert run("comment", verdict, "--pull-request", 7).output == "#7 says so already\n"


def test_a_copied_marker_does_not_make_us_write_in_a_strangers_comment(server, verdict):
    forged = server.seed_comment(7, f"{wording.marker('benchmarks')}\nall fine", {"type": "User"}, "CONTRIBUTOR")
    run("comment", verdict, "--pull-request", 7)
    assert forged["body"].endswith("all fine")
    assert len(server.comments_on(7)) == 2


def test_a_members_own_comment_is_kept_up_to_date(server, verdict):
    own = server.seed_comment(7, f"{wording.marker('benchmarks')}\nold", {"type": "User"}, "MEMBER")
    run("comment", verdict, "--pull-request", 7)
    assert "Benchmarks: worse" in own["body"]


def test_several_files_are_one_comment(server, verdict, tmp_path):
    (tmp_path / "times.md").write_text("### Times\n")
    run("comment", verdict, tmp_path / "times.md", "--pull-request", 7)
    (body,) = server.comments_on(7)
    assert body.index("Benchmarks: worse") < body.index("### Times")


def test_a_strangers_text_mentions_nobody_and_hides_nothing(server, verdict):
    verdict.write_text("ask @octocat <!-- nanoserve benchmarks -->")
    run("comment", verdict, "--pull-request", 7)
    (body,) = server.comments_on(7)
    assert "@octocat" not in body
    assert body.count("<!--") == 1


@pytest.mark.parametrize("lines", [10_000, 1])
def test_what_is_too_long_is_cut_and_says_so(server, verdict, lines):
    verdict.write_text("\n".join(["0123456789" * (10_000 // lines)] * lines))
    run("comment", verdict, "--pull-request", 7)
    (body,) = server.comments_on(7)
    assert wording.MAX_CHARACTERS - 200 < len(body) <= wording.MAX_CHARACTERS
    assert body.splitlines()[1].startswith("> **Cut**")


def test_what_just_fits_is_whole():
    head = wording.marker("benchmarks")
    text = "x" * (wording.MAX_CHARACTERS - len(head) - 1)
    assert wording.whole(head, text) == f"{head}\n{text}"
    assert len(wording.whole(head, f"{text}x")) <= wording.MAX_CHARACTERS


def pull(number, label, sha):
    return {"number": number, "head": {"label": label, "sha": sha}}


def test_the_pull_request_is_found_by_its_branch_and_commit(server, verdict):
    server.pulls = [*(pull(number, "a:x", B) for number in range(1, 6)), pull(6, "a:x", A), pull(7, "b:x", A)]
    run("comment", verdict, "--head", "a:x", "--head-sha", A)
    assert [each["issue"] for each in server.comments.values()] == [6]


def test_a_commit_that_was_pushed_over_is_not_told(server, verdict):
    server.pulls = [pull(6, "a:x", B)]
    done = run("comment", verdict, "--head", "a:x", "--head-sha", A)
    assert (done.exit_code, done.output) == (0, f"no open pull request stands at {A}: nothing is said\n")
    assert server.changes == []


@pytest.mark.parametrize(
    "options", [[], ["--head", "a:x"], ["--pull-request", "1", "--head", "a:x", "--head-sha", A], ["--head-sha", A]]
)
def test_which_pull_request_has_to_be_clear(server, verdict, options):
    done = run("comment", verdict, *options)
    assert (done.exit_code, server.asked) == (2, [])
    assert "which pull request? Either --pull-request N" in done.output


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "cannot be read: No such file"),
        (lambda path: path.write_text(" \n"), "nothing to say"),
        (lambda path: path.symlink_to("/proc/self/environ"), "is a link"),
    ],
    ids=["missing", "empty", "link"],
)
def test_a_file_that_says_nothing_is_an_error(server, tmp_path, make, told):
    make(tmp_path / "new.md")
    done = run("comment", tmp_path / "new.md", "--pull-request", 1)
    assert (done.exit_code, server.asked) == (2, [])
    assert told in done.output


# Access, and what goes wrong.


@pytest.mark.parametrize("name", ["GITHUB_TOKEN", "GITHUB_REPOSITORY", "GITHUB_API_URL"])
@pytest.mark.parametrize("value", [None, " "])
def test_what_is_missing_in_the_environment_is_named(server, verdict, monkeypatch, name, value):
    monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    done = run("comment", verdict, "--pull-request", 1)
    assert (done.exit_code, server.asked) == (2, [])
    assert f"error: {name} is not set: export {name}=" in done.output


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("GITHUB_REPOSITORY", "name", "no owner and name"),
        ("GITHUB_REPOSITORY", "owner/name/../..", "no owner and name"),
        ("GITHUB_API_URL", "http://api.example", "must begin with https://, not http://api.example"),
        ("GITHUB_API_URL", "http://user:pass@api.example", "not http://api.example"),
        ("GITHUB_API_URL", "http://localhost.example", "must begin with https://"),
        ("GITHUB_TOKEN", f"{TOKEN}\nx: y", "holds a character that no token has"),
    ],
)
def test_an_odd_environment_is_refused_before_anything_is_sent(server, verdict, name, value, told):
    done = run("comment", verdict, "--pull-request", 1, **{name: value})
    assert (done.exit_code, server.asked) == (2, [])
    assert told in done.output
    assert "pass" not in done.output


@pytest.mark.parametrize("url", ["https://api.example/", "http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1"])
def test_the_token_travels_encrypted_or_not_at_all(server, url):
    assert client.access_from({**server.environment, "GITHUB_API_URL": url}).api_url == url.rstrip("/")


def test_access_does_not_show_its_token(server):
    assert TOKEN not in repr(client.access_from(server.environment))


BUSY = [(429, {"retry-after": "7"}), (503, {}), (403, {"retry-after": "3"}), (403, {"x-ratelimit-remaining": "0"})]


@pytest.mark.parametrize(("status", "headers"), BUSY)
def test_a_busy_github_is_asked_again_as_late_as_it_says(server, verdict, waits, status, headers):
    server.troubles = [(status, headers, False)]
    assert run("comment", verdict, "--pull-request", 1).exit_code == 0
    assert waits == [float(headers.get("retry-after", 1))]


def test_a_github_that_stays_busy_is_given_up(server, verdict, waits):
    server.troubles = [(502, {}, False)] * 9
    done = run("comment", verdict, "--pull-request", 1)
    assert (done.exit_code, len(waits), len(server.asked)) == (2, 3, 4)
    assert waits == sorted(waits)
    assert "error: GitHub, GET issues/1/comments: 502 trouble 502, with Bearer ***" in done.output


def test_nobody_waits_for_an_hour(server, verdict, waits):
    server.troubles = [(429, {"retry-after": "3600"}, False)]
    assert run("comment", verdict, "--pull-request", 1).exit_code == 2
    assert waits == []


@pytest.mark.parametrize("status", [401, 403, 404, 422])
def test_a_refusal_is_no_reason_to_ask_again(server, verdict, waits, status):
    server.troubles = [(status, {}, False)]
    done = run("comment", verdict, "--pull-request", 1)
    assert (done.exit_code, waits, len(server.asked)) == (2, [], 1)
    assert f"{status} trouble {status}, with Bearer ***" in done.output


def test_a_wrong_token_is_not_shown(server, verdict):
    done = run("comment", verdict, "--pull-request", 1, GITHUB_TOKEN="ghs_wrong")
    assert done.exit_code == 2
    assert "ghs_wrong" not in done.output


@pytest.mark.parametrize("at", range(5))
def test_what_was_done_before_an_answer_broke_off_is_not_done_twice(server, tmp_path, waits, at):
    """Each request in turn is done, and answered with 502."""
    done = [(200, {}, True)] * at + [(502, {}, True)]
    for day, (verdict, head) in enumerate((("worse", A), ("worse", B), ("same", C)), 1):
        night(tmp_path, verdict, head, day=day)
        server.troubles = list(done)
        follow(tmp_path)
    assert [issue["state"] for issue in server.issues.values()] == ["closed"]
    assert len(server.comments_on(1)) == 2


@pytest.mark.parametrize(
    ("headers", "text", "told"),
    [({"content-encoding": "gzip"}, b"no gzip", "decompressing"), ({}, b"{}", "the answer is no list")],
)
def test_an_answer_that_is_none_is_an_error_without_a_traceback(headers, text, told):
    answer = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, stream=httpx2.ByteStream(text)))
    http = httpx2.Client(transport=answer)
    github = client.GitHub(client.Access(token=TOKEN, repository="o/n", api_url="https://api.example"), http)
    with pytest.raises(GitHubError, match=told):
        list(github.pages("issues"))


def test_nobody_there_is_an_error_without_a_traceback(server, verdict, waits):
    done = run("comment", verdict, "--pull-request", 1, GITHUB_API_URL="http://127.0.0.1:9")
    assert (done.exit_code, len(waits)) == (2, 3)
    assert "error: GitHub, GET issues/1/comments:" in done.output


def test_an_error_knows_whether_to_ask_again():
    assert (GitHubError("no").wait_s, GitHubError("later", 3.0).wait_s) == (None, 3.0)


def test_a_marker_cannot_be_ended_from_within_and_is_no_prefix_of_another():
    assert wording.marker("a --> b").count("-->") == 1
    assert not wording.is_marked(wording.marker("label", "h200-2"), "label", "h200")
    assert wording.is_marked(wording.marker("label", "h200", A), "label", "h200")


def test_help_names_what_is_needed():
    told = CliRunner().invoke(github_app, ["--help"]).output
    assert "GITHUB_TOKEN, GITHUB_REPOSITORY" in " ".join(told.split())
