"""What a newcomer types: curl as the tokens come, and the README's server, command and snippet as they stand there."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from server_here import held_engine, serving
from test_tokenizer import smollm2  # noqa: F401 - a fixture

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
SECTION = README.partition("\n## As a server\n")[2].partition("\n## ")[0]
ADDRESS = "http://127.0.0.1:8000"

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


@needs_curl
def test_curl_shows_lines_while_the_rest_is_not_computed():
    engine, gate = held_engine()
    with serving(engine) as running, contextlib.ExitStack() as stack:
        body = json.dumps({"prompt": "Hello", "max_tokens": 3, "stream": True})
        command = ["curl", "-sN", f"{running.url}/v1/completions", "-H", "content-type: application/json", "-d", body]
        curl = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(gate.release, 100)  # whatever happens, the engine must be able to end
        for num_steps, wanted in enumerate("Ho!", 1):
            gate.release()
            line = curl.stdout.readline()
            assert json.loads(line.removeprefix("data: "))["choices"][0]["text"] == wanted
            assert engine.counts.num_steps <= num_steps + 1  # the next one waits at the gate
            assert curl.stdout.readline() == "\n"
        assert curl.stdout.read() == "data: [DONE]\n\n"


def blocks():
    """The indented blocks of the section, as they would be pasted."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", SECTION, flags=re.M)
    return [textwrap.dedent(each).strip() for each in found]


@pytest.fixture(scope="module")
def served(smollm2):  # noqa: F811
    """The README's server, at a free port; its URL."""
    line = blocks()[0].splitlines()[0]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    word, *arguments = shlex.split(line, comments=True)
    command = [sys.executable, "-c", f"from {word}.cli import main; main()", *arguments, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == f"nanoserve: serving smollm2-135m at http://127.0.0.1:{port}\n"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()


@needs_curl
@pytest.mark.slow
def test_the_command_of_the_readme_streams_an_answer(served):
    command = blocks()[0].partition("\n")[2]
    assert command.startswith("curl -N")
    assert ADDRESS in command
    done = subprocess.run(
        ["bash", "-c", command.replace(ADDRESS, served)], capture_output=True, text=True, timeout=120, check=True
    )
    *chunks, last = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert last == "[DONE]"
    text = "".join(json.loads(each)["choices"][0]["text"] for each in chunks)
    assert "Paris" in text


@pytest.mark.slow
def test_the_snippet_of_the_readme_prints_an_answer(served):
    (snippet,) = [each for each in blocks() if each.startswith("from openai")]
    assert ADDRESS in snippet
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    command = [sys.executable, "-c", snippet.replace(ADDRESS, served)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=quiet) as process:
        said = process.stdout.read(8)  # it is drawn, and may go on as long as the context
        process.terminate()
    assert len(said) == 8
