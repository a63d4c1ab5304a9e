"""`laconic bench --url`: requests that a server's model takes, and the load in steps."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

import numpy as np

from laconic.commands.http_session import HEADER_LENGTH, write_request
from laconic.errors import DataError, UsageError
from laconic.loadtest.http_client import ConnectionFailed, HttpClient
from laconic.loadtest.traffic import Load, LoadPoint
from laconic.tensor import TensorSpec
from serve.protocol.infer_request import DTYPES

DISTINCT = 32
"""Different requests that are made up and sent in turn."""


@dataclass(frozen=True)
class ServedModel:
    """A model of a server. key: what the server lets in with, or None."""

    place: SplitResult
    name: str
    key: str | None

    def make_request(self, method: str, path: str, body: bytes = b"", header: int | None = None) -> bytes:
        """Make a whole HTTP request. header: the length of a V2 request's JSON."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.place.netloc}", f"Content-Length: {len(body)}"]
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        if header is not None:
            lines.append(f"{HEADER_LENGTH}: {header}")
        return "\r\n".join([*lines, "", ""]).encode() + body

    def make_tensor_requests(self, inputs: Sequence[dict[str, Any]], length: int, rows: int = 1) -> Iterator[bytes]:
        """Make requests made up by the signature. length: size of the free axes. rows: of each request."""
        specs = [
            TensorSpec(
                name=each["name"],
                dtype=DTYPES[each["datatype"]],
                shape=tuple(f"free{axis}" if size < 0 else size for axis, size in enumerate(each["shape"])),
            )
            for each in inputs
        ]
        sizes = {axis: length for spec in specs for axis in spec.shape[1:] if isinstance(axis, str)} | {"free0": rows}
        for seed in range(DISTINCT):
            rng = np.random.default_rng(seed)
            header, body = write_request({spec.name: spec.sample(rng, sizes) for spec in specs})
            yield self.make_request("POST", f"/v2/models/{self._path}/infer", body, header)

    def make_sample_requests(self, data: Path) -> Iterator[bytes]:
        """Make a request for each line of a file: of a .txt the text, of a .jsonl the whole body."""
        if data.suffix not in (".txt", ".jsonl"):
            raise UsageError(f"{data} is neither .txt nor .jsonl. Give a text, or the body of a request, per line")
        try:
            lines = [line for line in data.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {data}: {error}") from None
        if not lines:
            raise DataError(f"{data} has no samples: it is empty")
        for line in lines:
            body = line if data.suffix == ".jsonl" else json.dumps({"text": line})
            yield self.make_request("POST", f"/v1/models/{self._path}/predict", body.encode())

    async def ask(self, client: HttpClient, method: str, path: str) -> Any:
        """Send a request and parse the JSON of its answer."""
        return json.loads(await self.send(client, self.make_request(method, path)))

    async def send(self, client: HttpClient, request: bytes) -> bytes:
        """Send one request and return the body of its answer. Raises UsageError for another status than 200."""
        answer = await client.send(request)
        if answer.status != HTTPStatus.OK:
            reason = answer.body[:400].decode(errors="replace")
            raise UsageError(f"{self.place.geturl()} answered {answer.status}: {reason}")
        return answer.body

    @property
    def _path(self) -> str:
        return quote(self.name, safe="")

    async def read_inputs(self, client: HttpClient) -> Sequence[dict[str, Any]]:
        """Read the inputs of its signature, in the terms of the V2 protocol."""
        return list((await self.describe(client, ""))["inputs"])

    async def describe(self, client: HttpClient, route: str) -> Any:
        """Read what the server says of the model at a route such as /config."""
        return await self.ask(client, "GET", f"/v2/models/{self._path}{route}")


async def find_model(client: HttpClient, place: SplitResult, name: str | None, key: str | None) -> ServedModel:
    """Find the model of that name, or the only one of the server. Raises UsageError where there are several."""
    if name is None:
        index = await ServedModel(place, "", key).ask(client, "POST", "/v2/repository/index")
        names = list(dict.fromkeys(model["name"] for model in index))
        if len(names) != 1:
            raise UsageError(f"{place.geturl()} serves {', '.join(names) or 'no model'}. Choose one with --model")
        name = names[0]
    return ServedModel(place, name, key)


async def load_server(
    url: str,
    *,
    model: str | None,
    clients: Sequence[int],
    rates: Sequence[int],
    seconds: float,
    length: int,
    data: Path | None,
    key: str | None,
) -> list[LoadPoint]:
    """Load a server in steps: closed loops of `clients`, or open loops at `rates` if there are any.

    One request has to succeed first. model: may be None where the server has one. data: a file of samples; without it
    tensors are made up, with free axes of size `length`. Raises UsageError, DataError and ConnectionFailed.
    """
    place = urlsplit(url if "://" in url else f"http://{url}")
    if place.scheme not in ("http", "https") or not place.hostname:
        raise UsageError(f"{url!r} is not the address of a server. Give one as http://localhost:8000")
    try:
        connection = await HttpClient.connect(place)
    except ConnectionFailed as error:
        raise UsageError(f"{error}. Is the server running? `laconic serve` says its address when it is ready") from None
    with closing(connection) as client:
        served = await find_model(client, place, model, key)
        if data is None:
            requests = list(served.make_tensor_requests(await served.read_inputs(client), length))
        else:
            requests = list(served.make_sample_requests(data))
        await served.send(client, requests[0])
    load = Load(place, requests)
    if rates:
        return [LoadPoint.of("rate", rate, await load.run_open(rate, seconds)) for rate in rates]
    return [LoadPoint.of("clients", count, await load.run_closed(count, seconds)) for count in clients]


def bench_server(url: str, **options: Any) -> list[LoadPoint]:
    """Run `load_server` from outside of an event loop."""
    return asyncio.run(load_server(url, **options))
