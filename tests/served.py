"""A real server over HTTP, and artifacts of kinds that only serving tells apart."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from artifacts import embedding_task, write_artifact
from safetensors.numpy import save_file

from laconic.arrays import Array, Arrays, first
from laconic.artifacts.manifest import GOLDEN, MANIFEST, MEASURED
from laconic.hashing import digest_file, seal, unseal
from laconic.metrics import cosine
from laconic.runtimes.fake import FakeSession
from laconic.tasks.audio_classification import AudioClassification
from laconic.tasks.audio_preprocess import AudioPreprocess
from laconic.tasks.image_classification import ImageClassification
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tasks.semantic_segmentation import SemanticSegmentation
from laconic.tasks.tensors import Tensors
from laconic.tasks.text_embedding import TextEmbedding
from laconic.tensor import TensorSpec
from serve.asgi.listener import bind, listen
from serve.http.app import App, create_app
from serve.server import Server
from serve.settings.server_settings import Settings

SEQ = "seq"
PIXELS = TensorSpec(name="x", dtype="float32", shape=("batch", 3, 4, 4))


class Padded(Tensors):
    """Arrays of any length, which share batches: a shorter one is filled with 7."""

    def __init__(self, inputs: tuple[TensorSpec, ...]) -> None:
        super().__init__(inputs)
        self.padding = {spec.name: 7 for spec in inputs}


class Brightness(ImageClassification):
    """An image to its largest value: the fake engine gives back what it is given."""

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        return [float(row.max()) for row in first(outputs)]

    def fidelity(self, reference: Arrays, candidate: Arrays) -> Array:
        return cosine(first(reference), first(candidate))


class Ranked(TextEmbedding):
    """A query and a document to the ids of the document's tokens, added up, by a model that doubles them."""

    embeds, ranks = False, True

    def parse(self, value: Any) -> Any:
        _, document = value
        return super().parse(document)

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        return [{"score": float(answer["embedding"].sum())} for answer in super().decode(outputs, samples)]


class Framed(Brightness):
    """An image to its left half and its lower right quarter, the first of which is found with more certainty."""

    def decode(self, outputs: Arrays, samples: Sequence[Any]) -> list[Any]:
        sides = ("xmin", "ymin", "xmax", "ymax")
        found = [
            {"score": score, "label": label, "box": dict(zip(sides, box, strict=True))}
            for score, label, box in ((0.875, "left", (0, 0, 20, 20)), (0.625, "corner", (20, 10, 40, 20)))
        ]
        return [{"objects": found if row.max() > 0.5 else []} for row in first(outputs)]


def change_artifact(
    path: Path, *, knee: int | None = None, golden: dict[str, Array] | None = None, **changes: Any
) -> Path:
    """Rewrite parts of an artifact's manifest, and seal it again."""
    manifest = unseal(path / MANIFEST)
    if golden is not None:
        save_file(golden, path / GOLDEN)
        manifest["files"][GOLDEN] = digest_file(path / GOLDEN).model_dump()
    (path / MANIFEST).write_bytes(seal(manifest | changes))
    if knee is not None:
        (path / MEASURED).write_bytes(seal(unseal(path / MEASURED) | {"knee": knee}))
    return path


def write_sequences(path: Path, *, task: str = "tensors", **model: Any) -> Path:
    """An artifact from x [batch, seq] to y = 2 x [batch, seq], with seq up to 64."""
    write_artifact(path, **model)
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", SEQ), bounds={SEQ: (1, 64)}).model_dump(mode="json")
    x = np.ones((2, 5), np.float32)
    return change_artifact(
        path,
        task=task,
        inputs=[spec],
        outputs=[spec | {"name": "y"}],
        golden={"0.input.x": x, "0.output.y": 2 * x},
    )


def write_text_model(path: Path) -> Path:
    """An "embedding" of a text: twice its token ids. Takes no attention mask, which the fake engine would ignore."""
    task = embedding_task()
    write_artifact(path, assets=task.assets(), input="input_ids")
    ids = np.array([[2, 3, 4]], np.int64)
    spec = task.inputs[0].model_dump(mode="json")
    return change_artifact(
        path,
        task=task.name,
        inputs=[spec],
        outputs=[spec | {"name": "y"}],
        golden={"0.input.input_ids": ids, "0.output.y": 2 * ids},
    )


def write_image_model(path: Path, task: str = "brightness") -> Path:
    """Takes 4 x 4 pixels, and answers the largest value, or as another task of the fake engine's images."""
    made = Brightness((PIXELS,), preprocess=ImagePreprocess(resize=(4, 4)), labels=("dark", "light"))
    write_artifact(path, assets=made.assets(), factor=1)
    x = np.ones((1, 3, 4, 4), np.float32)
    spec = PIXELS.model_dump(mode="json")
    return change_artifact(
        path,
        task=task,
        inputs=[spec],
        outputs=[spec | {"name": "y"}],
        golden={"0.input.x": x, "0.output.y": x},
    )


def write_segmentation_model(path: Path) -> Path:
    """Takes 4 x 4 pixels, and answers which of the colours each has most of."""
    labels = ("red", "green", "blue")
    task = SemanticSegmentation((PIXELS,), preprocess=ImagePreprocess(resize=(4, 4)), labels=labels)
    write_artifact(path, assets=task.assets(), factor=1)
    x = np.random.default_rng(0).random((1, 3, 4, 4), np.float32)
    spec = PIXELS.model_dump(mode="json")
    return change_artifact(
        path, task=task.name, inputs=[spec], outputs=[spec | {"name": "y"}], golden={"0.input.x": x, "0.output.y": x}
    )


def write_sound_model(path: Path) -> Path:
    """Takes 100 samples or more, each the logit of a class."""
    sizes = {"dtype": "float32", "shape": ("batch", "samples"), "bounds": {"samples": (100, 960_000)}}
    task = AudioClassification((TensorSpec(name="x", **sizes),), preprocess=AudioPreprocess())
    write_artifact(path, assets=task.assets(), factor=1)
    x = np.random.default_rng(0).random((1, 200), np.float32)
    spec, answer = (TensorSpec(name=name, **sizes).model_dump(mode="json") for name in ("x", "y"))
    return change_artifact(
        path, task=task.name, inputs=[spec], outputs=[answer], golden={"0.input.x": x, "0.output.y": x}
    )


@dataclass
class Running:
    """A server at work."""

    app: App
    port: int
    grpc_port: int = 0
    stop: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """As tritonclient takes it."""
        return f"127.0.0.1:{self.port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20)

    def batches(self, name: str) -> list[int]:
        """The rows of each batch that the fake engine ran, by all sessions, less the golden one."""
        sessions = self.app.repository.get(name).backend.sessions
        return [rows for session in sessions if isinstance(session, FakeSession) for rows in session.batches[1:]]


@contextmanager
def running(*paths: Path | str, **options: Any) -> Iterator[Running]:
    """Serve these artifacts in a thread, at a free port."""
    settings = Settings(**{"drain": 0} | options)
    app = create_app(paths, settings)
    ready = threading.Event()
    with bind("127.0.0.1", 0) as listener:
        listen(listener, "127.0.0.1", 0)
        server = Server(app, settings, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert ready.wait(20)
            grpc_port = server.grpc.port if server.grpc else 0
            stop = partial(setattr, server, "should_exit", True)
            yield Running(app, listener.getsockname()[1], grpc_port, stop)
        finally:
            server.should_exit = True
            thread.join()


def eventually(condition: Callable[[], bool], seconds: float = 5) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def request_of(rows: Any, name: str = "x", datatype: str = "FP32", **parameters: Any) -> dict[str, Any]:
    """A V2 request in JSON, with one input."""
    array = np.array(rows)
    tensor = {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.ravel().tolist()}
    return {"inputs": [tensor], "parameters": parameters}
