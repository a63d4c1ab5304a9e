"""Settings of the server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from laconic.config import Strict
from laconic.hardware import cores, memory
from laconic.units import Bytes

RAY = "Ray"
"""The panel of what `--on ray` alone needs."""
VLLM = "vLLM"
"""The panel of what `--on vllm` alone needs."""
KIB = 1 << 10
MIB = 1 << 20
MAX_PORT = 65_535
MAX_EXECUTORS = 8
"""Each executor holds the model once more, so beyond this many the remaining cores go to threads within. Two executors
of one thread gave 3 to 17 % more rows per CPU-second than one of two."""

Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)]
"""Several names, as a list, or with commas between them."""
Place = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)]
"""A folder or an address: a Path would make one slash of the two in an address."""
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def read_pairs(value: Any) -> Any:
    """Read values by model from `a=2,b=1` or a list of `a=2`; a mapping stays as it is."""
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, list):
        pairs = [str(each).partition("=") for each in value]
        return {name: number for name, _, number in pairs}
    return value


def read_digests(value: Any) -> Any:
    """Read digests by model as `read_pairs` does; one without a name belongs to the only model."""
    if isinstance(value, str):
        value = value.split(",")
    return read_pairs(
        [each if "=" in str(each) else f"={each}" for each in value] if isinstance(value, list) else value
    )


def read_options(value: Any) -> Any:
    """Read options of another program as `read_pairs` does; what is no text becomes JSON, as which a program takes
    it."""
    pairs = read_pairs(value)
    if not isinstance(pairs, dict):
        return pairs
    return {name: each if isinstance(each, str) else json.dumps(each) for name, each in pairs.items()}


Options = Annotated[dict[str, str], BeforeValidator(read_options)]
"""Values by the names of options."""
Shares = Annotated[dict[str, Annotated[int, Field(ge=1)]], BeforeValidator(read_pairs)]
"""Cores by the name of a model."""
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Digests = Annotated[dict[str, Digest], BeforeValidator(read_digests)]
"""SHA-256 by the name of a model."""


def fit_memory(most: int, part: int) -> Callable[[dict[str, Any]], int]:
    """Return what computes a default in bytes: `most`, or one part in so many of the memory where that is less, divided
    among the processes that share the port."""

    def choose(values: dict[str, Any]) -> int:
        available = memory() // (part * values.get("fronts", 1))
        return min(most, available) if available else most

    return choose


def setting(default: Any, panel: str, meaning: str, **constraints: Any) -> Any:
    """Define a setting once: for the file, the environment, the command line and the documentation.

    default: a value, or a function of the settings before it. panel: of the help. meaning: a phrase without a full
    stop; it names the default where that is None or computed.
    """
    start = {"default_factory": default} if callable(default) else {"default": default}
    return Field(**start, description=meaning, json_schema_extra={"panel": panel}, **constraints)


class Settings(Strict):
    """How models are opened and requests are bounded, each with its default, its panel in the help and its meaning."""

    runtime: str | None = setting(
        None,
        "Engines",
        "engine; default: the one that each artifact was written for, of a portable artifact the fastest on this "
        "machine",
    )
    executors: int | None = setting(
        None, "Engines", "batches that run at a time; default: as many as threads, at most 8", ge=1
    )
    threads: int | None = setting(None, "Engines", "cores to use; default: all", ge=1)
    fronts: int = setting(1, "Engines", "processes that share the port and the cores", ge=1)
    workers: int | None = setting(
        None,
        "Engines",
        "processes in which the engine of each model runs; 0: the server's own; default: 1, for a tiny model 0, "
        "for a model on GPUs one for each",
        ge=0,
    )
    watchdog: Seconds = setting(
        8.0,
        "Engines",
        "seconds after which a worker is killed that gives no sign of life or runs one batch; of a model that "
        "writes, so many for every 32 tokens of the longest answer",
    )
    max_crashes: int = setting(
        5, "Engines", "crashes of a worker in a row, after the last of which it is not started again", ge=1
    )
    kv_cache: Bytes = setting(
        fit_memory(1024 * MIB, 4),
        "Engines",
        "cache of a language model, shared by the requests that it writes answers to; default: 1 GiB, or a quarter of "
        "the memory where that is less",
    )
    prefix_cache: Path | None = setting(
        None,
        "Engines",
        "folder that the prefix caches of language models are kept in when the server stops; default: they are lost",
    )
    models: Place | None = setting(
        None, "Models", "folder of artifacts that is watched, or an address of several (s3://, gs://, hf://)"
    )
    adapters: Path | None = setting(
        None,
        "Models",
        "folder of LoRA adapters that is watched: `MODEL/NAME`, in peft's format, beside the language model MODEL",
    )
    require: Names = setting(
        (),
        "Models",
        "names of models without which the server is not ready; the option is `--require NAME`, and may be repeated",
    )
    sha256: Digests | None = setting(
        None,
        "Models",
        "digests of the `manifest.json` of artifacts, as `{minilm: 9f86...}`, or `minilm=9f86...`; the option is "
        "`--sha256 [minilm=]9f86...`",
    )
    require_signature: Path | None = setting(
        None,
        "Models",
        "public key (elliptic curve P-256, PEM) of who must have signed each artifact; default: none is needed",
    )
    download_timeout: Seconds = setting(
        30.0, "Models", "seconds without a byte after which the download of an artifact is given up"
    )
    keep_versions: int = setting(1, "Models", "newest versions of each model in that folder that are served", ge=1)
    poll: Seconds = setting(1.0, "Models", "seconds between two looks at the folder")
    shares: Shares | None = setting(
        None,
        "Models",
        "cores of some models in place of `threads`, as `{minilm: 2, resnet: 6}`, or `minilm=2,resnet=6`; the "
        "option is `--share minilm=2`",
    )
    grpc_port: int | None = setting(
        None, "Engines", "port for gRPC, 0 for a free one; default: no gRPC", ge=0, le=MAX_PORT
    )
    queue_seconds: Seconds = setting(
        1.0, "Queue", "longest expected wait in the queue, in seconds; a request that would wait longer gets 429"
    )
    deadline: Seconds = setting(60.0, "Queue", "seconds after which a request that is still in the queue gets 504")
    max_waiting: int = setting(
        256, "Queue", "requests that wait for room in the cache of a language model; further ones get 429", ge=0
    )
    max_rows: int = setting(4096, "Requests", "samples or rows of one request", ge=1)
    max_body: Bytes = setting(
        fit_memory(64 * MIB, 8),
        "Requests",
        "body of one request, both as sent and decompressed; default: 64 MiB, or an eighth of the memory where that is "
        "less",
    )
    max_json: Bytes = setting(
        16 * MIB, "Requests", "JSON of one request; tensors in binary and image files are not JSON"
    )
    max_json_elements: int = setting(
        500_000, "Requests", "elements of the JSON, estimated by its commas; a list or an object counts as 10", ge=1
    )
    max_in_flight: Bytes = setting(
        fit_memory(256 * MIB, 8),
        "Requests",
        "bodies and large answers of all requests together; default: 256 MiB, or an eighth of the memory where that is "
        "less",
    )
    max_connections: int = setting(1000, "Connections", "connections at a time", ge=1)
    max_headers: Bytes = setting(32 * KIB, "Connections", "headers of one request")
    header_timeout: Seconds = setting(10.0, "Connections", "seconds for the headers to arrive")
    body_timeout: Seconds = setting(20.0, "Connections", "seconds for the body to arrive, extended by `min_body_rate`")
    min_body_rate: Bytes = setting(
        16 * KIB, "Connections", "bytes of the body that extend `body_timeout` by one second"
    )
    keep_alive: Seconds = setting(
        75.0, "Connections", "seconds that an idle connection stays open; set it longer than that of the load balancer"
    )
    write_timeout: Seconds = setting(30.0, "Connections", "seconds that a client may take nothing of its answer")
    drain: float = setting(
        1.0, "Stop", "seconds between SIGTERM and the closing of the port", ge=0, allow_inf_nan=False
    )
    grace: float = setting(
        25.0,
        "Stop",
        "seconds between SIGTERM and the end of requests that are still in flight, `drain` included",
        ge=0,
        allow_inf_nan=False,
    )
    unproven: bool = setting(False, "Engines", "serve artifacts whose verdict failed or is missing")
    api_key_file: Path | None = setting(None, "Access", "file of keys, one of which every request needs")
    api_keys: str | None = setting(
        None,
        "Access",
        "the same keys as text; not an option, because other users of the machine can read a command line",
        repr=False,
    )
    requests_per_second: Rate | None = setting(None, "Access", "rate of each key; default: any")
    rows_per_second: Rate | None = setting(None, "Access", "rate of each key, in samples or rows; default: any")
    allowed_hosts: Names = setting(
        (), "Access", "names of the server that the header `Host` may have; default: any, on a loopback address its own"
    )
    cors_origins: Names = setting(
        (), "Access", "origins whose web pages may send requests; default: none but the server's own"
    )
    tls_cert: Path | None = setting(None, "Access", "certificate chain for TLS, in PEM")
    tls_key: Path | None = setting(None, "Access", "private key of the certificate, in PEM")
    admin: str | None = setting(None, "Access", "address of operators: a port, `HOST:PORT` or `unix:PATH`")
    log_format: Literal["text", "json"] = setting("text", "Observation", "format of the log: `text` or `json`")
    access_log: float = setting(
        0,
        "Observation",
        "share of requests that get a line in the log: 1 is every one, 0.01 one of a hundred",
        ge=0,
        le=1,
    )
    otlp_endpoint: str | None = setting(None, "Observation", "URL where traces are sent; default: none are made")
    ray_address: str | None = setting(
        None,
        RAY,
        "address of a Ray cluster; default: `RAY_ADDRESS`, or a cluster on this machine that ends with the server",
    )
    replicas: int = setting(1, RAY, "replicas of each model, the fewest where their number follows the load", ge=1)
    max_replicas: int | None = setting(None, RAY, "most replicas of each model; default: `replicas`", ge=1)
    target_ongoing: Rate = setting(4.0, RAY, "requests in flight for each replica, beyond which there are to be more")
    scale_up_after: Seconds = setting(10.0, RAY, "seconds of more load after which replicas are added")
    scale_down_after: Seconds = setting(120.0, RAY, "seconds of less load after which replicas are removed")
    replica_gpus: float = setting(
        0.0, RAY, "GPUs of each replica, as 0.25; Ray counts them, and bounds no memory", ge=0, allow_inf_nan=False
    )

    vllm: str = setting("vllm", VLLM, "program `vllm`, or the environment (venv) that has it, with `--on vllm`")
    vllm_options: Options | None = setting(
        None,
        VLLM,
        "options of `vllm serve`, as `{max-model-len: 4096}`, or `max-model-len=4096,enforce-eager=true`; the option "
        "is `--vllm-option max-model-len=4096`, and may be repeated",
    )

    def parallelism(self, model: str = "") -> tuple[int, int]:
        """Return the number of executors of a model, and the threads of each."""
        threads = (self.shares or {}).get(model) or self.threads or cores()
        executors = self.executors or min(threads, MAX_EXECUTORS)
        return executors, max(1, threads // executors)

    def find_digest(self, model: str) -> str | None:
        """Return the digest that the manifest of a model must have; None for any."""
        digests = self.sha256 or {}
        return digests.get(model, digests.get(""))
