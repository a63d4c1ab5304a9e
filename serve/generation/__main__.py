"""The program of a generation worker, `python -m serve.generation`.

It opens a model that writes, and steps it until the server closes the connection. The first line that it receives is
the job; it answers with the capacity of its cache, or the error. Each further line is a command, a request or a
cancellation; each line that it sends is a list of events. Empty lines are its heartbeat: they come from the thread that
steps the engine, so that an engine that hangs is noticed.
"""

import os
import socket
import sys
import threading
import time
import traceback
from io import BufferedReader
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import orjson

from laconic import registry
from laconic.errors import INTERRUPTS, ArtifactError, LaconicError
from laconic.hashing import digest_file
from laconic.runtimes.draft_file import DraftFile
from laconic.runtimes.generator import GenerationRequest, Generator, Sampling
from serve.generation.generation_job import GenerationJob
from serve.generation.packed_inputs import unpack_golden, unpack_inputs
from serve.workers.child_process import bind_to_parent, report_failure

HEARTBEAT = 1.0
"""Seconds between two heartbeats."""

Command = dict[str, Any]
"""`{"add": {"id": ..., "prompt": [...], "sampling": {...}, "source": ..., "adapter": ...}}`, `{"cancel": [request,
choice or null]}`, `{"load": [number of an adapter, folder]}`, which is answered, `{"unload": number}`, or
`{"end": true}`, which ends the worker once its prefix cache is written."""


def main() -> None:
    """Work until the server, or its end of the connection, is gone."""
    bind_to_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    lines = control.makefile("rb")
    job = orjson.loads(lines.readline() or b"null")
    code = 0
    if job is not None:
        try:
            work(control, lines, GenerationJob(**job))
        except OSError:  # the server closed the connection
            pass
        except BaseException:  # noqa: BLE001 - the server sees the end of the process; its log has the reason
            traceback.print_exc()
            code = 1
    os._exit(code)  # an engine's threads may still run


def work(control: socket.socket, lines: BufferedReader, job: GenerationJob) -> None:
    """Open the model and write. Raises OSError where the server is gone, and what the engine raises."""
    try:
        generator = open_generator(job)
    except INTERRUPTS:
        raise
    except BaseException as error:  # noqa: BLE001 - engines raise anything, and the server says what
        control.sendall(orjson.dumps(report_failure(error)) + b"\n")
        return
    commands: SimpleQueue[Command] = SimpleQueue()
    threading.Thread(target=receive, args=(lines, commands), daemon=True).start()
    if job.prefixes:
        generator.load_prefixes(Path(job.prefixes), job.digest)
    ledger = generator.ledger
    report: dict[str, Any] = {"blocks": ledger.total, "block_tokens": ledger.block_tokens}
    report |= {"source_tokens": generator.source_tokens, "note": generator.note}
    control.sendall(orjson.dumps(report) + b"\n")
    write(generator, commands, control)


def open_generator(job: GenerationJob) -> Generator:
    """Open the model of a job. Raises ArtifactError where the artifact has been replaced since the job was given,
    MissingPackage, and RuntimeFailure where the engine refuses the graph."""
    if digest_file(Path(job.manifest)).sha256 != job.digest:
        raise ArtifactError(f"{job.model} is not the file that is served any more. Load the model again")
    draft = {} if job.draft is None else {"draft": DraftFile(**{**job.draft, "model": Path(job.draft["model"])})}
    generator: Generator = registry.resolve("generator", job.engine)(
        Path(job.model),
        context=job.context,
        cache_bytes=job.cache_bytes,
        threads=job.threads,
        compute=job.compute,
        tokenizer=Path(job.tokenizer),
        generation=job.generation,
        longest=job.longest,
        golden=unpack_golden(job.golden),
        has_adapters=job.has_adapters,
        **draft,
    )
    return generator


def receive(lines: BufferedReader, commands: "SimpleQueue[Command]") -> None:
    """Receive commands. The process ends with the connection, whatever the engine does."""
    try:
        for line in lines:
            commands.put(orjson.loads(line))
    finally:
        os._exit(0)


def write(generator: Generator, commands: "SimpleQueue[Command]", control: socket.socket) -> None:
    """Step the engine while something is under way, and wait for commands while nothing is."""
    beat = time.monotonic()
    while True:
        events = obey(generator, commands)
        if not generator.is_idle:
            # Not `astuple`, which copies the values: 23 us a token, of the thread that steps (Xeon, 2026.4).
            events += [list(vars(event).values()) for event in generator.step()]
        now = time.monotonic()
        if events:
            control.sendall(orjson.dumps(events) + b"\n")
            beat = now
        elif now - beat >= HEARTBEAT:
            control.sendall(b"\n")
            beat = now


def obey(generator: Generator, commands: "SimpleQueue[Command]") -> list[Any]:
    """Obey the commands that have arrived; wait for one while nothing is under way. Return the events that say which
    requests are refused, and which adapters are loaded."""
    answers: list[Any] = []
    while True:
        try:
            command = commands.get(block=generator.is_idle and not answers, timeout=HEARTBEAT)
        except Empty:
            return answers
        if "cancel" in command:
            generator.cancel(*command["cancel"])
        elif "unload" in command:
            generator.unload_adapter(command["unload"])
        elif "load" in command:
            answers.append(load_adapter(generator, *command["load"]))
        elif "end" in command:
            generator.save_prefixes()
            os._exit(0)
        else:
            request = read_request(command["add"])
            try:
                generator.add(request)
            except LaconicError as error:
                answers.append({"id": request.id, **report_failure(error)})


def read_request(fields: dict[str, Any]) -> GenerationRequest:
    """Read a request from a command."""
    sampling = fields["sampling"]
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    sampling["logit_bias"] = tuple((token, bias) for token, bias in sampling["logit_bias"])
    source = unpack_inputs(fields["source"])
    return GenerationRequest(
        fields["id"], tuple(fields["prompt"]), Sampling(**sampling), source, fields.get("adapter", 0)
    )


def load_adapter(generator: Generator, number: int, folder: str) -> dict[str, Any]:
    """Load an adapter; return the event that says so, or why it is not. Whatever is wrong with its files, the engine
    goes on."""
    try:
        generator.load_adapter(number, Path(folder))
    except INTERRUPTS:
        raise
    except Exception as error:  # noqa: BLE001 - files may hold anything
        return {"adapter": number, **report_failure(error)}
    return {"adapter": number}


if __name__ == "__main__":
    main()
