"""As much of GitHub's REST API as the project speaks, on a port of this machine: issues, comments, pull requests."""

import contextlib
import http.server
import json
import re
import threading
from urllib.parse import parse_qs, urlsplit

TOKEN = "ghs_x7Qm2LZ9"
BOT = {"login": "github-actions[bot]", "type": "Bot"}
REPOSITORY = "owner/name"
PAGE = 3
"""So few on a page that a test has several; GitHub's hundred is only the most that can be asked for."""

ROUTES = (
    ("GET", r"issues", "list_issues"),
    ("POST", r"issues", "open_issue"),
    ("PATCH", r"issues/(\d+)", "change_issue"),
    ("GET", r"issues/(\d+)/comments", "list_comments"),
    ("POST", r"issues/(\d+)/comments", "add_comment"),
    ("PATCH", r"issues/comments/(\d+)", "change_comment"),
    ("GET", r"pulls", "list_pulls"),
)


class FakeGitHub(http.server.ThreadingHTTPServer):
    """Keeps what it is told. `troubles` come first, one a request: a status, headers, and whether it is done."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.issues, self.comments, self.pulls = {}, {}, []
        self.troubles, self.asked = [], []

    @property
    def environment(self):
        return {"GITHUB_TOKEN": TOKEN, "GITHUB_REPOSITORY": REPOSITORY, "GITHUB_API_URL": self.url}

    @property
    def changes(self):
        """The requests that were no question."""
        return [asked for asked in self.asked if not asked.startswith("GET")]

    def comments_on(self, number):
        return [each["body"] for each in self.comments.values() if each["issue"] == number]

    def open_issues(self, label):
        listed = self.list_issues({"state": "open", "labels": label}, None)
        return [each for each in listed if "pull_request" not in each]

    def seed_comment(self, number, body, user=BOT, association="NONE"):
        key = 1000 + len(self.comments)
        told = {"id": key, "issue": number, "body": body, "user": user, "author_association": association}
        return self.comments.setdefault(key, told)

    # What the routes do.

    def list_issues(self, query, _):
        wanted = query.get("labels", "")
        listed = [each for each in self.issues.values() if each["state"] == query.get("state", "open")]
        return [each for each in listed if not wanted or wanted in [label["name"] for label in each["labels"]]]

    def open_issue(self, _, told):
        number = len(self.issues) + 1
        labels = [{"name": name} for name in told.get("labels", ())]
        self.issues[number] = {"number": number, "state": "open", "user": BOT, **told, "labels": labels}
        return self.issues[number]

    def change_issue(self, _, told, number):
        self.issues[int(number)].update(told)
        return self.issues[int(number)]

    def list_comments(self, _, __, number):
        return [each for each in self.comments.values() if each["issue"] == int(number)]

    def add_comment(self, _, told, number):
        return self.seed_comment(int(number), told["body"])

    def change_comment(self, _, told, key):
        self.comments[int(key)].update(told)
        return self.comments[int(key)]

    def list_pulls(self, query, _):
        return [each for each in self.pulls if each["head"]["label"] == query.get("head", each["head"]["label"])]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer takes 40 ms

    def do_GET(self):
        path, _, _ = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.asked.append(f"{self.command} {path.removeprefix(f'/repos/{REPOSITORY}/')}")
        status, headers, is_done = self.server.troubles.pop(0) if self.server.troubles else (200, {}, True)
        told = self.answer(path, json.loads(body or "null")) if is_done else None
        if status == 200 and told is None:
            status = 404
        if status != 200:
            told = {"message": f"trouble {status}, with {self.headers['authorization']}"}
        self.reply(status, told, headers)

    def do_POST(self):
        self.do_GET()

    def do_PATCH(self):
        self.do_GET()

    def answer(self, path, told):
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        for method, pattern, name in ROUTES:
            found = re.fullmatch(f"/repos/{REPOSITORY}/{pattern}", path)
            if found and method == self.command and self.headers["authorization"] == f"Bearer {TOKEN}":
                return self.paged(getattr(self.server, name)(query, told, *found.groups()), query)
        return None

    def paged(self, told, query):
        """A page of a list; whether another follows is said in a header."""
        if not isinstance(told, list):
            return told
        page = int(query.get("page", 1))
        self.link = f'<{self.server.url}/?page={page + 1}>; rel="next"' if len(told) > page * PAGE else ""
        return told[(page - 1) * PAGE : page * PAGE]

    def reply(self, status, told, headers):
        data = json.dumps(told).encode()
        self.send_response(status)
        link = {"link": self.link} if getattr(self, "link", "") else {}
        for name, value in {**headers, **link, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        self.link = ""

    def log_message(self, *_):
        """Say nothing."""


@contextlib.contextmanager
def serving():
    server = FakeGitHub()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
