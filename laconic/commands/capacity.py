"""The command `size`: how many replicas and cores a load takes."""

import asyncio
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from laconic.commands.options import ArtifactPath, Json, RuntimeName, print_json
from laconic.errors import GoalMissed, UsageError
from laconic.hardware import cores
from laconic.units import parse_seconds

if TYPE_CHECKING:
    from laconic.artifacts.artifact import Artifact
    from laconic.capacity.service_times import ServiceTimes
    from laconic.commands.http_session import StartedServer

RATE = re.compile(r"(\d+(?:\.\d+)?)/(s|min)")
PER_SECOND = {"s": 1.0, "min": 1 / 60}


def size(
    artifact: ArtifactPath,
    rate: Annotated[str, typer.Option(help="Requests, as 2000/s or 300/min.")],
    p99: Annotated[str, typer.Option(help="Time in which 99 of 100 requests are to be answered, as 50ms.")],
    threads: Annotated[int | None, typer.Option(min=1, help="Cores of each replica; default: all here.")] = None,
    runtime: RuntimeName = None,
    length: Annotated[int, typer.Option(min=1, help="Size of the free axes of made-up inputs.")] = 32,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of each measurement.")] = 0.5,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each measurement is made.")] = 3,
    chart: Annotated[Path | None, typer.Option(help="Draw the rate against the p99, as .svg or .png.")] = None,
    as_json: Json = False,
) -> None:
    """Say how many replicas of a server, and of how many cores, answer a rate of requests in time.

    Serves the artifact on this machine, measures its times by the size of a batch, and simulates the queue. The exit
    code is 3 if no number of replicas is enough.
    """
    from laconic.artifacts.artifact import Artifact
    from laconic.capacity.sizing import size_replicas
    from laconic.commands.capacity_table import print_sizing

    requests, seconds_allowed = parse_rate(rate), parse_limit(p99)
    if chart is not None and chart.suffix not in (".svg", ".png"):
        raise UsageError(f"{chart} is neither .svg nor .png")
    loaded, replica_cores = Artifact.load(artifact), threads or cores()
    measured = measure_artifact(loaded, replica_cores, runtime, length=length, seconds=seconds, rounds=rounds)
    sizing = size_replicas(measured, requests, seconds_allowed, replica_cores)
    if chart is not None:
        from laconic.capacity.capacity_chart import draw_capacity

        draw_capacity(sizing, f"{loaded.name}, {replica_cores} cores", chart)
    print_json(sizing.model_dump()) if as_json else print_sizing(sizing)
    if sizing.replicas is None:
        raise GoalMissed(f"even a request that is alone takes longer than {p99} in one of 100 cases")


def parse_rate(text: str) -> float:
    """Parse a rate, "2000/s", to requests a second. Raises UsageError."""
    match = RATE.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--rate must be requests by time, as 2000/s or 300/min, not {text!r}")
    return float(match[1]) * PER_SECOND[match[2]]


def parse_limit(text: str) -> float:
    """Parse the option --p99, "50ms", to seconds. Raises UsageError."""
    try:
        return parse_seconds(text)
    except ValueError:
        raise UsageError(f"--p99 must be a time with its unit, as 50ms or 0.2s, not {text!r}") from None


def measure_artifact(
    artifact: "Artifact", threads: int, runtime: str | None, *, length: int, seconds: float, rounds: int
) -> "list[ServiceTimes]":
    """Serve an artifact on so many cores, and measure it. Raises UsageError for a model that writes."""
    from laconic.commands.http_session import start_server
    from serve.generation.text_writer import WritingTask

    if artifact.task().generation is not None and isinstance(artifact.task(), WritingTask):
        raise UsageError(f"{artifact.path} writes text: its requests share the engine, there is no queue to simulate")
    options = ["--threads", str(threads), *(("--runtime", runtime) if runtime else ())]
    with start_server(artifact, *options, "--queue-seconds", "60") as server:
        return asyncio.run(probe(server, artifact.name, length=length, seconds=seconds, rounds=rounds))


async def probe(
    server: "StartedServer", model: str, *, length: int, seconds: float, rounds: int
) -> "list[ServiceTimes]":
    """Measure the only model of a running server with made-up inputs."""
    from laconic.capacity.service_times import ServerProbe
    from laconic.commands.load import find_model
    from laconic.loadtest.http_client import HttpClient

    place = urlsplit(f"http://{server.host}:{server.port}")
    with closing(await HttpClient.connect(place)) as client:
        served = await find_model(client, place, model, None)
        inputs = await served.read_inputs(client)

        def make_request(rows: int) -> bytes:
            return next(served.make_tensor_requests(inputs, length, rows))

        return await ServerProbe(
            place, server.process, make_request, lambda route: served.describe(client, route), seconds
        ).measure(rounds)
