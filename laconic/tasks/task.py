"""The interface of a task: every question whose answer depends on what a model is for, in parts by who asks."""

from pathlib import Path

from laconic import registry
from laconic.errors import INTERRUPTS, CorruptArtifact
from laconic.tasks.answer_comparison import AnswerComparison
from laconic.tasks.assets import VOCABULARY, read_asset
from laconic.tasks.checkpoint_loading import CheckpointLoading
from laconic.tasks.processing import ServedTask
from laconic.tasks.row_parsing import RowParsing
from laconic.tasks.training_needs import TrainingNeeds
from laconic.tensor import TensorSpec


class Task(ServedTask, RowParsing, AnswerComparison, CheckpointLoading, TrainingNeeds):
    """What a model is for.

    Code outside `laconic.tasks` asks a task by its attributes and methods, and never compares its name or its class: a
    new task is one module and a line in the registry. Code that needs one part of it alone takes that part as its type.
    """


def open_task(name: str, folder: Path, inputs: tuple[TensorSpec, ...]) -> Task:
    """Make the task registered under `name` from the files that its `assets` wrote to a folder.

    Raises CorruptArtifact for an unknown name, and for files that are missing or not as a task writes them.
    """
    if name not in registry.TASKS:
        raise CorruptArtifact(f"{folder}: {registry.describe_unknown('task', name)}. Compress the model again")
    kind: type[Task] = registry.resolve("task", name)
    try:
        task = kind.from_assets(folder, inputs)
        if (folder / VOCABULARY).is_file():
            task.limit_ids(int(read_asset(folder, VOCABULARY)["ids"]))
        return task
    except (CorruptArtifact, *INTERRUPTS):
        raise
    except BaseException as error:  # whatever a crafted file makes of a tokenizer, such as a panic
        raise CorruptArtifact(
            f"{folder} does not hold the files of task {name!r}: {type(error).__name__}, "
            f"{' '.join(str(error).split())}. Compress the model again"
        ) from error
