"""Extensions of the V2 protocol that are off in this server, answered as Triton answers where they are off.

Clients ask for them at their start, and read what they say; a change is refused.
"""

from collections.abc import Mapping
from typing import Any

from laconic.errors import InputError, UnknownModel

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


class UnknownRegion(UnknownModel):
    """No shared memory of that name is registered, as none ever is."""


def keep_settings(settings: Mapping[str, Any], changes: Any, what: str) -> dict[str, Any]:
    """The settings, which stay as they are. changes: by name; None asks for the default. Raises InputError."""
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
