"""A server in front of vLLM, for which a program stands in that speaks as it does: see `stand_in_vllm`."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from artifacts import write_artifact
from served import eventually
from stand_in_vllm import FLAGS, make_parser

from laconic.errors import LaconicError, UsageError
from serve.requests.public_errors import InvalidParameter
from serve.server import serve
from serve.vllm.relay import count_choices, refuse_addresses
from serve.vllm.vllm_command import check_options, make_command, make_environment
from serve.vllm.vllm_process import find_cause
from serve.vllm.vllm_server import serve_on_vllm

KEY = "0123456789abcdef"
STAND_IN = Path(__file__).with_name("stand_in_vllm.py")


@dataclass
class Vllm:
    """A server on vLLM. log: of what stands in for vLLM."""

    process: "subprocess.Popen[str]"
    log: Path
    client: httpx.Client

    def find_pids(self) -> tuple[int, int]:
        """The last engine's process and that of the server before it."""
        engine, server = re.findall(r"engine (\d+), server (\d+)", self.log.read_text())[-1]
        return int(engine), int(server)


def write_program(folder: Path) -> Path:
    """An environment with the program."""
    program = folder / "venv" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(STAND_IN)!r}, run_name='__main__')\n")
    program.chmod(0o755)
    return folder / "venv"


def write_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def start(folder: Path, *options: str) -> Vllm:
    """Serve on vLLM, with a key."""
    environment, log = write_program(folder), folder / "log"
    checkpoint = write_checkpoint(folder / "chat")
    command = [sys.executable, "-m", "laconic", "serve", str(checkpoint), "--on", "vllm", "--vllm", str(environment)]
    options = ("--port", "0", "--drain", "0", "--vllm-option", "max-model-len=512", *options)
    with log.open("w") as errors:
        variables = {**os.environ, "LACONIC_SERVE_API_KEYS": f"alice={KEY}"}
        process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=errors, text=True, env=variables
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("Serving chat by vLLM at "), log.read_text()
    client = httpx.Client(base_url=line.split()[-1], headers={"authorization": f"Bearer {KEY}"}, timeout=20)
    return Vllm(process, log, client)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    served = start(tmp_path_factory.mktemp("vllm"))
    with served.process, served.client:
        yield served
        served.process.kill()


def ask(tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": "chat", "prompt": "once", "max_tokens": tokens} | fields


def read_events(answer: httpx.Response) -> list[Any]:
    """The events of a stream, of which none came in part."""
    texts = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def test_answers_come_through_with_the_id_of_the_request_and_without_its_key(vllm: Vllm) -> None:
    identified = {"x-request-id": "r-1"}
    answer = vllm.client.post("/v1/completions", json=ask(1), headers=identified)
    assert answer.json() == {"choices": [{"text": "once r-1 no key"}]}
    assert answer.headers["x-request-id"] == "r-1"
    with vllm.client.stream("POST", "/v1/completions", json=ask(4, stream=True), headers=identified) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *events, last = read_events(streamed)
    assert [event["choices"][0]["text"] for event in events] == ["once", "r-1", "no key", "once"]
    assert last == "[DONE]"
    assert vllm.client.post("/v1/completions", json=ask(1, model="x")).status_code == 404


def test_keys_readiness_models_and_metrics_are_ours(vllm: Vllm) -> None:
    base = str(vllm.client.base_url)
    assert httpx.post(f"{base}/v1/completions", json=ask(1)).status_code == 401
    assert httpx.get(f"{base}/v2/health/ready").status_code == 200
    assert vllm.client.get("/v2/models/chat/ready").status_code == 200
    assert vllm.client.get("/v2/models/x/ready").status_code == 404
    assert vllm.client.get("/v1/models").json()["data"] == [
        {"id": "chat", "max_model_len": 8192, "owned_by": "laconic"}
    ]
    assert vllm.client.get("/v1/models/x").json()["error"]["code"] == "model_not_found"
    assert vllm.client.get("/sleep").status_code == 404
    vllm.client.post("/v1/completions", json=ask(1))
    metrics = vllm.client.get("/metrics").text
    assert re.search(r'^nv_inference_request_success\{model="chat",version="1"\} [1-9]', metrics, re.MULTILINE)
    assert re.search(r"^vllm:generation_tokens_total \d", metrics, re.MULTILINE)
    assert 'laconic_key_requests_total{key="alice"}' in metrics
    assert "python_info" not in metrics


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"[1]", 400, "must be an object"),
        (b"{", 400, "not JSON"),
        (json.dumps(ask(1, n=5000)).encode(), 400, "asks for 5000 texts"),
        (json.dumps(ask(1, n="2")).encode(), 400, "'n' does not fit"),
    ],
)
def test_what_is_no_request_does_not_reach_vllm(vllm: Vllm, body: bytes, status: int, reason: str) -> None:
    answer = vllm.client.post("/v1/completions", content=body)
    assert answer.status_code == status
    assert reason in answer.json()["error"]["message"]


def test_a_client_that_leaves_ends_the_answer_in_vllm(vllm: Vllm) -> None:
    with vllm.client.stream("POST", "/v1/completions", json=ask(2000, stream=True)) as streamed:
        next(streamed.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        vllm.client.post("/v1/completions", json=ask(100), timeout=0.1)
    assert eventually(lambda: "vllm:aborted 1" in vllm.client.get("/metrics").text)


def test_a_vllm_that_dies_ends_its_streams_with_an_error_and_is_started_again(vllm: Vllm) -> None:
    engine, server = vllm.find_pids()
    with vllm.client.stream("POST", "/v1/completions", json=ask(2000, stream=True)) as streamed:
        lines = streamed.iter_lines()
        next(lines)
        os.kill(server, signal.SIGKILL)
        assert "vLLM ended before this answer was whole" in list(filter(None, lines))[-1]
    refused = vllm.client.post("/v1/completions", json=ask(1))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert eventually(lambda: not Path(f"/proc/{engine}").exists())
    assert "vLLM was killed by SIGKILL" in vllm.log.read_text()
    assert eventually(lambda: vllm.client.get("/v2/health/ready").status_code == 200, 20)
    assert vllm.client.post("/v1/completions", json=ask(1)).status_code == 200


def test_sigterm_lets_a_stream_end_and_leaves_no_process(vllm: Vllm) -> None:
    answers: list[list[Any]] = []

    def read() -> None:
        with vllm.client.stream("POST", "/v1/completions", json=ask(40, stream=True)) as streamed:
            answers.append(read_events(streamed))

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.2)
    pids = vllm.find_pids()
    vllm.process.terminate()
    reader.join()
    assert len(answers[0]) == 41
    assert vllm.process.wait(20) == 0
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_vllm_that_hangs_is_killed_and_a_server_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    served = start(tmp_path, "--watchdog", "0.9")
    with served.process, served.client:
        pids = served.find_pids()
        os.kill(pids[1], signal.SIGSTOP)
        assert eventually(lambda: "did not answer for 0.9 s and was killed" in served.log.read_text(), 10)
        assert eventually(lambda: served.find_pids() != pids, 10)
        pids = (*pids, *served.find_pids())
        socket = Path(re.search(r"--uds=([^\0]+)", Path(f"/proc/{pids[3]}/cmdline").read_text())[1])
        served.process.kill()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert eventually(lambda: not socket.parent.exists())


def test_vllm_is_started_with_options_that_its_parser_knows(tmp_path: Path) -> None:
    options = {
        "max_model_len": "4096", "quantization": "compressed-tensors", "tensor-parallel-size": "2",
        "max-num-seqs": "64", "gpu-memory-utilization": "0.8", "enforce-eager": "true",
        "enable-prefix-caching": "false",
    }  # fmt: skip
    check_options(options)
    command = make_command(tmp_path / "vllm", tmp_path / "chat", "chat", options, tmp_path / "vllm.sock")
    assert command[1] == "serve"
    parsed = make_parser().parse_args(command[2:])
    assert (parsed.model_tag, parsed.uds, parsed.served_model_name) == (
        str(tmp_path / "chat"), str(tmp_path / "vllm.sock"), "chat"
    )  # fmt: skip
    assert (parsed.max_model_len, parsed.tensor_parallel_size, parsed.gpu_memory_utilization) == ("4096", "2", "0.8")
    assert parsed.enforce_eager
    assert parsed.no_enable_prefix_caching
    assert FLAGS["version"] == "0.32.0"


@pytest.mark.parametrize("option", ["port", "--api-key", "trust_remote_code", "trust-r", "middleware", "config", "A b"])
def test_options_that_are_ours_or_run_code_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match="in vllm_options"):
        check_options({option: "1"})


def test_vllm_gets_neither_our_keys_nor_our_packages_and_stays_offline() -> None:
    variables = {"LACONIC_SERVE_API_KEYS": "a=b", "PYTHONPATH": "x", "VLLM_API_KEY": "k", "HOME": "/h", "PATH": "/bin"}
    assert make_environment(Path("/v/bin/vllm"), variables) == {
        "HOME": "/h", "PATH": "/v/bin:/bin", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "has no config.json"),
        ({"threads": 2}, "threads does not go with vLLM"),
        ({"kv_cache": "1 GiB"}, "kv_cache does not go with vLLM"),
        ({"replicas": 2}, "replicas is for replicas on a Ray cluster"),
    ],
)
def test_what_vllm_cannot_serve_is_said_at_once(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        serve_on_vllm([tmp_path], **options)


def test_an_artifact_a_missing_program_and_a_start_that_fails_are_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"laconic export .* --to compressed-tensors"):
        serve_on_vllm([write_artifact(tmp_path / "a.laconic")])
    checkpoint = write_checkpoint(tmp_path / "chat")
    with pytest.raises(UsageError, match="an environment of its own"):
        serve_on_vllm([checkpoint], vllm="no-such-vllm")
    with pytest.raises(UsageError, match=r"vllm_options is for vLLM\. Give --on vllm too"):
        serve([checkpoint], vllm_options="max-model-len=5")
    with pytest.raises(LaconicError, match=r"exited with code 1: max_model_len is greater than 8192 before it was"):
        serve_on_vllm([checkpoint], port=0, vllm=str(write_program(tmp_path)), vllm_options="max-model-len=9000")
    (tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 100)))
    with pytest.raises(UsageError, match=r"vllm\.sock: .*AF_UNIX path too long\. Set TMPDIR to a folder"):
        serve_on_vllm([checkpoint], port=0, vllm=str(tmp_path / "venv"))


def test_the_cause_of_an_end_is_the_first_failure_of_the_log() -> None:
    warning = "(APIServer pid=1) WARNING [system_utils.py:255] errors like `OSError: [Errno 24] Too many open files`"
    several = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, A. B",
    ]
    assert find_cause([warning, *several]) == "A"
    assert find_cause([warning, "vllm serve: error: unrecognized arguments: --x"]) == "unrecognized arguments: --x"
    assert find_cause(["RuntimeError: Engine core initialization failed. See root cause above."]) == ""


def test_texts_are_counted_by_choices_and_prompts() -> None:
    assert count_choices({"prompt": ["a", "b"], "n": 3}, 10) == 6
    assert count_choices({"prompt": [1, 2, 3]}, 10) == 1
    assert count_choices({"messages": []}, 10) == 1


@pytest.mark.parametrize("value", ["http://10.0.0.1/", {"url": "file:///etc/passwd"}, {"url": " data:,"}])
def test_images_and_sounds_that_vllm_would_fetch_are_refused(value: Any) -> None:
    def ask_about(value: Any) -> dict[str, Any]:
        parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": value}]
        return {"messages": [None, {"role": "user", "content": parts}, {"role": "user", "content": "And?"}]}

    refuse_addresses(ask_about({"url": "data:image/png;base64,AAAA"}))
    refuse_addresses({"prompt": "http://10.0.0.1/", "messages": 1})
    with pytest.raises(InvalidParameter, match="'image_url' must be a 'data:' URL"):
        refuse_addresses(ask_about(value))
