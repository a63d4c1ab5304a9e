"""A session that asks a server over HTTP, and one that lays its batches out as a server does."""

import http.client
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TextIO
from urllib.parse import quote

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.artifacts.artifact import Artifact
from laconic.errors import RuntimeFailure
from laconic.runtimes.runtime import Kernel, Session
from serve.batching.layout import Layout
from serve.protocol.infer_request import DATATYPES, DTYPES

HOST = "127.0.0.1"
HEADER_LENGTH = "Inference-Header-Content-Length"
PATIENCE = 60
"""Seconds that a response may take."""


class HttpSession(Session):
    """Sends each run as a KServe V2 request with binary tensors, on one connection."""

    def __init__(self, connection: http.client.HTTPConnection, model: str) -> None:
        self._connection = connection
        self._path = f"/v2/models/{quote(model, safe='')}/infer"

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        header, body = write_request(inputs)
        try:
            self._connection.request("POST", self._path, body, {HEADER_LENGTH: str(header)})
            response = self._connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeFailure(f"the server closed the connection: {error}") from error
        if response.status != http.client.OK:
            raise RuntimeFailure(f"the server answered {response.status}: {content[:400].decode(errors='replace')}")
        return read_response(content, int(response.headers[HEADER_LENGTH]))

    def close(self) -> None:
        self._connection.close()


def write_request(inputs: Mapping[str, Array]) -> tuple[int, bytes]:
    """Write a V2 request that asks for binary outputs: the length of its JSON, and the body."""
    data = [np.ascontiguousarray(array).tobytes() for array in inputs.values()]
    described = [
        {
            "name": name,
            "datatype": DATATYPES[array.dtype],
            "shape": array.shape,
            "parameters": {"binary_data_size": len(content)},
        }
        for (name, array), content in zip(inputs.items(), data, strict=True)
    ]
    header = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    return len(header), b"".join([header, *data])


def read_response(content: bytes, header: int) -> Arrays:
    """Read the outputs of a V2 response with binary tensors, by name. header: the length of its JSON."""
    outputs: Arrays = {}
    place = header
    for output in json.loads(content[:header])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        array = np.frombuffer(content[place : place + size], DTYPES[output["datatype"]])
        outputs[output["name"]] = array.reshape(output["shape"])
        place += size
    return outputs


class LaidOutSession(Session):
    """A session that is given each batch as the server would lay out a request that is alone in the queue: free axes
    padded to the same sizes, and the padding cut from the outputs."""

    def __init__(self, session: Session, layout: Layout) -> None:
        self._session = session
        self._layout = layout

    @classmethod
    def of(cls, session: Session, artifact: Artifact) -> "LaidOutSession":
        """Lay batches out as for this artifact."""
        manifest, task = artifact.manifest, artifact.task()
        padding, rounded = task.padding, manifest.batching
        return cls(
            session, Layout(manifest.inputs, manifest.outputs, padding, rounded=rounded, derive=task.derive_sizes)
        )

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        part = self._layout.make_part(dict(inputs))
        (outputs,) = self._layout.split_outputs(self._session.run(self._layout.join_inputs([part])), [part])
        return outputs

    def kernels(self) -> list[Kernel]:
        return self._session.kernels()

    def close(self) -> None:
        self._session.close()


@contextmanager
def open_served(artifact: Artifact, runtime: str) -> Iterator[HttpSession]:
    """Serve an artifact on one engine thread, and open a session that sends it requests.

    Its verdict need not have passed. Raises what `start_server` raises.
    """
    with start_server(artifact, "--runtime", runtime, "--unproven", "--threads", "1") as server:
        connection = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE)
        with closing(connection):
            yield HttpSession(connection, artifact.name)


@dataclass(frozen=True)
class StartedServer:
    """Where a server listens, and its process."""

    host: str
    port: int
    process: int


@contextmanager
def start_server(artifact: Artifact, *options: str) -> Iterator[StartedServer]:
    """Serve an artifact with `laconic serve`, in a process of its own, on a free port of this machine.

    Raises RuntimeFailure with the server's reason if it does not start.
    """
    # -P: no module of the working folder takes a package's place.
    command = [sys.executable, "-P", "-m", "laconic", "serve", str(artifact.path), *options]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as log,
        subprocess.Popen(  # noqa: S603 - our own command, without a shell
            [*command, "--host", HOST, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"LACONIC_SERVE_DRAIN": "0"},
        ) as server,
    ):
        try:
            host, port = read_address(server, log)
            yield StartedServer(host, port, server.pid)
        finally:
            server.terminate()


def read_address(server: "subprocess.Popen[str]", log: TextIO) -> tuple[str, int]:
    """Read the address that a server prints when it is ready. log: what it wrote about its failure. Raises
    RuntimeFailure."""
    assert server.stdout is not None, "the caller pipes it"
    _, scheme, address = server.stdout.readline().partition("http://")
    if not scheme:
        server.wait()
        log.seek(0)
        reason = log.read().strip().rpartition("laconic: ")[2]
        raise RuntimeFailure(reason or "the server ended before it was ready, without a reason")
    host, _, port = address.strip().partition(":")
    return host, int(port)
