"""`nanoserve serve` up to where the socket is open: what it takes, what it refuses, and before what."""

import socket
import sys
import types

import pytest

from nanoserve import cli
from nanoserve.config import EngineConfig, SchedulerConfig
from nanoserve.engine import Engine
from nanoserve.errors import ConfigError
from nanoserve.server import serve
from nanoserve.server.settings import ServerConfig

LEFT_OUT = {
    "seed": "it belongs to each request",
    "num_blocks": "kv_memory sizes the pool",
    "block_size": "nobody who serves has a reason to change it",
    "watermark_blocks": "as block_size",
    "chunks_prefill": "a server whose long prompts stop everybody else is none",
    "is_static": "nor is one whose requests wait for each other",
}


@pytest.fixture
def command(monkeypatch, capsys):
    """Call `nanoserve serve`; nothing is loaded or served: what would be is told."""
    told = {}

    def call(*arguments):
        monkeypatch.setattr(Engine, "load", lambda **options: told.update(options) or FakeEngine())
        monkeypatch.setattr(serve, "run", lambda server, listener, ready: told.update(server=server) or ready())
        monkeypatch.setattr("nanoserve.server.app.Server", lambda engine, settings: settings)
        monkeypatch.setattr(sys, "argv", ["nanoserve", "serve", *arguments])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, told, capsys.readouterr()

    return call


class FakeEngine:
    notes = ("it is not what it could be",)

    def warm_up(self):
        return 0


def test_options_reach_the_engine_and_the_server(command):
    status, told, printed = command(
        "--model", "some/folder/tiny", "--port", "0", "--max-running", "3", "--cache", "growing", "--max-queued", "7",
        "--api-key", "secret", "--request-timeout-s", "1.5",
    )  # fmt: skip
    assert status == 0
    assert (told["model"], told["max_running"], told["cache"]) == ("some/folder/tiny", 3, "growing")
    settings = told["server"]
    assert (settings.model_name, settings.max_queued, settings.api_key) == ("tiny", 7, "secret")
    assert settings.request_timeout_s == 1.5
    assert "serving tiny at http://127.0.0.1:" in printed.out
    assert "it is not what it could be" in printed.err
    assert "secret" not in printed.out + printed.err


def test_a_key_may_come_from_the_environment(command, monkeypatch):
    monkeypatch.setenv("NANOSERVE_API_KEY", "hidden")
    assert command("--port", "0")[1]["server"].api_key == "hidden"


def test_every_setting_is_an_option_or_left_out_on_purpose(command):
    _, _, printed = command("--help")
    for name in (*EngineConfig.option_names(), *SchedulerConfig.option_names(), *ServerConfig.option_names()):
        assert (f"--{name.replace('_', '-')} " in printed.out) != (name in LEFT_OUT), name


BAD = {
    "--port": ("99999", "0 to 65535"),
    "--model-name": ("two\nlines", "in a line"),
    "--api-key": ("two words", "without spaces"),
    "--max-queued": ("-1", "0 or more"),
    "--max-body-bytes": ("0", "at least 1"),
    "--request-timeout-s": ("inf", "finite"),
    "--drain-timeout-s": ("-1", "0 or more"),
    "--max-running": ("0", "at least 1"),
    "--max-step-tokens": ("8", "max_running"),
    "--cache": ("pagd", "paged"),
    "--host": ("no.such.host.invalid", "--host"),
}


@pytest.mark.parametrize(("option", "value", "words"), [(name, *bad) for name, bad in BAD.items()])
def test_a_bad_value_is_refused_before_a_model_is_loaded(command, option, value, words):
    status, told, printed = command(option, value)
    assert (status, told) == (2, {})
    assert words in printed.err
    assert len([line for line in printed.err.splitlines() if "error" in line]) == 1


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(command):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, told, printed = command("--port", str(port))
    assert (status, told) == (2, {})
    assert f"cannot listen at 127.0.0.1 port {port}" in printed.err


def test_an_address_of_the_sixth_version_is_written_as_one():
    try:
        listener = serve.listen(ServerConfig(host="::1", port=0))
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert serve.url_of(listener).startswith("http://[::1]:")


def test_unknown_settings_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'prot'.*port"):
        ServerConfig.from_options({"prot": 1})


@pytest.mark.parametrize("host", ["a" * 64 + ".com", "e..x"])
def test_a_host_that_cannot_be_one_is_told_in_a_line(host):
    with pytest.raises(ConfigError, match="cannot listen at"):
        serve.listen(ServerConfig(host=host, port=0))


def test_a_port_that_somebody_took_while_the_model_was_loaded_is_told_in_a_line():
    """Both may bind it, as long as neither listens."""
    with serve.listen(ServerConfig(port=0)) as first:
        settings = ServerConfig(port=first.getsockname()[1])
        with serve.listen(settings) as second:
            first.listen()
            with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1 port {settings.port}: Address already"):
                serve.run(types.SimpleNamespace(settings=settings), second, lambda: None)
