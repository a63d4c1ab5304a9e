"""LoRA adapters beside one base over HTTP: by the name of the model, loaded and unloaded while requests are written."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_models import make_tokenizer, open_chat_model
from lora_models import make_adapter, write_greedily
from safetensors.numpy import load_file, save_file
from scripted_worker import END
from served import Running, eventually, running
from test_generator import draw_prompts

from laconic.errors import UsageError
from laconic.runtimes.adapter_config import WEIGHTS
from serve.model_repository.adapter_folder import open_folders
from serve.model_repository.repository import Repository
from serve.settings.server_settings import Settings

pytest.importorskip("openvino_genai")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by peft
TOKENS = 12
(PROMPT,) = draw_prompts(261, [40])
POLL = 0.05


@pytest.fixture(scope="module")
def expected(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, str]]:
    """The base's artifact, a folder of adapters, and what is written by each name."""
    base, artifact = open_chat_model(shared)
    folder, source = tmp_path_factory.mktemp("adapters"), artifact.parent / "source"
    models = {"chat": base}
    for seed, name in enumerate(("pirate", "poet", "clerk")):
        models[name] = make_adapter(source, folder / name, seed, r=4 + seed)
    tokens = {name: write_greedily(model, PROMPT, TOKENS) for name, model in models.items()}
    texts = {name: make_tokenizer().decode(ids[: (*ids, END).index(END)]) for name, ids in tokens.items()}
    assert len(set(texts.values())) == 4
    return artifact, folder, texts


@pytest.fixture(scope="module")
def folder(expected: tuple[Path, Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one adapter."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(expected[1] / "pirate", folder / "chat" / "pirate")
    return folder


@pytest.fixture(scope="module")
def server(expected: tuple[Path, Path, dict[str, str]], folder: Path) -> Iterator[Running]:
    with running(expected[0], adapters=folder, threads=1, kv_cache=16 << 20, poll=POLL) as server:
        yield server


def write(client: httpx.Client, model: str, tokens: int = TOKENS) -> str:
    body = {"model": model, "prompt": list(PROMPT), "max_tokens": tokens, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def read_metric(client: httpx.Client, sample: str) -> float:
    (line,) = [line for line in client.get("/metrics").text.splitlines() if line.startswith(sample)]
    return float(line.rpartition(" ")[2])


def list_models(client: httpx.Client) -> dict[str, Any]:
    return {model["id"]: model.get("parent") for model in client.get("/v1/models").json()["data"]}


def test_the_model_field_chooses_the_adapter(server: Running, expected: tuple[Path, Path, dict[str, str]]) -> None:
    with server.client() as client:
        assert list_models(client) == {"chat": None, "pirate": "chat"}
        samples = [
            'laconic_generation_tokens_total{model="pirate",version="1",kind="prompt"}',
            'laconic_generation_tokens_total{model="chat",version="1",kind="prompt"}',
            'nv_inference_request_success{model="pirate",version="1"}',
        ]
        before = [read_metric(client, sample) for sample in samples]
        names = ("chat", "pirate", "chat")
        assert [write(client, name) for name in names] == [expected[2][name] for name in names]
        after = [read_metric(client, sample) for sample in samples]
        assert [now - then for now, then in zip(after, before, strict=True)] == [len(PROMPT), 2 * len(PROMPT), 1]
        assert 'laconic_generation_cache_blocks{model="pirate"' not in client.get("/metrics").text
        refused = client.post("/v1/models/pirate/predict", json={"text": "a"})
        assert refused.status_code == 400
        assert "is an adapter of 'chat' and only writes texts" in refused.text
        cards = {card["name"]: card for card in client.get("/page/models").json()["models"]}
        assert [(cards[name]["form"] is None, cards[name]["chat"]) for name in ("chat", "pirate")] == [
            (False, cards["chat"]["chat"]),
            (True, cards["chat"]["chat"]),
        ]
        assert not cards["pirate"]["report"]


def test_adapters_are_swapped_while_requests_are_written(
    server: Running, folder: Path, expected: tuple[Path, Path, dict[str, str]]
) -> None:
    """Each answer is that of its adapter, and nothing fails: not of one that is unloaded while it writes."""
    wrong: list[str] = []
    right: list[str] = []
    ended = threading.Event()

    def ask(model: str) -> None:
        with server.client() as client:
            while not ended.is_set():
                text = write(client, model)
                (right if text == expected[2][model] else wrong).append(model)

    threads = [threading.Thread(target=ask, args=(model,)) for model in ("chat", "pirate")]
    for thread in threads:
        thread.start()
    try:
        with server.client() as client:
            for name in ("poet", "clerk") * 4:
                shutil.copytree(expected[1] / name, folder / "chat" / name)
                assert client.post(f"/v2/repository/models/{name}/load").status_code == 200
                assert write(client, name) == expected[2][name]
                assert client.post(f"/v2/repository/models/{name}/unload").status_code == 200
                assert name not in list_models(client)
                shutil.rmtree(folder / "chat" / name)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert set(right) == {"chat", "pirate"}


def test_an_adapter_of_another_base_is_refused_and_nothing_is_lost(
    server: Running, folder: Path, expected: tuple[Path, Path, dict[str, str]], tmp_path: Path
) -> None:
    shutil.copytree(expected[1] / "poet", tmp_path / "other")
    weights = tmp_path / "other" / WEIGHTS
    save_file({name.replace("layers.1", "layers.7"): each for name, each in load_file(weights).items()}, weights)
    (tmp_path / "other").rename(folder / "chat" / "other")
    with server.client() as client:
        answer = client.post("/v2/repository/models/other/load")
        assert answer.status_code == 400
        assert "holds an adapter for a layer model.model.layers.7.self_attn.q_proj, and the served model" in answer.text
        states = {each["name"]: each["state"] for each in client.post("/v2/repository/index").json()}
        assert states == {"chat": "READY", "pirate": "READY", "other": "UNAVAILABLE"}
        assert client.get("/v2/health/ready").status_code == 200
        assert write(client, "pirate") == expected[2]["pirate"]
        shutil.rmtree(folder / "chat" / "other")


def test_an_engine_that_is_started_again_has_its_adapters(
    server: Running, expected: tuple[Path, Path, dict[str, str]]
) -> None:
    writer = server.app.repository.get("pirate").writer
    assert writer is not None
    assert writer.worker.process is not None
    os.kill(writer.worker.process, signal.SIGKILL)
    with server.client() as client:
        assert eventually(lambda: client.get("/v2/models/pirate/ready").status_code != 200)
        assert eventually(lambda: client.get("/v2/models/pirate/ready").status_code == 200, 20)
        assert write(client, "pirate") == expected[2]["pirate"]


def test_adapters_follow_their_base_when_it_is_replaced_and_go_with_it(
    expected: tuple[Path, Path, dict[str, str]], folder: Path, tmp_path: Path
) -> None:
    """And one whose name a model has already is not served in its place."""
    models, adapters = tmp_path / "models", tmp_path / "adapters"
    shutil.copytree(expected[0], models / "chat.laconic")
    shutil.copytree(folder, adapters)
    shutil.copytree(adapters / "chat" / "pirate", adapters / "chat" / "chat")
    options = {"threads": 1, "kv_cache": 4 << 20, "poll": POLL}
    with running(models=models, adapters=adapters, **options) as server, server.client() as client:
        first = server.app.repository.get("chat")
        shutil.copytree(expected[0], models / ".chat")
        (models / "chat.laconic").rename(tmp_path / "old")
        (models / ".chat").rename(models / "chat.laconic")
        assert client.post("/v2/repository/models/chat/load").status_code == 200
        assert write(client, "pirate") == expected[2]["pirate"]  # of the old one or the new one
        assert eventually(lambda: not first.adapters, 20)
        assert write(client, "pirate") == expected[2]["pirate"]
        assert write(client, "chat") == expected[2]["chat"]
        reasons = {each["reason"] for each in client.post("/v2/repository/index").json()}
        assert any("would both be served as 'chat'" in reason for reason in reasons)
        assert client.post("/v2/repository/models/chat/unload").status_code == 200
        assert eventually(lambda: list_models(client) == {})


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("pirate", {}, "does not say which model it is an adapter of. Move it to"),
        ("chat/pirate", {"require_signature": "key.pem"}, "adapters have no signature"),
        (None, {}, "there is no folder"),
    ],
)
def test_what_cannot_be_a_folder_of_adapters_is_said_at_the_start(
    expected: tuple[Path, Path, dict[str, str]],
    tmp_path: Path,
    place: str | None,
    options: dict[str, Any],
    message: str,
) -> None:
    if place is not None:
        shutil.copytree(expected[1] / "pirate", tmp_path / "adapters" / place)
    settings = Settings(adapters=tmp_path / "adapters", **options)
    with pytest.raises(UsageError, match=message):
        open_folders(Repository(), settings)[0].start()


def test_adapters_wait_for_their_base(
    expected: tuple[Path, Path, dict[str, str]], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (watched,) = open_folders(Repository(), Settings(adapters=folder))
    watched.start()
    watched.close()
    assert "wait until a language model 'chat' is served" in caplog.text
    assert list(watched.repository) == []
