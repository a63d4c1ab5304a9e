"""Many models in one server: versions, a folder that is watched, models that come, change and go under load."""

import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from artifacts import FAILED, write_artifact
from served import Running, eventually, request_of, running

from laconic.errors import ArtifactError, UsageError
from laconic.files import replace_folder
from serve.settings.server_settings import Settings

ROW = [[1.0, 0, 0]]
INFER = "/v2/models/twice/infer"


@contextmanager
def serving(folder: Path, *paths: Path, **options: object) -> Iterator[tuple[Running, httpx.Client]]:
    """A server of a watched folder."""
    with running(*paths, models=folder, poll=0.05, **options) as server, server.client() as client:
        yield server, client


def publish(path: Path, factor: float, **model: object) -> Path:
    """Write an artifact beside its place, and put it there as a whole, as `laconic compress` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = write_artifact(path.with_name(f".{path.name}.draft"), factor=factor, **model)
    replace_folder(draft, path)
    return path


def answer(client: httpx.Client, url: str = INFER) -> tuple[str, float]:
    """The version that answered, and the factor of its model."""
    told = client.post(url, json=request_of(ROW)).raise_for_status().json()
    return told["model_version"], told["outputs"][0]["data"][0]


def index(client: httpx.Client) -> dict[tuple[str, str], tuple[str, str]]:
    listed = client.post("/v2/repository/index").raise_for_status().json()
    return {(each["name"], each["version"]): (each["state"], each["reason"]) for each in listed}


def test_models_come_and_go_with_the_folder(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, client):
        assert client.get("/v2/health/ready").status_code == 503
        assert client.post(INFER, json=request_of(ROW)).status_code == 404
        publish(tmp_path / "twice.laconic", 2)
        assert eventually(lambda: client.get("/v2/models/twice/ready").status_code == 200)
        assert answer(client) == ("1", 2)
        shutil.rmtree(tmp_path / "twice.laconic")
        assert eventually(lambda: client.get("/v2/models/twice").status_code == 404)
        assert index(client) == {}


def test_an_artifact_that_is_replaced_is_served_anew(tmp_path: Path) -> None:
    publish(tmp_path / "twice.laconic", 2)
    with serving(tmp_path) as (server, client):
        digest = server.app.repository.get("twice").digest
        assert answer(client, f"/v2/models/twice/versions/{digest}/infer") == ("1", 2)
        publish(tmp_path / "twice.laconic", 3)
        assert eventually(lambda: answer(client)[1] == 3)
        assert client.get(f"/v2/models/twice/versions/{digest}").status_code == 404


def test_the_newest_version_is_served_and_an_older_one_on_demand_also_of_a_folder_given_by_path(tmp_path: Path) -> None:
    for number in (2, 9, 10):
        publish(tmp_path / "twice" / str(number), number)
    with serving(tmp_path, keep_versions=2) as (_, client):
        assert answer(client) == ("10", 10)
        assert answer(client, "/v2/models/twice/versions/9/infer") == ("9", 9)
        refused = client.post("/v2/models/twice/versions/2/infer", json=request_of(ROW))
        assert refused.status_code == 404
        assert "only '9', '10'" in refused.json()["error"]
        assert client.get("/v2/models/twice/versions/9").json()["versions"] == ["9"]
        publish(tmp_path / "twice" / "11", 11)
        assert eventually(lambda: answer(client) == ("11", 11))
        assert eventually(lambda: list(index(client)) == [("twice", "10"), ("twice", "11")])
    for number in (1, 2):
        publish(tmp_path / "given" / "twice" / str(number), number)
    with running(tmp_path / "given" / "twice") as server, server.client() as client:
        assert answer(client) == ("2", 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_new_version_changes_nothing_but_the_index(tmp_path: Path, workers: int) -> None:
    publish(tmp_path / "twice" / "1", 2)
    with serving(tmp_path, workers=workers) as (_, client):
        publish(tmp_path / "twice" / "2", 3, nonsense=1)
        assert eventually(lambda: index(client).get(("twice", "2"), ("",))[0] == "UNAVAILABLE", 20)
        assert "not a model of the fake engine" in index(client)["twice", "2"][1]
        assert index(client)["twice", "1"] == ("READY", "")
        assert answer(client) == ("1", 2)
        assert client.get("/v2/health/ready").status_code == 200
        publish(tmp_path / "twice" / "2", 3)
        assert eventually(lambda: answer(client) == ("2", 3), 20)


def test_an_artifact_replaced_by_a_damaged_one_is_served_as_before(tmp_path: Path) -> None:
    path = publish(tmp_path / "twice.laconic", 2)
    with serving(tmp_path) as (_, client):
        (path / "model.onnx").write_text("{ }")
        assert eventually(lambda: "as before" in index(client)["twice", "1"][1])
        assert answer(client) == ("1", 2)


def test_an_artifact_that_is_still_being_copied_is_waited_for(tmp_path: Path) -> None:
    source = write_artifact(tmp_path / "source", factor=5)
    folder = tmp_path / "models"
    folder.mkdir()
    with serving(folder) as (_, client):
        target = folder / "twice.laconic"
        target.mkdir()
        for file in sorted(source.iterdir()):
            shutil.copy(file, target)
        assert eventually(lambda: client.get("/v2/models/twice/ready").status_code == 200)
        assert answer(client) == ("1", 5)


def test_unload_and_load(tmp_path: Path) -> None:
    publish(tmp_path / "twice.laconic", 2)
    with serving(tmp_path) as (_, client):
        assert client.post("/v2/repository/models/twice/unload").status_code == 200
        assert client.post(INFER, json=request_of(ROW)).status_code == 404
        assert index(client) == {("twice", "1"): ("UNAVAILABLE", "unloaded")}
        publish(tmp_path / "twice.laconic", 3)
        assert client.post("/v2/repository/models/twice/load", json={}).status_code == 200
        assert answer(client) == ("1", 3)
        for name in ("other", "..", "%2e%2e%2ftwice"):
            assert client.post(f"/v2/repository/models/{name}/load").status_code in (404, 405)
        parameters = {"parameters": {"config": "{}", "file:1/model.onnx": "AAAA"}}
        assert client.post("/v2/repository/models/twice/load", json=parameters).status_code == 400


def test_loading_a_bad_model_tells_why_and_without_a_folder_nothing_is_loaded(tmp_path: Path) -> None:
    publish(tmp_path / "good.laconic", 2)
    with serving(tmp_path) as (_, client):
        replace_folder(write_artifact(tmp_path / ".bad", verdict=FAILED), tmp_path / "bad.laconic")
        refused = client.post("/v2/repository/models/bad/load")
        assert refused.status_code == 400
        assert "failed its validation" in refused.json()["error"]
    with running(write_artifact(tmp_path / "twice.laconic")) as server, server.client() as client:
        refused = client.post("/v2/repository/models/twice/load")
        assert refused.status_code == 400
        assert "--models" in refused.json()["error"]


def test_models_given_by_path_keep_their_names_to_themselves(tmp_path: Path) -> None:
    given = write_artifact(tmp_path / "given" / "twice.laconic")
    publish(tmp_path / "models" / "twice.laconic", 3)
    publish(tmp_path / "models" / "other.laconic", 4)
    with serving(tmp_path / "models", given) as (_, client):
        assert answer(client) == ("1", 2)
        assert answer(client, "/v2/models/other/infer") == ("1", 4)
        assert client.post("/v2/repository/models/twice/unload").status_code == 404


def test_a_folder_of_which_nothing_can_be_served_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"), running(models=tmp_path / "none"):
        pass
    publish(tmp_path / "bad.laconic", 2, nonsense=1)
    with pytest.raises(ArtifactError, match=r"nothing in .* can be served: .*fake engine"), running(models=tmp_path):
        pass
    with pytest.raises(UsageError, match="nothing to serve"), running():
        pass


@pytest.mark.parametrize("workers", [0, 1])
def test_no_request_fails_while_versions_are_swapped_under_load(tmp_path: Path, workers: int) -> None:
    publish(tmp_path / "twice" / "1", 1)
    statuses: Counter[int] = Counter()
    seen: set[tuple[str, float]] = set()
    stopped = threading.Event()

    def load(url: str) -> None:
        with httpx.Client(base_url=url, timeout=20) as client:
            while not stopped.is_set():
                response = client.post(INFER, json=request_of(ROW))
                statuses[response.status_code] += 1
                if response.status_code == 200:
                    told = response.json()
                    seen.add((told["model_version"], told["outputs"][0]["data"][0]))

    with serving(tmp_path, workers=workers, threads=1) as (server, client):
        threads = [threading.Thread(target=load, args=(server.url,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        swaps = 12 if workers == 0 else 3
        for number in range(2, swaps + 2):
            publish(tmp_path / "twice" / str(number), number)
            assert eventually(lambda number=number: answer(client) == (str(number), number), 30)
        stopped.set()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200}
        assert all(version == str(int(factor)) for version, factor in seen)
        assert eventually(lambda: not [t for t in threading.enumerate() if t.name == "model-retirement"])


def test_every_model_has_its_share_of_the_cores(tmp_path: Path) -> None:
    one, other = write_artifact(tmp_path / "one.laconic"), write_artifact(tmp_path / "other.laconic")
    with running(one, other, threads=2, shares={"one": 3}) as server:
        executors = {model.name: len(model.batcher.executors) for model in server.app.repository}
        assert executors == {"one": 3, "other": 2}


@pytest.mark.parametrize("given", ["one=3,other=1", ["one=3", "other=1"], {"one": 3, "other": 1}])
def test_shares_are_read_from_text_options_and_files(given: object) -> None:
    settings = Settings.model_validate({"shares": given, "threads": 2})
    assert [settings.parallelism(name) for name in ("one", "other", "third")] == [(3, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("given", ["one", "one=", "one=0", ["=", "a=b"], 5])
def test_what_is_no_share_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="shares"):
        Settings.model_validate({"shares": given})


def test_no_thread_of_an_earlier_version_stays(tmp_path: Path) -> None:
    publish(tmp_path / "twice" / "1", 1)
    with serving(tmp_path) as (_, client):
        before = threading.active_count()
        for number in range(2, 7):
            publish(tmp_path / "twice" / str(number), number)
            assert eventually(lambda number=number: answer(client)[0] == str(number))
        assert eventually(lambda: threading.active_count() <= before + 1)
