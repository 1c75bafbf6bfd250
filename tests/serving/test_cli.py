"""The console script from outside: exit codes, help, and clear lines."""

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import grpc
import pytest
from harness import on_server, run_cli

from tpuspec import platform
from tpuspec.serving.cli import make_parser
from tpuspec.serving.client import OPTIONS, BlockingClient, make_request


@pytest.mark.parametrize("args", [["--help"], ["serve", "--help"], ["generate", "--help"],
                                  ["demo", "--help"], ["plan", "--help"], ["convert", "--help"],
                                  ["inspect", "--help"], ["batch", "--help"], ["bench", "--help"],
                                  ["report", "--help"], ["profile", "--help"]])
def test_help_is_instant_and_imports_no_jax(args):
    code = ("import sys; from tpuspec.serving.cli import main\n"
            "try: main()\n"
            "finally: assert not {'jax', 'orbax', 'grpc'} & set(sys.modules), 'slow imports'")
    result = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert result.returncode == 0 and "usage: tpuspec" in result.stdout, result.stderr


@pytest.mark.parametrize("args, message", [
    ([], "COMMAND"), (["sing"], "invalid choice"), (["serve", "--prot", "1"], "unrecognized"),
    (["generate", "--temp=0"], "tpuspec generate: error: unrecognized arguments: --temp=0; did "
     "you mean --temperature?"),
    (["serve", "--port", "99999"], r"must be in [0, 65535], got 99999"),
    (["serve", "--mesh", "2"], "must be 2 numbers, got 2"),
    (["demo", "--draft_length", "0"], "must be at least 1, got 0"),
    (["generate", "--temperature", "warm", "a"], "invalid float value")])
def test_wrong_flags_exit_with_2(args, message):
    result = run_cli(*args)
    assert result.returncode == 2
    assert message in result.stderr


def test_help_says_what_a_flag_is_if_it_is_not_given():
    serve = next(action for action in make_parser()._actions if action.dest == "command")
    text = serve.choices["serve"].format_help()
    assert "0 is a free one (default: 8500)" in text
    assert "source (default: 32,128,512)" in text and "default: None" not in text


@pytest.mark.parametrize("flag", ["--port", "--metrics_port"])
def test_a_port_in_use_is_found_before_anything_is_loaded(flag):
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_cli("serve", "--target", "nothing_here", flag, str(port))
    assert result.returncode == 1
    assert f"cannot listen on localhost:{port}: " in result.stderr


def test_a_reader_that_has_enough_is_no_error(tmp_path):
    code = ("import sys; from tpuspec.serving.cli import main; sys.stdin.read(); main()")
    process = subprocess.Popen([sys.executable, "-c", code, "plan", "--alpha", "0.7", "--c", "0.1",
                                "--json"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    process.stdin.close()
    assert process.wait(60) == 1 and process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize("command", [["generate"], ["batch", "--input", "a", "--output", "b"]])
def test_every_option_is_a_flag_and_reaches_the_request(command):
    flags = {"temperature": "0.5", "top_k": "7", "top_p": "0.9", "min_p": "0.1",
             "repetition_penalty": "1.2", "presence_penalty": "-1.5", "frequency_penalty": "0.3",
             "logit_bias": "5:1.5,9:-100", "banned_ids": "3,4", "allowed_ids": "5,6",
             "min_new_tokens": "2", "stop": "x", "eos_ids": "1,8", "logprobs": "3",
             "decoder_prompt": "so it begins", "n": "4", "lenience": "0.5"}
    assert set(flags) | {"ignore_eos"} == set(OPTIONS)
    args = make_parser().parse_args(
        [*command, *(f"--{name}={value}" for name, value in flags.items())])
    request = make_request("a", **{name: getattr(args, name) for name in OPTIONS})
    assert dict(request.sampling.logit_bias) == {5: 1.5, 9: -100.0}
    assert (list(request.sampling.banned_ids), list(request.sampling.allowed_ids)) == (
        [3, 4], [5, 6])
    assert (list(request.stop), list(request.eos_ids), request.min_new_tokens) == (["x"], [1, 8], 2)
    assert (request.logprobs, request.decoder_text, request.n) == (3, "so it begins", 4)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                 "presence_penalty", "frequency_penalty", "lenience"):
        assert getattr(request.sampling, name) == float(flags[name])


@pytest.mark.skipif(platform.has_tpu(), reason="has a TPU")
def test_platform_that_is_absent_is_refused_at_the_start():
    result = run_cli("serve", "--platform", "tpu")
    assert result.returncode == 1
    assert "platform must be cpu on this machine, got tpu: no TPU device files" in result.stderr


def test_looked_up_drafts_beside_a_model_are_chosen():
    result = run_cli("serve", "--ngram_drafts", "--target", "a", "--draft", "b")
    assert result.returncode == 1
    line, = result.stderr.splitlines()
    assert line.endswith("draft_length must be auto for ngram_drafts beside a draft model, got 3")


def test_missing_checkpoint_is_one_clear_line(tmp_path):
    result = run_cli("serve", "--target", str(tmp_path / "nothing"))
    assert result.returncode == 1
    line, = result.stderr.splitlines()
    assert "no checkpoint at" in line and "does not exist" in line


def test_server_that_does_not_answer_is_one_clear_line():
    result = run_cli("generate", "--server", "localhost:1", "one")
    assert result.returncode == 1
    line, = result.stderr.splitlines()
    assert "no answer from localhost:1: UNAVAILABLE" in line
    assert line.endswith("--tls or --tls_ca, if the server has TLS")


def test_log_probabilities_are_not_thrown_away():
    result = run_cli("generate", "--server", "localhost:1", "one", "--logprobs", "2")
    assert result.returncode == 1
    assert "logprobs must be asked for with --json" in result.stderr


def test_texts_of_any_kind_go_to_a_server_and_come_back_in_order(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'\xef\xbb\xbf{"text": "zero", "id": "a", "max_new_tokens": 3}\r\n'
                     b'not json\n\n{"token_ids": [30, 2], "draft_length": 0}\n'
                     b'{"text": "zero", "tempo": 3}\n[]\n{"id": "e"}\n{"text": "one", "top_p": 7}\n'
                     b'{"token_ids": [30, 1, 1], "id": 5}')

    async def body(it):
        async def cli(*args, stdin=""):
            return await asyncio.to_thread(
                run_cli, "generate", "--server", it.address, *args, stdin=stdin)

        one = await cli("zero", "--max_new_tokens", "2")
        assert (one.returncode, one.stdout) == (0, "one two\n")
        several = await cli("zero", "ten", "--stop", "thirteen", "--max_new_tokens", "4")
        assert several.stdout == "one two three four\neleven twelve \n"
        lines = await cli("--max_new_tokens", "1", stdin="zero\n\nfive\n")
        assert lines.stdout == "one\nw2\nsix\n"  # an empty line is a source, too
        await cli("zero", "--label", "counting", "--max_new_tokens", "1")
        assert it.server.metrics._by_label["counting"].emitted == 1
        bad = await cli("zero", "--max_new_tokens", "1000")
        assert bad.returncode == 1 and "max_new_tokens must be in [1, 100]" in bad.stderr

        batch = await cli("--input", str(rows), "--json", "--seed", "7")
        assert batch.returncode == 1, batch.stderr
        records = [json.loads(line) for line in batch.stdout.splitlines()]
        assert [record["id"] for record in records] == ["a", 2, 4, 5, 6, "e", 8, 5]
        assert [record.get("text") for record in records] == [
            "one two three", None, "one two", None, None, None, None, "one"]
        assert records[0]["token_ids"] == [31, 32, 33] and records[0]["seed"] == 7
        assert records[0]["finish_reason"] == "length" and records[2]["finish_reason"] == "eos"
        assert records[0]["alpha"] == 1.0 and records[2]["alpha"] is None
        assert records[3]["error"] == {"code": "INVALID_ARGUMENT",
                                       "message": "line 5: unknown fields ['tempo']"}
        assert "sampling.top_p must be in (0, 1], got 7.0" in records[6]["error"]["message"]

    on_server(body)


def test_batch_larger_than_the_queue_waits_for_its_turn():
    async def body(it):
        sources = [str(n) for n in range(40)]
        result = await asyncio.to_thread(
            run_cli, "generate", "--server", it.address, "--max_new_tokens", "1", "--json",
            *(f"w{n}" for n in range(30, 70)))
        assert result.returncode == 0, result.stderr
        ids = [json.loads(line)["token_ids"] for line in result.stdout.splitlines()]
        assert ids == [[n] for n in range(31, 71)] and len(ids) == len(sources)

    on_server(body, queue_limit=0)


@contextlib.contextmanager
def serving(pair, *flags):
    """A server process on a pair; its address, the one of its metrics, and the process."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from tpuspec.serving.cli import main; main()", "serve",
         "--target", pair / "target", "--draft", pair / "draft", "--port", "0",
         "--slots", "2", "--source_buckets", "16", "--max_target_length", "32",
         "--draft_lengths", "0,2", "--draft_length", "auto", "--ngram_drafts",
         "--metrics_port", "0", *flags],
        stderr=subprocess.PIPE, text=True)
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if "serving on" in line:
                break
        assert "platform cpu, devices: " in "".join(said), said
        metrics, = (line.split()[-1] for line in said if "metrics on" in line)
        # It logs every request: a full pipe would hold it up.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield f"localhost:{said[-1].rsplit(':', 1)[1].strip()}", metrics, process
    finally:
        process.kill()
        process.stderr.close()
        process.wait()


def trace_of_steps(client, address, output) -> set[str]:
    """Takes a trace in which the parts of a step have names; texts that were streamed meanwhile."""
    profile = subprocess.Popen(
        [sys.executable, "-c", "from tpuspec.serving.cli import main; main()", "profile",
         "--server", address, "--seconds", "1", "--output", output, "--json"],
        stdout=subprocess.PIPE, text=True)
    texts = set()
    while profile.poll() is None:
        texts.add("".join(response.text for response in client.generate(
            "one two", max_new_tokens=32, ignore_eos=True, draft_length=2)))
    with profile.stdout as stdout:
        files = [pathlib.Path(name) for name in json.load(stdout)["files"]]
    trace, = (file.read_bytes() for file in files if file.name.endswith(".xplane.pb"))
    for scope in (b"draft", b"verify", b"accept", b"commit"):
        assert b"/" + scope + b"/" in trace, scope
    return texts


def test_serve_loads_compiles_streams_traces_and_drains(tiny_pair, tmp_path):
    with serving(tiny_pair, "--profile_dir", tmp_path / "there") as (address, metrics, process):
        with BlockingClient(address) as client:
            model = client.get_model()
            assert model.platform == "cpu" and json.loads(model.target_config_json)
            warm = model.load.compilations
            assert warm > 0
            texts = set()
            for draft_length in (0, 1, 2, None):
                responses = list(client.generate("one two", max_new_tokens=32, ignore_eos=True,
                                                 draft_length=draft_length))
                assert responses[-1].finish.new_tokens == 32
                texts.add("".join(response.text for response in responses))
            assert len(texts) == 1
            assert client.get_model().load.compilations == warm
            with urllib.request.urlopen(metrics) as reply:
                assert b"tpuspec_generated_tokens_total{label=\"\"} 128.0" in reply.read()
            assert trace_of_steps(client, address, tmp_path / "here") == texts
            assert client.get_model().load.compilations == warm
        process.send_signal(signal.SIGTERM)
        assert process.wait(25) == 0  # at once: nothing runs that the 30 s of grace are for


@pytest.mark.slow
def test_server_killed_under_load_serves_the_same_again_after_its_warm_up(tiny_pair):
    """Everything that a client sees: UNAVAILABLE, a port that opens again, the same ids."""
    asked = dict(temperature=1.0, seed=7, max_new_tokens=32, ignore_eos=True, draft_length=2)
    statuses = []

    def load(address):
        with BlockingClient(address) as client:
            try:
                while True:
                    list(client.generate("one two three", max_new_tokens=32, ignore_eos=True))
            except grpc.RpcError as error:
                statuses.append(error.code())

    def ids(address):
        with BlockingClient(address) as client:
            return [t.id for response in client.generate("one two", **asked)
                    for t in response.tokens]

    began = time.monotonic()
    with serving(tiny_pair) as (address, _, process):
        first = time.monotonic() - began
        expected = ids(address)
        clients = [threading.Thread(target=load, args=(address,)) for _ in range(8)]
        for client in clients:
            client.start()
        time.sleep(3.0)
        process.kill()
        for client in clients:
            client.join(30)
            assert not client.is_alive()
    assert statuses == [grpc.StatusCode.UNAVAILABLE] * 8
    began = time.monotonic()
    with serving(tiny_pair, "--port", address.rpartition(":")[2]) as (again, _, _):
        second = time.monotonic() - began
        assert again == address and ids(address) == expected
    print(f"started in {first:.1f} s, after the kill in {second:.1f} s")
    assert second < 1.5 * first + 5.0  # programs come from the cache; the machine may be busy


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_memory_does_not_grow_with_requests_and_nothing_compiles(tiny_pair):
    """2000 requests of every kind; resident memory within 3 % of that after 200."""
    def resident(process) -> int:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if "VmRSS" in line))

    with serving(tiny_pair) as (address, _, process), BlockingClient(address) as client:
        warm = client.get_model().load.compilations
        for number in range(2000):
            list(client.generate(
                "one two three four five"[:number % 24], max_new_tokens=1 + number % 32,
                temperature=number % 3 / 2, top_k=number % 5, top_p=1 - number % 4 / 10,
                draft_length=number % 3, stop=["two"] if number % 7 == 0 else [],
                ignore_eos=number % 2 == 0, min_p=number % 2 / 10,
                presence_penalty=number % 11 // 5, banned_ids=[5] * (number % 3),
                logprobs=number % 4 or None))
            if number == 200:
                settled = resident(process)
        assert resident(process) < 1.03 * settled
        assert client.get_model().load.compilations == warm
