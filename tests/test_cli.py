"""The command line from outside: what it prints and when, its exit status, and one line for every mistake."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

import nanoserve
from nanoserve import catalog, cli, memory, weights
from nanoserve.cache.sizing import plan_pool
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.errors import FetchError
from nanoserve.hf_config import to_hf_config

COMMAND = shutil.which("nanoserve", path=str(Path(sys.executable).parent)) or "nanoserve"
COMMANDS = ("generate", "chat", "models", "memory")
# Threads that wait for each other are slow where cores are shared with other tests; one is enough here.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ENDLESS = ("generate", "x", "--model", "tiny", "--max-new-tokens", "1000", "--ignore-eos", "--cache", "none")


@pytest.fixture
def main(monkeypatch, capsys):
    """Call the entry point in this process: exit status, standard output, standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["nanoserve", *arguments])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def engine(monkeypatch, capsys):
    """A fake engine that says `a`, `b`, `c` to everything, and a record of what it was asked and had been printed."""
    asked = SimpleNamespace(printed=[], streamed=[], chats=[], notes=())

    def stream(prompt, params):
        asked.streamed.append((prompt, params))
        for text in "abc":
            yield SimpleNamespace(text=text)
            asked.printed.append(capsys.readouterr().out)

    def render_chat(messages):
        asked.chats.append(list(messages))
        return [len(messages)]

    def load(model, before_weights, **options):
        asked.config = EngineConfig(model=model, **options)
        return SimpleNamespace(stream=stream, notes=asked.notes, tokenizer=SimpleNamespace(render_chat=render_chat))

    monkeypatch.setattr(nanoserve.Engine, "load", load)
    return asked


@pytest.fixture
def type_in(monkeypatch, tmp_path):
    """Make these bytes the standard input of this process."""
    opened = []

    def typed(data):
        (tmp_path / "stdin").write_bytes(data)
        opened.append((tmp_path / "stdin").open(encoding="utf-8"))
        monkeypatch.setattr(sys, "stdin", opened[-1])

    yield typed
    for file in opened:
        file.close()


@pytest.fixture
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def trained():
    """The trained model in the cache folder; its tests are skipped where it cannot be fetched."""
    try:
        return catalog.fetch_smollm2()
    except FetchError as error:
        pytest.skip(str(error))


@pytest.fixture
def folder(tmp_path, tiny_config):
    """A checkpoint that lacks its weights only."""
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(tiny_config)))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def machine(monkeypatch, folder):
    """A machine with 64 GiB free, whose default model has the shape of `tiny`; nobody may load weights on it."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 64 * 1024**3)
    monkeypatch.setattr(catalog, "fetch_smollm2", lambda say: folder)
    monkeypatch.setattr(weights, "_fill", lambda *_, **__: pytest.fail("weights were loaded"))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def run(*arguments, **options):
    options = {"capture_output": True, "text": True, "encoding": "utf-8", "env": ENVIRONMENT} | options
    return subprocess.run([COMMAND, *arguments], check=False, **options)


def start(*arguments, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0, "env": ENVIRONMENT}
    return subprocess.Popen([COMMAND, *arguments], **(pipes | options))


# the installed command


def test_generate_continues_a_text_with_the_trained_model(trained):
    done = run("generate", "The capital of France is", "--max-new-tokens", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" Paris.")


@pytest.mark.slow
def test_chat_remembers_the_first_turn_in_the_second(trained):
    done = run("chat", "--temperature", "0", input="What is the capital of France?\nAnd of Italy?\n")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert "Paris" in first
    assert "Rome" in second


def test_chat_answers_one_question_and_ends_at_an_empty_line(trained, main, type_in, one_thread):
    type_in(b"What is the capital of France?\n\nnever read\n")
    status, out, errors = main("chat", "--temperature", "0", "--max-new-tokens", "8")
    assert (status, errors) == (0, "")
    assert "Paris" in out
    assert out.count("\n") == 1


def test_ctrl_c_ends_with_130_and_no_traceback():
    # A shell may have started pytest with Ctrl-C ignored, which children inherit.
    process = start(*ENDLESS, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, b"")


def test_a_reader_that_goes_away_ends_generate_without_a_traceback():
    process = start(*ENDLESS)
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1


def test_a_reader_that_never_came_ends_models_without_a_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        done = run("models", stdout=closed, stderr=subprocess.PIPE, capture_output=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_no_arguments_show_the_help():
    done = run()
    assert "Usage: nanoserve" in done.stdout + done.stderr
    assert all(command in done.stdout + done.stderr for command in COMMANDS)


def test_a_mistake_is_told_in_one_line_with_status_2():
    done = run("generate", "hi", "--dtype", "int3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("nanoserve: error: unknown dtype 'int3'; choose one of: auto, float32, bfloat16, float16\n")


# help


@pytest.mark.parametrize("arguments", [(), *((command,) for command in COMMANDS)])
def test_help_teaches_with_examples_that_work(main, engine, machine, type_in, arguments):
    status, help_text, _ = main(*arguments, "--help")
    assert status == 0
    examples = re.findall(r"^ {4,}(?:.*\| )?(nanoserve .*)$", help_text, re.MULTILINE)
    assert any(example.split()[1] == (arguments or COMMANDS)[0] for example in examples)
    type_in(b"")
    for example in examples:
        assert main(*shlex.split(example)[1:])[::2] == (0, ""), example


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_setting_of_engine_and_sampling_is_an_option_or_left_out_on_purpose(main, command):
    _, help_text, _ = main(command, "--help")
    options = set(re.findall(r"^ +--([\w-]+)", help_text, re.MULTILINE))
    settings = {*EngineConfig.__dataclass_fields__, *SamplingParams.__dataclass_fields__}
    for_servers = {"num_logprobs", "prompt_logprobs", "logit_bias", "presence_penalty", "frequency_penalty"}
    left_out = for_servers | {"generate": set(), "chat": {"stop", "ignore_eos"}}[command]
    assert {name.replace("-", "_") for name in options} - {"help", "system"} == settings - left_out


def test_models_lists_every_name(main):
    status, out, _ = main("models")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == [*catalog.TRAINED, *catalog.SHAPES]


def plan(config, **options):
    defaults = {"bytes_per_number": 4, "block_size": 16, "max_running": 32, "kv_memory": "auto", "keeps_prefixes": True}
    options["max_step_tokens"] = max(2048, options.get("max_running", 32))
    dtype = torch.float32 if options.get("bytes_per_number", 4) == 4 else torch.bfloat16
    return plan_pool(
        config, free_bytes=64 * 1024**3, device_kind="cpu", weights_bytes=memory.weights_bytes(config, dtype),
        **(defaults | options),
    )  # fmt: skip


def test_memory_shows_the_plan_for_a_model_without_its_weights(main, machine, tiny_config):
    assert main("memory", "--device", "cpu", "--dtype", "float32") == (0, f"{plan(tiny_config)}\n", "")
    many = {"max_running": 20_000_000, "max_step_tokens": 20_000_000}  # a position each
    words = ("memory", "--device", "cpu", "--dtype", "float32", "--max-running", "20000000")
    assert main(*words) == (0, f"{plan(tiny_config, **many)}\n", "")
    options = {"bytes_per_number": 2, "block_size": 32, "max_running": 4096, "kv_memory": "25%"}
    status, out, errors = main(
        *("memory", "--model", "llama-3.2-1b", "--device", "cpu", "--dtype", "bfloat16", "--kv-memory", "25%"),
        *("--block-size", "32", "--max-running", "4096"),
    )
    assert (status, out, errors) == (0, f"{plan(catalog.SHAPES['llama-3.2-1b'], **options)}\n", "")


# what reaches the engine, and what comes back


def test_options_reach_the_engine(main, engine):
    main(
        *("generate", "hi", "--model", "m", "--device", "cpu", "--dtype", "bfloat16", "--cache", "none"),
        *("--prefix-cache", "off"),
        *("--max-new-tokens", "3", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.9", "--min-p", "0.1"),
        *("--repetition-penalty", "1.5", "--seed", "7", "--stop", "x", "--stop", "y", "--ignore-eos"),
    )
    assert engine.config == EngineConfig(model="m", device="cpu", dtype="bfloat16", cache="none", prefix_cache="off")
    params = SamplingParams(
        max_new_tokens=3, temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.5, seed=7,
        stop=("x", "y"), ignore_eos=True,
    )  # fmt: skip
    assert engine.streamed == [("hi", params)]


def test_defaults_are_those_of_the_library(main, engine):
    main("generate", "hi")
    assert (engine.config, engine.streamed) == (EngineConfig(), [("hi", SamplingParams())])


def test_text_is_printed_piece_by_piece_as_it_comes(main, engine):
    status, rest, errors = main("generate", "hi")
    assert engine.printed == ["a", "b", "c"]
    assert (status, rest, errors) == (0, "\n", "")


def test_what_does_not_go_as_it_was_meant_to_is_told_beside_the_text(main, engine):
    engine.notes = ("steps run eagerly: out of memory",)
    assert main("generate", "hi") == (0, "\n", "nanoserve: steps run eagerly: out of memory\n")


def test_chat_sends_the_whole_conversation(main, engine, type_in):
    type_in(b"one\n  two  \n\nnever read\n")
    assert main("chat", "--system", "be kind")[0] == 0
    said = [[message["content"] for message in messages] for messages in engine.chats]
    assert said == [["be kind", "one"], ["be kind", "one", "abc", "two"]]
    assert [message["role"] for message in engine.chats[-1]] == ["system", "user", "assistant", "user"]
    assert [prompt for prompt, _ in engine.streamed] == [[2], [4]]


def test_one_seed_gives_one_text(main, one_thread):
    first, again, other = (
        main("generate", "hi", "--model", "tiny", "--temperature", "1", "--max-new-tokens", "5", "--seed", seed)
        for seed in ("1", "1", "2")
    )
    assert first[0] == 0
    assert first == again != other


@pytest.mark.parametrize("prompt", ["   ", "🙂", "a\0b", "\x1b[31m", "a\nb\r\n", "-"])
def test_strange_prompts_are_continued(main, prompt):
    status, out, errors = main("generate", "--model", "tiny", "--max-new-tokens", "2", "--", prompt)
    assert (status, errors) == (0, "")
    assert out.endswith("\n")


def test_text_that_the_terminal_cannot_show_becomes_a_question_mark(main, engine, monkeypatch, tmp_path):
    with (tmp_path / "terminal").open("w", encoding="latin-1") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        engine_says = SimpleNamespace(stream=lambda *_: [SimpleNamespace(text="é🙂!")], notes=())
        monkeypatch.setattr(nanoserve.Engine, "load", lambda *_, **__: engine_says)
        assert main("generate", "hi")[::2] == (0, "")
    assert (tmp_path / "terminal").read_text("latin-1") == "é?!\n"


# mistakes


@pytest.fixture
def refused(main, monkeypatch):
    """Call the command and expect one line with these words on standard error, status 2, and no step of the engine."""

    def step(engine):
        raise AssertionError("the engine ran")

    def call(*arguments, words):
        monkeypatch.setattr(nanoserve.Engine, "step", step)
        status, out, errors = main(*arguments)
        assert (status, out) == (2, "")
        assert re.fullmatch(r"nanoserve: error: [^\n]+\n", errors), errors
        for word in words:
            assert word in errors

    return call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("hi --dtype int3", ["'int3'", "auto, float32, bfloat16, float16"]),
        ("hi --cache ring", ["'ring'", "contiguous, growing, none"]),
        ("hi --max-new-tokens 0", ["max_new_tokens", "at least 1", "0"]),
        ("hi --max-new-tokens -1", ["max_new_tokens", "at least 1", "-1"]),
        ("hi --temperature -1", ["temperature", "0 (greedy)", "-1.0"]),
        ("hi --temperature nan", ["temperature", "nan"]),
        ("hi --temperature inf", ["temperature", "inf"]),
        ("hi --top-k -1", ["top_k", "0 (off) or more", "-1"]),
        ("hi --top-p 0", ["top_p", "above 0 and at most 1", "0.0"]),
        ("hi --top-p 1.5", ["top_p", "1.5"]),
        ("hi --min-p 2", ["min_p", "between 0 and 1", "2.0"]),
        ("hi --repetition-penalty 0", ["repetition_penalty", "between 0.01 and 100", "0.0"]),
        ("hi --repetition-penalty 1e-300", ["repetition_penalty", "between 0.01 and 100"]),
        ("hi --seed 18446744073709551616", ["seed", "18446744073709551616"]),
        ("hi --stop ''", ["stop text is empty"]),
        ("''", ["prompt is empty"]),
        ("'a\udcffb'", ["prompt is not valid UTF-8", "0xff"]),
        ("hi --stop 'a\udcfe'", ["stop text is not valid UTF-8", "0xfe"]),
    ],
)
def test_a_bad_value_is_refused_before_a_model_is_loaded(refused, monkeypatch, arguments, words):
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(nanoserve.Engine, "load", load)
    refused("generate", *shlex.split(arguments), words=words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--kv-memory 0", ["kv_memory must be auto, bytes (800000000)", "'0'"]),
        ("--kv-memory 101%", ["kv_memory must be auto", "'101%'"]),
        ("--block-size 0", ["block_size must be", "0"]),
        ("--max-running 0", ["max_running must be at least 1", "0"]),
        ("--dtype int3", ["'int3'", "auto, float32, bfloat16, float16"]),
        ("--device tpu", ["unknown device 'tpu'", "choose one of: auto, cpu"]),
    ],
)
def test_memory_refuses_a_bad_value_before_a_model_is_sought(refused, monkeypatch, arguments, words):
    monkeypatch.setattr(catalog, "resolve", lambda name: pytest.fail("a model was sought"))
    refused("memory", *shlex.split(arguments), words=words)


def test_memory_refuses_what_this_machine_does_not_have(refused, machine):
    refused("memory", "--kv-memory", "64GiB", words=["'64GiB'", "68,719,476,736 bytes (64.00 GiB)", "weights"])
    refused("memory", "--kv-memory", "1kB", words=["'1kB'", "one block of 16 tokens"])
    refused("memory", "--model", "gpt9", words=["unknown model 'gpt9'", *catalog.SHAPES])


@pytest.mark.parametrize("device", ["tpu", "cuda:99", ""])
def test_an_unknown_device_is_refused_before_a_model_is_sought(refused, monkeypatch, device):
    monkeypatch.setattr(catalog, "resolve", lambda name: pytest.fail("a model was sought"))
    refused("generate", "hi", "--device", device, words=[f"unknown device {device!r}", "choose one of: auto, cpu"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused(refused):
    refused("generate", "hi", "--device", "cuda", words=["unknown device 'cuda'", "no CUDA device"])


@pytest.mark.parametrize("name", ["gpt9", "", "missing.gguf", "a\nb", "a/b/c"])
def test_an_unknown_model_is_refused_with_the_known_ones(refused, name):
    refused("generate", "hi", "--model", name, words=[f"unknown model {name!r}", *catalog.TRAINED, *catalog.SHAPES])


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(refused, tiny_config):
    words = [
        "3000 tokens",
        "max_new_tokens 64",
        f"context of {tiny_config.max_context_tokens}",
        "shorten either by 1016",
    ]
    refused("generate", "a" * 3000, "--model", "tiny", words=words)
    refused("generate", "a", "--model", "tiny", "--max-new-tokens", "1000000000", words=["max_new_tokens 1000000000"])


def test_a_folder_without_config_is_refused(refused, tmp_path):
    refused(
        "generate", "hi", "--model", str(tmp_path), words=[str(tmp_path), "a folder without a config.json", ".gguf"]
    )
    (tmp_path / "x.gguf").mkdir()
    refused("generate", "hi", "--model", str(tmp_path / "x.gguf"), words=["a folder without a config.json"])


@pytest.mark.parametrize("text", ["{", "[]", "{}", ""])
def test_a_folder_with_a_broken_config_is_refused(refused, folder, text):
    (folder / "config.json").write_text(text)
    refused("generate", "hi", "--model", str(folder), words=[str(folder / "config.json")])


def test_a_folder_without_weights_is_refused(refused, folder):
    refused("generate", "hi", "--model", str(folder), words=[str(folder), "model.safetensors"])


def test_a_truncated_safetensors_file_is_refused(refused, folder):
    save_file({"model.embed_tokens.weight": torch.zeros(512, 64)}, folder / "model.safetensors")
    cut(folder / "model.safetensors")
    refused("generate", "hi", "--model", str(folder), words=[str(folder / "model.safetensors"), "truncated"])


def test_a_truncated_or_empty_gguf_file_is_refused(refused, tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((512, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused("generate", "hi", "--model", str(cut(path)), words=[str(path), "truncated"])
    path.write_bytes(b"")
    refused("generate", "hi", "--model", str(path), words=[str(path), "truncated"])


def test_a_message_never_has_two_lines(refused, folder):
    odd = folder / "two\nlines"
    odd.mkdir()
    (odd / "config.json").touch()
    refused("generate", "hi", "--model", str(odd), words=["two lines/tokenizer.json is missing"])


def test_a_cache_folder_that_cannot_be_written_is_told(refused, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    refused("generate", "hi", words=["smollm2-135m could not be written", str(tmp_path / "file"), "set HF_HOME"])


def test_chat_with_a_model_without_a_template_is_refused_before_anything_is_typed(refused, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("asked for a line"))
    refused("chat", "--model", "tiny", words=["no chat template"])


def test_chat_refuses_input_that_is_no_text(refused, engine, type_in):
    type_in(b"a\xffb\n")
    refused("chat", words=["standard input is not valid utf-8"])


def test_chat_refuses_bytes_that_only_look_like_text(refused, engine, type_in):
    refused("chat", "--system", "a\udcff", words=["system message is not valid UTF-8", "0xff"])
    type_in("a\ud83d\n".encode("utf-8", "surrogatepass"))
    sys.stdin.reconfigure(errors="surrogateescape")
    refused("chat", words=["line is not valid UTF-8", "0xed"])
    assert engine.streamed == []


def test_chat_without_any_standard_input_ends_at_once(main, engine, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main("chat") == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("generate", "prompt"),
        ("generate hi there", "there"),
        ("generate hi --tempreture 1", "--tempreture"),
        ("generate hi --top-k many", "--top-k"),
        ("generate hi --temperature warm", "--temperature"),
        ("generate hi --max-new-tokens 1e9", "--max-new-tokens"),
        ("generate hi --model", "--model"),
        ("chat hi", "hi"),
        ("serf", "serf"),
    ],
)
def test_usage_errors_are_readable_and_have_status_2(main, arguments, word):
    status, out, errors = main(*arguments.split())
    assert (status, out) == (2, "")
    *usage, error = errors.splitlines()
    assert error.startswith("Error: ")
    assert word in error
    assert not usage or usage[0].startswith("Usage: nanoserve")
