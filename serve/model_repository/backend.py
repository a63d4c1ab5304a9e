"""The interface of what runs the batches of a model."""

from collections.abc import Sequence
from typing import Protocol

from laconic.runtimes.runtime import Session


class Backend(Protocol):
    """Sessions that run concurrently. A session raises NotReady where its engine is gone."""

    @property
    def sessions(self) -> Sequence[Session]:
        """One for each batch that can run at a time."""

    @property
    def local(self) -> bool:
        """Whether a run happens in the thread that asks for it."""

    @property
    def runtime(self) -> str:
        """The name of the engine."""

    @property
    def note(self) -> str:
        """Why this engine was opened, where there was a choice."""

    @property
    def reason(self) -> str:
        """Why no batch can be run at present; empty where one can."""

    def interrupt(self) -> None:
        """Stop what runs, where it can be stopped."""

    def close(self) -> None:
        """Release everything, after the last run."""
