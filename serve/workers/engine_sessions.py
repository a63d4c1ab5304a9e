"""The sessions of an artifact in the engine that is fastest on this machine, opened and checked."""

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.artifacts.artifact import Artifact, Choice
from laconic.runtimes.runtime import Session
from serve.workers.engine_job import EngineJob


@dataclass(frozen=True)
class EngineSessions:
    """Sessions that run concurrently in this process.

    runtime: the name of their engine. note: why this engine was opened, where there was a choice.
    """

    sessions: Sequence[Session]
    runtime: str
    note: str

    local = True
    reason = ""
    """Why the model cannot be run at present; nothing happens to an engine in this process."""

    @classmethod
    def open(cls, artifact: Artifact, job: EngineJob) -> "EngineSessions":
        """Open the sessions of a job on its artifact; golden outputs are checked.

        Raises UnprovenArtifact, also for a verdict that failed unless the job allows it, and what the engine raises.
        """
        choice = artifact.choose(job.runtime, threads=job.threads)
        if not job.unproven:
            artifact.require_proof(choice.placement)
        sessions = artifact.open_placement(choice.engine, choice.placement, job.sessions, threads=job.threads)
        return cls(sessions, choice.engine.name, describe_race(choice) if choice.speeds else "")

    def interrupt(self) -> None:
        """Do nothing: a run in this process cannot be stopped."""

    def close(self) -> None:
        """Close the sessions, none of which may run."""
        for session in self.sessions:
            session.close()


def describe_race(choice: Choice) -> str:
    """Describe which placement is opened, and how fast the others are on this machine."""
    fastest = choice.speeds[choice.engine.name]
    others = [
        f"{fastest / speed:.2f} x the speed of {name}"
        for name, speed in choice.speeds.items()
        if name != choice.engine.name and speed > 0
    ]
    return f"{choice.engine.name}, {choice.placement.compute}: " + (", ".join(others) or "the others do not run here")
