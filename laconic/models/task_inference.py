"""Which task a model of transformers is for, by its config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic import registry
from laconic.errors import SourceError
from laconic.models.pretrained import ENCODER
from laconic.models.processors import resolve_task
from laconic.tasks.checkpoint_loading import count_outputs

if TYPE_CHECKING:
    from laconic.tasks.task import Task


def pretrained_tasks() -> list[str]:
    """Return the names of the registered tasks for models of transformers."""
    return [name for name in registry.TASKS if resolve_task(name).auto_class]


def match_architecture(architecture: str, config: Mapping[str, Any] | None = None) -> str | None:
    """Return the registered task whose endings fit an architecture's name best, and which recognizes the config; None
    where none does."""
    tasks = {name: resolve_task(name) for name in registry.TASKS}
    endings = [
        (ending, name)
        for name, kind in tasks.items()
        for ending in kind.architectures
        if config is None or kind.recognizes(config)
    ]
    fitting = [(ending, name) for ending, name in endings if architecture.endswith(ending)]
    return max(fitting, key=lambda pair: len(pair[0]), default=("", None))[1]


def infer_task(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the task that the architecture in a config is for. Raises SourceError where it is for no registered
    task."""
    if not config.get("architectures"):
        raise SourceError(
            f"{folder / 'config.json'} does not say which class the model is of (architectures). Name the --task that "
            f"it was trained for ({', '.join(pretrained_tasks())})"
        )
    name = str(config["architectures"][0])
    task = match_architecture(name, config)
    has_images = {"text_config", "vision_config"} <= set(config)
    if task is None and has_images and name.endswith("ForConditionalGeneration"):
        supported = ", ".join(resolve_task("image-text-to-text").architectures)
        raise SourceError(
            f"{folder} holds a {name}, which is not supported: of models that write about images, those of {supported} "
            f"are. Choose one of them"
        )
    if task is None and has_images:
        embeddings = " or ".join(each for each in registry.TASKS if resolve_task(each).auto_class == ENCODER)
        raise SourceError(
            f"{folder} holds two towers, one for texts and one for images. Choose one with --task: {embeddings}"
        )
    if task is None:
        raise SourceError(
            f"{folder} holds a {name}, and no task is for its head. Name a --task to use its weights with another "
            f"head that they hold, or as an encoder alone ({', '.join(pretrained_tasks())}); or give a --builder"
        )
    return task


def check_head(folder: Path, config: Mapping[str, Any], kind: "type[Task]") -> None:
    """Raise SourceError for a head that answers another question than a task asks, as a score in place of a class."""
    if kind.fits(config):
        return
    problem, other = config.get("problem_type"), infer_task(folder, config)
    answers = f"{count_outputs(config)} outputs" + (f" for {problem.replace('_', ' ')}" if problem else "")
    raise SourceError(f"{folder} answers with {answers}, which is not for the task {kind.name!r}. Try --task {other}")
