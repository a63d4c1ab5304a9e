"""What to open, in this process or in a worker."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineJob:
    """What to open, in this process or in a worker. path: of an artifact whose files the server has checked against its
    manifest; digest: of that manifest. threads: of each session. runtime: an engine; the fastest where None."""

    path: str
    digest: str
    sessions: int
    threads: int
    runtime: str | None
    unproven: bool
