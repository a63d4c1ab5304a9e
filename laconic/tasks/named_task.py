"""What all parts of a task's interface share: how the task and its samples are called."""

from typing import ClassVar


class NamedTask:
    """What the registry, artifacts and recipes know a task by, and the names of its samples and figure."""

    name: ClassVar[str]
    """The name in the registry."""
    field: ClassVar[str]
    """The key of a sample, in a file of samples and over HTTP."""
    metric: ClassVar[str]
    """The name of the figure that `scorer` computes."""
