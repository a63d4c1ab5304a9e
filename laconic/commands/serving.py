"""The command `serve`, with an option for every setting of the server."""

from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.commands.setting_options import REPEATED, add_setting_options
from serve.settings.server_settings import Settings


@add_setting_options(Settings, leave_out=["api_keys"])  # other users of the machine can read a command line
def serve(
    artifacts: Annotated[
        list[Path] | None, typer.Argument(help="Folders of artifacts.", metavar="[ARTIFACT]...", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 8000,
    settings: Annotated[Path | None, typer.Option(help="YAML file with limits and other settings.")] = None,
    **options: Any,
) -> None:
    """Serve artifacts over HTTP and gRPC, with dynamic batching.

    Each option but the first four is a setting, which can also be given in the file of --settings, and as an
    environment variable: LACONIC_SERVE_MAX_BODY for --max-body.
    """
    from serve.server import serve

    given = {name: value or None if name in REPEATED else value for name, value in options.items()}
    serve(artifacts or (), host=host, port=port, settings=settings, **given)
