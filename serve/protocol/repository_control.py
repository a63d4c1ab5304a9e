"""Loading and unloading the models of the watched folder, as Triton's model repository extension has it."""

import asyncio
from collections.abc import Callable
from typing import Any

from laconic.errors import UsageError
from serve.model_repository.watched_folder import WatchedFolder
from serve.settings.server_settings import Settings

HARMLESS = {"unload_dependents"}
"""Parameters that change nothing, and that tritonclient sends: no model depends on another."""


async def control_model(
    folder: WatchedFolder | None,
    settings: Settings,
    act: Callable[[WatchedFolder, str], None],
    name: str,
    content: Any,
) -> None:
    """Act on a model. content: of the request.

    Raises UsageError without a folder, in one of several server processes, and for parameters: a request names no
    path and no file.
    """
    if folder is None:
        raise UsageError("this server watches no folder of models (--models), so its models stay as they are")
    if settings.fronts > 1:
        raise UsageError("one of several server processes (--fronts) answers here. Change the folder of models")
    parameters = content.get("parameters") or {} if isinstance(content, dict) else None
    if not isinstance(parameters, dict) or set(parameters) - HARMLESS:
        raise UsageError("a model is loaded and unloaded as it lies in the folder: 'parameters' are not supported")
    await asyncio.to_thread(act, folder, name)
