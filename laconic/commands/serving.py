"""The command `serve`, with an option for every setting of the server: each is defined once, in the settings model."""

import inspect
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from laconic.errors import UsageError, did_you_mean
from laconic.units import format_binary_bytes, parse_bytes
from serve.settings.server_settings import Settings

REPEATED = {"require": "--require", "shares": "--share", "sha256": "--sha256", "vllm_options": "--vllm-option"}
"""Options that may be given several times, by the setting that their values make up."""
PLACES = ("local", "ray", "vllm")
"""Where `--on` puts a server: into this process, onto a Ray cluster, or before a vLLM that it starts."""
F = TypeVar("F", bound=Callable[..., Any])


def add_setting_options(model: type[BaseModel], leave_out: Collection[str] = ()) -> Callable[[F], F]:
    """Return a decorator that gives a command an option for each field of a model, in place of its `**settings`.

    Options are parsed by the model and not by typer, so that a value is refused in the same words wherever it stands.
    leave_out: fields without an option.
    """

    def decorate(command: F) -> F:
        signature = inspect.signature(command)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        options = list(make_options(model, leave_out))
        parameters = [each.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in (*own, *options)]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}
        return command

    return decorate


def make_options(model: type[BaseModel], leave_out: Collection[str]) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each field, as typer reads it; None where the option is not given."""
    for name, field in model.model_fields.items():
        if name in leave_out:
            continue
        extra = field.json_schema_extra
        panel = str(extra["panel"]) if isinstance(extra, dict) else None
        flags = [REPEATED[name]] if name in REPEATED else [f"--{name.replace('_', '-')}"]
        kind: Any = list[str] if name in REPEATED else bool if field.annotation is bool else str
        option = typer.Option(
            *flags,
            help=describe_option(field),
            metavar=name_value(field, kind),
            rich_help_panel=panel,
            show_default=False,
        )
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
        )


def describe_option(field: FieldInfo) -> str:
    """Write the help of an option: what the setting means, and its default where the description does not name it."""
    meaning = (field.description or "").replace("`", "")
    meaning = meaning[:1].upper() + meaning[1:]
    default = field.default
    if field.default_factory or default is None or default is False or default == ():
        return f"{meaning}."
    if takes_bytes(field):
        return f"{meaning}; default: {format_binary_bytes(default)}."
    return f"{meaning}; default: {f'{default:g}' if isinstance(default, float) else default}."


def takes_bytes(field: FieldInfo) -> bool:
    """Return whether a setting is a size, which may have a unit."""
    return any(isinstance(each, BeforeValidator) and each.func is parse_bytes for each in field.metadata)


def name_value(field: FieldInfo, kind: Any) -> str | None:
    """Name what an option takes; None for a flag."""
    if kind is bool:
        return None
    if takes_bytes(field):
        return "SIZE"
    names = {int: "INTEGER", float: "FLOAT", Path: "PATH"}
    kinds = {field.annotation, *get_args(field.annotation)}
    return next((names[each] for each in names if each in kinds), "TEXT")


@add_setting_options(Settings, leave_out=["api_keys"])  # other users of the machine can read a command line
def serve(
    artifacts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Artifacts: folders, or addresses (s3://, gs://, https://, hf://).",
            metavar="[[NAME=]ARTIFACT]...",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 8000,
    settings: Annotated[Path | None, typer.Option(help="YAML file with limits and other settings.")] = None,
    on: Annotated[
        str, typer.Option(help="Where models run: local, ray for replicas on a Ray cluster, or vllm.")
    ] = "local",
    **options: Any,
) -> None:
    """Serve artifacts over HTTP and gRPC, with dynamic batching.

    Each option but the first five is a setting, which can also be given in the file of --settings, and as an
    environment variable: LACONIC_SERVE_MAX_BODY for --max-body.
    """
    if on not in PLACES:
        raise UsageError(f"there is nowhere called {on!r} to serve on. {did_you_mean(on, PLACES)}")
    if on == "ray":
        from serve.replicas.ray_server import serve_on_ray as serve
    elif on == "vllm":
        from serve.vllm.vllm_server import serve_on_vllm as serve
    else:
        from serve.server import serve

    settings_given = {name: value or None if name in REPEATED else value for name, value in options.items()}
    serve(artifacts or (), host=host, port=port, settings=settings, **settings_given)
