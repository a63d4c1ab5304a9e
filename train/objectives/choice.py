"""The objective of a run: that of the task, or one for preferences."""

from laconic import registry
from laconic.config import NamedSettings
from laconic.data.dataset import Dataset
from laconic.errors import RecipeError
from laconic.tasks.task import Task
from train.step.objective import Objective, ObjectiveSettings


def make_objective(task: Task, dataset: Dataset | None = None, *, preference: NamedSettings | None = None) -> Objective:
    """Make the objective for a dataset. preference: the loss of preferences by its name in the registry; None takes
    the objective of the task. Raises DataError where none fits, RecipeError for a task without preferences, and for one
    that is not trained."""
    if not task.is_trainable:
        raise RecipeError(f"models for {task.name} are quantized, and not trained. Train the model elsewhere first")
    if preference is not None:
        settings: ObjectiveSettings = preference.configure("preference loss", ObjectiveSettings)
        return settings.make_objective(task)
    objective: Objective = registry.resolve("objective", task.objective).of(task, dataset)
    return objective
