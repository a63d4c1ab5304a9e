"""Libraries in Rust panic, and engines raise anything: a BaseException is answered, and ends no task and no thread."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts import X, Y, write_artifact
from served import change_artifact, eventually, running, write_text_model
from test_serve_models import INFER, answer, index, publish, serving

from laconic.arrays import Array, Arrays
from laconic.artifacts.manifest import MANIFEST
from laconic.errors import CorruptArtifact
from laconic.files import replace_folder
from laconic.hashing import digest_file, unseal
from laconic.runtimes.runtime import Session
from laconic.tasks.assets import TOKENIZER
from laconic.tasks.task import open_task
from serve.asgi.error_boundary import ErrorBoundary
from serve.asgi.wire import Message, Receive, Scope, Send
from serve.batching.batch_run import run_batch
from serve.batching.batcher import Batcher
from serve.batching.layout import Cap, Layout
from serve.batching.statistics import Statistics
from serve.workers.__main__ import run

ROW = {"x": np.ones((1, 3), np.float32)}
AT_LOAD = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}
AT_EVERY_TEXT = {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
"""Parts of a `tokenizer.json` with which the library panics."""


class Panic(BaseException):
    """As PyO3 raises a panic, whose own class no module has."""


class Raising(Session):
    """A session that raises an error for each of its first runs."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        if self.errors:
            raise self.errors.pop(0)
        return {"y": inputs["x"]}


def write_panicking_model(path: Path, part: dict[str, Any]) -> Path:
    """A text model whose tokenizer panics."""
    write_text_model(path)
    tokenizer = path / TOKENIZER
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | part))
    files = unseal(path / MANIFEST)["files"] | {TOKENIZER: digest_file(tokenizer).model_dump()}
    return change_artifact(path, files=files)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models/text/predict", {"text": "the cat"}),
        ("/v1/models/text/predict", {"text": ["the cat"] * 40}),
        ("/v1/embeddings", {"model": "text", "input": "the cat"}),
    ],
)
def test_a_text_at_which_the_tokenizer_panics_is_answered_in_json(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    with running(write_panicking_model(tmp_path / "text.laconic", AT_EVERY_TEXT)) as server, server.client() as http:
        for _ in range(2):
            refused = http.post(path, json=body)
            assert refused.status_code == 500
            error = refused.json()["error"]
            assert "the server failed on this request" in (error if isinstance(error, str) else error["message"])
        assert http.get("/v2/health/ready").status_code == 200


def test_an_artifact_whose_tokenizer_panics_is_refused_with_a_reason(tmp_path: Path) -> None:
    path = write_panicking_model(tmp_path / "text.laconic", AT_LOAD)
    with pytest.raises(CorruptArtifact, match="PanicException"), running(path):
        pass


def test_a_watched_folder_outlives_an_artifact_whose_tokenizer_panics(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, http):
        replace_folder(write_panicking_model(tmp_path / ".draft", AT_LOAD), tmp_path / "text.laconic")
        assert eventually(lambda: index(http).get(("text", "1"), ("",))[0] == "UNAVAILABLE")
        assert "precompiled_charsmap" in index(http)["text", "1"][1]
        refused = http.get("/v2/health/ready")
        assert refused.status_code == 503
        assert "precompiled_charsmap" in refused.json()["error"]
        publish(tmp_path / "twice.laconic", 2)
        assert eventually(lambda: http.get("/v2/models/twice/ready").status_code == 200)
        assert answer(http, INFER) == ("1", 2)
        assert http.get("/v2/health/ready").status_code == 200


@pytest.mark.parametrize("error", [Panic("index out of bounds"), SystemExit(1), KeyboardInterrupt(), StopIteration()])
def test_whatever_an_engine_raises_the_executor_answers_and_lives_on(error: BaseException) -> None:
    async def ask() -> None:
        batcher = Batcher([Raising(error)], Layout([X], [Y]), cap=Cap(4), max_wait=1, statistics=Statistics())
        try:
            for attempt in range(2):
                flow, (item,) = batcher.open(1, [batcher.layout.make_part(ROW)])
                result = await asyncio.wait_for(asyncio.gather(item.future, return_exceptions=True), 10)
                batcher.drop(flow)
                if attempt == 0:
                    assert "the engine failed on these inputs" in str(result[0])
                else:
                    assert isinstance(result[0], dict)
        finally:
            batcher.close()

    asyncio.run(ask())


@pytest.mark.parametrize("error", [Panic(), SystemExit(), MemoryError(), RuntimeError("no kernel")])
def test_a_worker_reports_whatever_its_engine_raises(error: BaseException) -> None:
    outputs, text = run(Raising(error), ROW)
    assert outputs == {}
    assert text


def test_an_exception_that_is_its_own_cause_is_reported() -> None:
    error = RuntimeError("no kernel")
    error.__cause__ = error
    assert run(Raising(error), ROW)[1] == "no kernel"
    layout = Layout([X], [Y])
    error.__cause__ = error
    assert "the engine failed" in str(run_batch(Raising(error), layout, [layout.make_part(ROW)], [])[0])


async def pass_through_boundary(error: BaseException, messages: list[Message], *, started: bool = False) -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        return {}

    await ErrorBoundary(application, send).run({}, receive)


@pytest.mark.parametrize("error", [Panic("index out of bounds"), ValueError("secret")])
def test_what_a_route_raises_is_answered_in_json_without_its_text(error: BaseException) -> None:
    messages: list[Message] = []
    asyncio.run(pass_through_boundary(error, messages))
    assert messages[0]["status"] == 500
    assert set(json.loads(messages[1]["body"])) == {"error"}
    assert str(error).encode() not in messages[1]["body"]


def test_what_a_route_raises_within_its_answer_cuts_it_off_and_a_cancelled_request_stays_cancelled() -> None:
    messages: list[Message] = []
    with pytest.raises(Panic):
        asyncio.run(pass_through_boundary(Panic(), messages, started=True))
    assert len(messages) == 1
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(pass_through_boundary(asyncio.CancelledError(), []))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_program_on_purpose_passes(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout([X], [Y])
    with pytest.raises(error):
        run_batch(Raising(error()), layout, [layout.make_part(ROW)], [])
    with pytest.raises(error):
        asyncio.run(pass_through_boundary(error(), []))
    monkeypatch.setattr("laconic.tasks.text.read_asset", raise_error(error))
    with pytest.raises(error):
        open_task("text-embedding", Path(), ())


def raise_error(error: type[BaseException]) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_fault_of_a_control_route_is_answered_in_json_and_the_connection_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(write_artifact(tmp_path / "twice.laconic")) as server, server.client() as http:
        for error in (Panic, ValueError):
            monkeypatch.setattr("serve.http.page.describe_model", raise_error(error))
            refused = http.get("/page/models")
            assert (refused.status_code, set(refused.json())) == (500, {"error"})
        assert http.get("/v2/health/live").status_code == 200
