"""`laconic serve --on vllm`: this server in front of a vLLM that it starts."""

import os
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from laconic.artifacts.model_name import is_address, split_name
from laconic.errors import UsageError
from serve.asgi.wire import to_json
from serve.server import open_settings, run_app, write_line
from serve.settings.server_settings import VLLM, Settings
from serve.settings.settings_file import PLACES
from serve.vllm.vllm_app import VllmApp
from serve.vllm.vllm_command import check_folder, check_options, find_program, make_command, make_environment
from serve.vllm.vllm_engine import VllmEngine
from serve.welcome import Addresses

OURS_ALONE = ("Engines", "Models", "Queue")
"""Panels of settings of our own engines and of artifacts, which vLLM does not follow."""
FOLLOWED = ("watchdog", "max_crashes")
"""Those of them that hold for vLLM's process as well."""


def serve_on_vllm(
    artifacts: Sequence[Path | str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    announce: Callable[[str], None] | None = None,
    settings: Path | None = None,
    **options: Any,
) -> None:
    """Serve a checkpoint with vLLM until a signal stops it.

    artifacts: one folder of a checkpoint, alone or as `NAME=FOLDER`. The other arguments are those of
    `serve.server.serve`. Raises UsageError, and RuntimeFailure where vLLM does not start.
    """
    limits = open_settings(options, settings, host, PLACES[VLLM])
    check_settings(limits)
    if len(artifacts) != 1:
        raise UsageError(f"vLLM serves one checkpoint, not {len(artifacts)}. Start a server for each")
    name, source = split_name(artifacts[0])
    if is_address(source):
        raise UsageError(f"vLLM is given a folder of this machine, not {source}. Download the checkpoint first")
    folder, program = check_folder(Path(source)), find_program(limits.vllm)
    check_options(limits.vllm_options or {})

    def make_app() -> VllmApp:
        command = partial(make_command, program, folder, name, limits.vllm_options or {})
        engine = VllmEngine(name, command, make_environment(program, os.environ), limits)
        app = VllmApp(engine, limits)  # what is wrong with the settings is said before vLLM starts
        engine.start()
        return app

    run_app(make_app, limits, format_ready, host, port, announce or write_line)


def check_settings(settings: Settings) -> None:
    """Raise UsageError for settings that were given and that vLLM does not follow."""
    for name in sorted(settings.model_fields_set):
        extra = Settings.model_fields[name].json_schema_extra
        if isinstance(extra, dict) and extra["panel"] in OURS_ALONE and name not in FOLLOWED:
            raise UsageError(f"{name} does not go with vLLM, which has options of its own. Give them by --vllm-option")


def format_ready(app: VllmApp, addresses: Addresses) -> str:
    """Format the line for a ready server: its address, and a request that can be pasted into a shell."""
    url, name = addresses.format_url(app.settings), app.engine.name
    body = to_json({"model": name, "stream": True, "prompt": "Once upon a time"}).decode()
    key = ' -H "Authorization: Bearer $KEY"' if app.access.keys is not None else ""
    example = f"curl -N {url}/v1/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    return f"Serving {name} by vLLM at {url}\n{addresses.format_admin()}  Try: {example}"
