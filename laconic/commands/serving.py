"""The command `serve`, with an option for every setting of the server."""

from pathlib import Path
from typing import Annotated

import typer

from laconic.commands.options import RuntimeName

MODELS, QUEUE, REQUESTS, CONNECTIONS = "Models", "Queue", "Requests", "Connections"
ACCESS, OBSERVATION = "Access", "Observation"
"""Panels of the help."""


def serve(
    context: typer.Context,
    artifacts: Annotated[
        list[Path] | None, typer.Argument(help="Folders of artifacts.", metavar="[ARTIFACT]...", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 8000,
    settings: Annotated[Path | None, typer.Option(help="YAML file with limits and other settings.")] = None,
    runtime: RuntimeName = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Cores to use; default: all.")] = None,
    executors: Annotated[
        int | None, typer.Option(min=1, help="Batches at a time; default: as many as threads, at most 8.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Processes in which a model's engine runs; 0: the server's own."),
    ] = None,
    fronts: Annotated[
        int | None, typer.Option(min=1, help="Server processes that share the port and the cores; default: 1.")
    ] = None,
    watchdog: Annotated[
        float | None, typer.Option(help="Seconds after which a silent worker is killed; default: 8.")
    ] = None,
    max_crashes: Annotated[
        int | None, typer.Option(min=1, help="Crashes in a row that a worker is restarted after; default: 5.")
    ] = None,
    unproven: Annotated[
        bool | None, typer.Option("--unproven", help="Serve artifacts without a passed verdict.", show_default=False)
    ] = None,
    models: Annotated[
        Path | None, typer.Option(help="Folder of artifacts, which is watched.", rich_help_panel=MODELS)
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(help="Model without which the server is not ready; may be repeated.", rich_help_panel=MODELS),
    ] = None,
    keep_versions: Annotated[
        int | None,
        typer.Option(min=1, help="Newest versions of a model that are served; default: 1.", rich_help_panel=MODELS),
    ] = None,
    poll: Annotated[
        float | None, typer.Option(help="Seconds between two looks at the folder; default: 1.", rich_help_panel=MODELS)
    ] = None,
    shares: Annotated[
        list[str] | None,
        typer.Option("--share", help="Cores of one model, NAME=CORES; may be repeated.", rich_help_panel=MODELS),
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for gRPC; 0 chooses a free one; default: no gRPC.")
    ] = None,
    queue_seconds: Annotated[
        float | None, typer.Option(help="Longest expected wait of a request; default: 1.", rich_help_panel=QUEUE)
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(help="Seconds after which a waiting request fails; default: 60.", rich_help_panel=QUEUE),
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(help="Most samples of a request; default: 4096.", rich_help_panel=REQUESTS)
    ] = None,
    max_body: Annotated[
        str | None, typer.Option(help="Largest body of a request; default: 64 MiB.", rich_help_panel=REQUESTS)
    ] = None,
    max_json: Annotated[
        str | None, typer.Option(help="Largest JSON of a request; default: 16 MiB.", rich_help_panel=REQUESTS)
    ] = None,
    max_json_elements: Annotated[
        int | None,
        typer.Option(help="Most elements of a request's JSON; default: 500000.", rich_help_panel=REQUESTS),
    ] = None,
    max_in_flight: Annotated[
        str | None, typer.Option(help="Memory of all requests together; default: 256 MiB.", rich_help_panel=REQUESTS)
    ] = None,
    max_connections: Annotated[
        int | None, typer.Option(help="Most connections at a time; default: 1000.", rich_help_panel=CONNECTIONS)
    ] = None,
    max_headers: Annotated[
        str | None, typer.Option(help="Largest headers of a request; default: 32 KiB.", rich_help_panel=CONNECTIONS)
    ] = None,
    header_timeout: Annotated[
        float | None, typer.Option(help="Seconds for the headers; default: 10.", rich_help_panel=CONNECTIONS)
    ] = None,
    body_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds for the body, beside the rate; default: 20.", rich_help_panel=CONNECTIONS),
    ] = None,
    min_body_rate: Annotated[
        str | None,
        typer.Option(help="Bytes of the body that earn another second; default: 16 KiB.", rich_help_panel=CONNECTIONS),
    ] = None,
    keep_alive: Annotated[
        float | None,
        typer.Option(help="Seconds that an idle connection stays open; default: 75.", rich_help_panel=CONNECTIONS),
    ] = None,
    write_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a client may take nothing of its answer; default: 30.", rich_help_panel=CONNECTIONS
        ),
    ] = None,
    drain: Annotated[
        float | None,
        typer.Option(help="Seconds between SIGTERM and the closing of the port; default: 1.", rich_help_panel="Stop"),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(help="Seconds after SIGTERM for requests in flight; default: 25.", rich_help_panel="Stop"),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of NAME=KEY lines, one of which requests need.", rich_help_panel=ACCESS)
    ] = None,
    requests_per_second: Annotated[
        float | None, typer.Option(help="Requests of a key per second; default: any.", rich_help_panel=ACCESS)
    ] = None,
    rows_per_second: Annotated[
        float | None, typer.Option(help="Rows of a key per second; default: any.", rich_help_panel=ACCESS)
    ] = None,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(help="Host names of the server, with commas; default: any, or localhost.", rich_help_panel=ACCESS),
    ] = None,
    cors_origins: Annotated[
        str | None,
        typer.Option(help="Origins whose web pages may ask, with commas; default: none.", rich_help_panel=ACCESS),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate chain for TLS, in PEM.", rich_help_panel=ACCESS)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Key of the certificate, in PEM.", rich_help_panel=ACCESS)
    ] = None,
    admin: Annotated[
        str | None,
        typer.Option(
            help="Port, HOST:PORT or unix:PATH for metrics and other routes of operators; default: beside the others.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="Format of the log: text or json.", rich_help_panel=OBSERVATION)
    ] = None,
    access_log: Annotated[
        float | None,
        typer.Option(help="Share of requests with a line in the log; default: 0.", rich_help_panel=OBSERVATION),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="URL where OpenTelemetry traces are sent; default: none.", rich_help_panel=OBSERVATION),
    ] = None,
) -> None:
    """Serve artifacts over HTTP and gRPC, with dynamic batching.

    Each option but the first four is a setting, which can also be given in the file of --settings, and as an
    environment variable: LACONIC_SERVE_MAX_BODY for --max-body.
    """
    from serve.server import serve

    given = context.params
    lists = {name: given[name] or None for name in ("shares", "require")}
    serve(**given | {"artifacts": given["artifacts"] or (), **lists})
