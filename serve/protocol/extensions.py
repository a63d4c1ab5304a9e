"""Extensions of the V2 protocol: control of the model repository, trace and log settings, shared memory.

The last three are off, and answered as Triton answers where they are off: clients ask for them at their start, and read
what they say; a change is refused.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from laconic.errors import InputError, UnknownModel, UsageError

if TYPE_CHECKING:
    from serve.model_repository.watched_folder import WatchedFolder
from serve.settings.server_settings import Settings

TRACE_SETTINGS: dict[str, Any] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
"""Triton's defaults."""
LOG_SETTINGS: dict[str, Any] = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
HARMLESS = {"unload_dependents"}
"""Parameters that change nothing, and that tritonclient sends: adapters go with their base in any case."""


class UnknownRegion(UnknownModel):
    """No shared memory of that name is registered, as none ever is."""


def keep_settings(settings: Mapping[str, Any], changes: Any, what: str) -> dict[str, Any]:
    """Return the settings, which stay as they are. changes: by name; None asks for the default. Raises InputError."""
    if not isinstance(changes, Mapping):
        raise InputError(f"the settings for {what} must be an object, not {type(changes).__name__}")
    for name, value in changes.items():
        if name not in settings:
            raise InputError(f"{what} has no setting {name[:40]!r}, only {', '.join(settings)}")
        if value is not None and value != settings[name]:
            raise InputError(f"{name!r} of {what} is {settings[name]!r}, and is not changed over the network")
    return dict(settings)


def find_region(name: str) -> None:
    """Raise UnknownRegion, unless all regions are asked for."""
    if name:
        raise UnknownRegion(f"no shared memory region {name[:40]!r} is registered: this server reads no shared memory")


def refuse_region(name: str) -> None:
    """Raise InputError: no region is registered."""
    raise InputError(f"region {name[:40]!r} is not registered: this server reads no shared memory. Send the tensors")


async def control_model(
    folders: "Sequence[WatchedFolder]",
    settings: Settings,
    act: "Callable[[WatchedFolder, str], None]",
    name: str,
    content: Any,
) -> None:
    """Act on a model, or an adapter. folders: that hold them. content: of the request.

    Raises UsageError without any, in one of several server processes, and for parameters: a request names no
    path and no file.
    """
    if not folders:
        raise UsageError("this server watches no folder of models (--models), so its models stay as they are")
    if settings.fronts > 1:
        raise UsageError("one of several server processes (--fronts) answers here. Change the folder of models")
    parameters = content.get("parameters") or {} if isinstance(content, dict) else None
    if not isinstance(parameters, dict) or set(parameters) - HARMLESS:
        raise UsageError("a model is loaded and unloaded as it lies in the folder: 'parameters' are not supported")
    await asyncio.to_thread(lambda: act(choose_folder(folders, name), name))


def choose_folder(folders: "Sequence[WatchedFolder]", name: str) -> "WatchedFolder":
    """Choose the folder that a model, or an adapter, is served from; or else that which holds one; or the first."""
    serving = [folder for folder in folders if folder.serves(name)]
    if serving or len(folders) == 1:
        return serving[0] if serving else folders[0]
    return next((folder for folder in folders if folder.holds(name)), folders[0])
