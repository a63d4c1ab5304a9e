"""Settings of the server."""

from pydantic import BaseModel, ConfigDict, Field

from laconic.hardware import cores

MIB = 1 << 20
MAX_EXECUTORS = 8
"""Each executor holds the model once more, so beyond this many the remaining cores go to threads within."""


class Settings(BaseModel):
    """How models are opened and requests are bounded.

    runtime: the engine; the artifact's own where None. threads: cores that each model may use, all where None.
    executors: batches of a model that run at a time, sharing those threads; as many as threads where None, up to
    MAX_EXECUTORS: two executors of one thread gave 3 to 17 % more rows per CPU-second than one of two. unproven: serve
    artifacts whose verdict failed or is missing.

    queue_seconds: how long a request may have to wait for an executor. deadline: seconds after which a request that
    still waits is given up, where it does not say so itself. max_rows: samples of one request. max_body: bytes of a
    request, also unpacked. max_json: those of them that may be JSON. max_json_elements: its numbers, texts and so on;
    lists and objects count as 10. max_in_flight: bytes of all requests under way.

    max_connections: at a time. max_headers: bytes of a request's headers. header_timeout, keep_alive, write_timeout:
    seconds for the headers, between requests, and without the client taking anything of its answer. body_timeout,
    min_body_rate: seconds for the body, and another second for each so many bytes that have arrived. drain: seconds
    between the signal to stop, when the server says that it is not ready, and the closing of its port. grace: seconds
    that requests under way have to end after that.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime: str | None = None
    executors: int | None = Field(default=None, ge=1)
    threads: int | None = Field(default=None, ge=1)
    queue_seconds: float = Field(default=1.0, gt=0)
    deadline: float = Field(default=60.0, gt=0)
    max_rows: int = Field(default=4096, ge=1)
    max_body: int = Field(default=64 * MIB, ge=1)
    max_json: int = Field(default=16 * MIB, ge=1)
    max_json_elements: int = Field(default=500_000, ge=1)
    max_in_flight: int = Field(default=256 * MIB, ge=1)
    max_connections: int = Field(default=1000, ge=1)
    max_headers: int = Field(default=32 << 10, ge=1)
    header_timeout: float = Field(default=10.0, gt=0)
    body_timeout: float = Field(default=20.0, gt=0)
    min_body_rate: int = Field(default=16 << 10, ge=1)
    keep_alive: float = Field(default=75.0, gt=0)
    write_timeout: float = Field(default=30.0, gt=0)
    drain: float = Field(default=1.0, ge=0)
    grace: float = Field(default=30.0, ge=0)
    unproven: bool = False

    def parallelism(self) -> tuple[int, int]:
        """The number of executors, and the threads of each."""
        threads = self.threads or cores()
        executors = self.executors or min(threads, MAX_EXECUTORS)
        return executors, max(1, threads // executors)
