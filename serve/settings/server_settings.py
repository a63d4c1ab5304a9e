"""Settings of the server."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from laconic.config import Strict
from laconic.hardware import cores
from laconic.units import parse_bytes

KIB = 1 << 10
MIB = 1 << 20
MAX_PORT = 65_535
MAX_EXECUTORS = 8
"""Each executor holds the model once more, so beyond this many the remaining cores go to threads within."""

Bytes = Annotated[int, BeforeValidator(parse_bytes)]
"""A number of bytes, or a size with its unit."""
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)]
"""Several names, as a list, or with commas between them."""
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def read_shares(value: Any) -> Any:
    """Cores by model, from `a=2,b=1` or a list of `a=2`; a mapping stays as it is."""
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, list):
        pairs = [str(each).partition("=") for each in value]
        return {name: number for name, _, number in pairs}
    return value


Shares = Annotated[dict[str, Annotated[int, Field(ge=1)]], BeforeValidator(read_shares)]
"""Cores by the name of a model."""


class Settings(Strict):
    """How models are opened and requests are bounded.

    runtime: the engine; the artifact's own where None. threads: cores that each model may use, all where None.
    executors: batches of a model that run at a time, sharing those threads; as many as threads where None, up to
    MAX_EXECUTORS: two executors of one thread gave 3 to 17 % more rows per CPU-second than one of two. workers:
    processes of each model in which its engine runs; 0 runs it in the server's own. unproven: serve artifacts whose
    verdict failed or is missing.

    fronts: server processes that share the port and the cores.

    watchdog: seconds after which a worker is killed that gives no sign of life, or runs one batch; of a model that
    writes, so many for every 32 tokens of the longest answer. max_crashes: of a worker in a row, after which it is not
    started again.

    models: a folder of artifacts that is watched. require: names of models without which the server is not ready.
    keep_versions: the newest versions of each model in the folder that are served. poll: seconds between two looks at
    the folder. shares: the cores of some models, by name, in place of `threads`.

    grpc_port: where the V2 protocol is also served over gRPC; 0 takes a free port; nowhere where None.

    queue_seconds: how long a request may have to wait for an executor. deadline: seconds after which a request that
    still waits is given up, where it does not say so itself. max_rows: samples of one request. max_body: bytes of a
    request, also unpacked. max_json: those of them that may be JSON. max_json_elements: its numbers, texts and so on;
    lists and objects count as 10. max_in_flight: bytes of all requests under way.

    max_connections: at a time. max_headers: bytes of a request's headers. header_timeout, keep_alive, write_timeout:
    seconds for the headers, between requests, and without the client taking anything of its answer. body_timeout,
    min_body_rate: seconds for the body, and another second for each so many bytes that have arrived. drain: seconds
    between the signal to stop, when the server says that it is not ready, and the closing of its port. grace: seconds
    between the signal and the end of requests that are still under way: Kubernetes kills after 30.

    api_key_file, api_keys: lines `NAME=KEY`; requests have to carry one of the keys where there are any.
    requests_per_second, rows_per_second: of one key. allowed_hosts: the names that requests may ask for, all where none
    is given, save on a loopback address. cors_origins: whose web pages may send requests. tls_cert, tls_key: in PEM.
    admin: where metrics, statistics and configurations are answered, and not elsewhere then.

    log_format: of the log on standard error. access_log: the share of requests that get a line in it. otlp_endpoint:
    where traces are sent.
    """

    runtime: str | None = None
    executors: int | None = Field(default=None, ge=1)
    threads: int | None = Field(default=None, ge=1)
    fronts: int = Field(default=1, ge=1)
    workers: int | None = Field(default=None, ge=0)
    watchdog: Seconds = 8.0
    max_crashes: int = Field(default=5, ge=1)
    models: Path | None = None
    require: Names = ()
    keep_versions: int = Field(default=1, ge=1)
    poll: Seconds = 1.0
    shares: Shares | None = None
    grpc_port: int | None = Field(default=None, ge=0, le=MAX_PORT)
    queue_seconds: Seconds = 1.0
    deadline: Seconds = 60.0
    max_rows: int = Field(default=4096, ge=1)
    max_body: Bytes = 64 * MIB
    max_json: Bytes = 16 * MIB
    max_json_elements: int = Field(default=500_000, ge=1)
    max_in_flight: Bytes = 256 * MIB
    max_connections: int = Field(default=1000, ge=1)
    max_headers: Bytes = 32 * KIB
    header_timeout: Seconds = 10.0
    body_timeout: Seconds = 20.0
    min_body_rate: Bytes = 16 * KIB
    keep_alive: Seconds = 75.0
    write_timeout: Seconds = 30.0
    drain: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    grace: float = Field(default=25.0, ge=0, allow_inf_nan=False)
    unproven: bool = False
    api_key_file: Path | None = None
    api_keys: str | None = Field(default=None, repr=False)
    requests_per_second: Rate | None = None
    rows_per_second: Rate | None = None
    allowed_hosts: Names = ()
    cors_origins: Names = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    admin: str | None = None
    log_format: Literal["text", "json"] = "text"
    access_log: float = Field(default=0, ge=0, le=1)
    otlp_endpoint: str | None = None

    def parallelism(self, model: str = "") -> tuple[int, int]:
        """The number of executors of a model, and the threads of each."""
        threads = (self.shares or {}).get(model) or self.threads or cores()
        executors = self.executors or min(threads, MAX_EXECUTORS)
        return executors, max(1, threads // executors)
