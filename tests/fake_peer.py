"""A worker that speaks the peers' protocol by hand: what it does when asked is its argument.

It imports nothing of the project, as nothing of it may be installed where a worker runs.
"""

import json
import os
import sys
import time

HOW = json.loads(sys.argv[1]).get("how", "")
MS = 1_000_000


def say(**message):
    shout(json.dumps(message))


def shout(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def answer(ask):
    num, size = len(ask["prompts"]), ask["num_new_tokens"]
    if HOW == "hangs":
        time.sleep(60)
    if HOW == "dies":
        os._exit(3)
    if HOW == "crashes":
        os.abort()
    if HOW == "chatters":
        shout("progress: 50 %")
    if HOW == "refuses":
        return {"failed": "no batching API"}
    size -= HOW == "is short"
    stamps = [(10 + 2 * i) * MS for i in range(size)]
    if HOW == "goes back":
        stamps.reverse()
    return {"sent_ns": 0, "stamps_ns": [stamps] * num, "token_ids": [list(range(size))] * num}


if HOW == "does not load":
    say(failed="OSError: no such weights")
    sys.exit(0)
say(ready={"versions": {"fake": "1"}})
for line in sys.stdin:
    say(**answer(json.loads(line)))
