"""The line for a ready server."""

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from laconic.artifacts.model_name import is_address
from serve.asgi.wire import to_json
from serve.generation.text_writer import TextWriter
from serve.model_repository.model import Model
from serve.settings.server_settings import Settings

if TYPE_CHECKING:
    from serve.http.app import App

LONGEST_EXAMPLE = 400
"""Characters. A longer request, as an image in numbers, is not shown as an example."""


@dataclass(frozen=True)
class Addresses:
    """Where a server listens. grpc: its port for gRPC. admin: where operators ask, empty for the same address."""

    host: str
    port: int
    grpc: int | None = None
    admin: str = ""

    def format_url(self, settings: Settings) -> str:
        """Format the address for clients on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host  # noqa: S104 - compared with, not bound to
        scheme = "https" if settings.tls_cert else "http"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    def format_admin(self) -> str:
        """Format the line about the address of operators, if there is one."""
        return f"  Metrics and other routes of operators at {self.admin}\n" if self.admin else ""


def format_welcome(app: "App", addresses: Addresses) -> str:
    """Format the line for a ready server: its address, the models, and a request that can be pasted into a shell."""
    url = addresses.format_url(app.settings)
    models = list(app.repository)
    names = ", ".join(model.name for model in models)
    notes = "".join(f"  {model.name} runs in {model.note}\n" for model in models if model.note)
    also = f", gRPC at {addresses.host}:{addresses.grpc}" if addresses.grpc else ""
    notes += addresses.format_admin()
    if not models:
        place = str(app.settings.models)
        hint = "put an artifact there" if is_address(place) else f"laconic compress MODEL -o {place}/NAME.laconic"
        return f"Serving no model yet at {url}{also}\n{notes}  Try: {hint}"
    example = format_example(models[0], url, key=app.access.keys is not None)
    return f"Serving {names} at {url}{also}\n{notes}  Try: {example}"


def format_example(model: Model, url: str, *, key: bool) -> str:
    """Format a request to the predict endpoint, or to a model that writes, as a shell command. key: whether requests
    need one."""
    header = ' -H "X-API-Key: $KEY"' if key else ""
    if model.text_writer is not None:
        return f"curl -N {url}/v1/{format_text_request(model, model.text_writer)}{header}"
    address = f"{url}/v1/models/{model.name}/predict{header}"
    if model.task.upload is not None:
        return f"curl {address} -F {model.task.field}=@{model.task.upload.example}"
    body = to_json(model.task.example_request()).decode()
    if len(body) > LONGEST_EXAMPLE:
        return f"curl {url}/v2/models/{model.name}"
    return f"curl {address} -d {shlex.quote(body)}"


def format_text_request(model: Model, writer: TextWriter) -> str:
    """Format the route and the body of a request for text as a part of a shell command."""
    request: dict[str, Any] = {"model": model.name, "stream": True}
    if writer.chat is None:
        return f"completions -d {shlex.quote(to_json(request | {'prompt': 'Once upon a time'}).decode())}"
    messages = [{"role": "user", "content": "Hello there."}]
    return f"chat/completions -d {shlex.quote(to_json(request | {'messages': messages}).decode())}"
