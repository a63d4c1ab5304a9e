"""The program of an engine worker, `python -m serve.workers`.

It opens an artifact, and answers batches until the server closes the connection. It knows neither HTTP nor the queue.
The first line that it receives is the job; it answers with a line that tells what was opened, or the error. Empty lines
after that are its heartbeat.
"""

import contextlib
import os
import socket
import sys
import threading
import traceback
from pathlib import Path

import orjson

from laconic.arrays import Arrays
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.manifest import MANIFEST
from laconic.errors import INTERRUPTS, ArtifactError, list_causes
from laconic.hardware import return_freed_memory
from laconic.hashing import digest_file
from laconic.runtimes.runtime import Session
from serve.workers.child_process import bind_to_parent, report_failure
from serve.workers.engine_job import EngineJob
from serve.workers.engine_sessions import EngineSessions
from serve.workers.frames import receive_frame, send_frame

HEARTBEAT = 1.0
"""Seconds between two heartbeats."""


def main() -> None:
    """Work until the server, or its end of the connection, is gone."""
    bind_to_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    with control.makefile("rb") as lines:
        request = orjson.loads(lines.readline() or b"null")
    if request is not None:
        connections = [socket.socket(fileno=number) for number in request["connections"]]
        work(control, connections, EngineJob(**request["job"]))
    os._exit(0)  # an engine's threads may still run


def work(control: socket.socket, connections: list[socket.socket], job: EngineJob) -> None:
    """Open the artifact and answer batches, one session for each connection."""
    try:
        opened = open_job(job)
    except INTERRUPTS:
        raise
    except BaseException as error:  # noqa: BLE001 - engines raise anything, and the server says what
        control.sendall(orjson.dumps(report_failure(error)) + b"\n")
        return
    for session, connection in zip(opened.sessions, connections, strict=True):
        threading.Thread(target=answer, args=(session, connection), daemon=True).start()
    return_freed_memory()  # what the graph took while the engine compiled it
    control.sendall(orjson.dumps({"runtime": opened.runtime, "note": opened.note}) + b"\n")
    beat(control)


def open_job(job: EngineJob) -> EngineSessions:
    """Open the sessions of a job. Raises ArtifactError where the artifact has been replaced since the job was given."""
    path = Path(job.path)
    if digest_file(path / MANIFEST).sha256 != job.digest:
        raise ArtifactError(f"{path} holds another artifact than the one that is served. Load the model again")
    return EngineSessions.open(Artifact.read(path), job)


def answer(session: Session, connection: socket.socket) -> None:
    """Answer batches with their outputs, or with the error of the engine, until the server closes the connection.

    The process ends with the connection: the server waits for each of its sessions, and starts another worker.
    """
    code = 0
    try:
        while True:
            inputs, _ = receive_frame(connection)
            send_frame(connection, *run(session, inputs))
    except OSError:  # the server closed it
        pass
    except BaseException:  # noqa: BLE001 - with this thread alone, its session would be gone unnoticed
        traceback.print_exc()
        code = 1
    os._exit(code)


def run(session: Session, inputs: Arrays) -> tuple[Arrays, str]:
    """Return the outputs, or nothing and the engine's error."""
    try:
        return session.run(inputs), ""
    except BaseException as error:  # noqa: BLE001 - engines raise anything, and the worker must live on
        return {}, describe(error)


def describe(error: BaseException) -> str:
    """Describe an engine's exception with its causes."""
    texts = [
        "out of memory" if isinstance(cause, MemoryError) else str(cause) or type(cause).__name__
        for cause in list_causes(error)
    ]
    return "; ".join(dict.fromkeys(texts)).encode(errors="replace").decode()


def beat(control: socket.socket) -> None:
    """Tell the server once a second that this process is alive, until the server closes the connection."""
    control.settimeout(HEARTBEAT)
    with contextlib.suppress(OSError):
        while True:
            try:
                if not control.recv(1):
                    return
            except TimeoutError:
                control.send(b"\n")


if __name__ == "__main__":
    main()
