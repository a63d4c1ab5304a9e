"""Settings of the server from a file, the environment and the command line."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from laconic.config import explain, read_mapping
from laconic.errors import UsageError
from serve.settings.server_settings import RAY, VLLM, Settings

LOCAL = "local"
PLACES = {RAY: "ray", VLLM: "vllm"}
"""Where `--on` puts a server that has the settings of a panel."""
PREFIX = "LACONIC_SERVE_"
KUBERNETES = re.compile(r"SERVICE_(HOST|PORT).*|PORT(_\d+_.*)?")
"""What Kubernetes sets besides, in every container, where a service is called laconic-serve."""


def load_settings(options: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None) -> Settings:
    """Load the settings of a server: an option wins over a variable of the environment, and that over the file.

    options: by the names of the settings; those that are None are not given. environment: its variables, of which
    `LACONIC_SERVE_MAX_BODY` is `max_body`, and so on. file: YAML. Raises UsageError.
    """
    variables = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX) and not KUBERNETES.fullmatch(name.removeprefix(PREFIX))
    }
    sources = {
        str(file): read_mapping(file, "settings file") if file else {},
        f"the environment ({PREFIX}...)": variables,
        "the options": {name: value for name, value in options.items() if value is not None},
    }
    merged: dict[str, Any] = {}
    for source, values in sources.items():
        try:
            Settings.model_validate(values)
        except ValidationError as error:
            raise UsageError(explain(error, source)) from None
        merged |= values
    return Settings.model_validate(merged)


def refuse_settings_of_others(settings: Settings, place: str) -> None:
    """Raise UsageError for settings that belong to servers elsewhere. place: where this one runs, as `--on` has it."""
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        panel = str(extra["panel"]) if isinstance(extra, dict) else ""
        belongs = PLACES.get(panel, place)
        if belongs != place and getattr(settings, name) != field.default:
            what = "replicas on a Ray cluster" if panel == RAY else panel
            raise UsageError(f"{name} is for {what}. Give --on {belongs} too")
