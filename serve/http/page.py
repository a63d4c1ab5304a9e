"""The routes of the page. It loads nothing from other hosts, and needs no network."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse

from laconic import __version__
from laconic.errors import ArtifactError
from serve.asgi.wire import to_json
from serve.http.model_card import describe_activity, describe_model
from serve.model_repository.repository import Repository

HOME = Path(__file__).parent / "static"
FILES = (
    ("/", "index.html", "text/html"),
    ("/page/page.css", "page.css", "text/css"),
    ("/page/page.js", "page.js", "text/javascript"),
    ("/page/chat.js", "chat.js", "text/javascript"),
)
"""The page's own files, with their paths and content types."""
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "media-src blob:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""No other page shows this one in a frame, or gets hold of it."""
REPORT_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
"""A report comes with the artifact, and whatever is written in it, no script of it runs."""


def add_page(app: FastAPI, repository: Repository) -> None:
    """Add the page and what it asks the server for."""

    for path, name, content_type in FILES:
        app.add_api_route(path, partial(send_file, name, content_type), include_in_schema=False)

    @app.get("/page/models", include_in_schema=False)
    async def cards() -> Response:
        """Describe the card of each model."""
        return send_json({"version": __version__, "models": [describe_model(model) for model in repository]})

    @app.get("/page/activity", include_in_schema=False)
    async def activity() -> Response:
        """Count what each model has done so far, and what waits."""
        return send_json({model.name: describe_activity(model) for model in repository})

    @app.get("/page/reports/{name}", include_in_schema=False)
    def report(name: str) -> Response:
        """Show the report of a model's artifact, as it was written. Read in a thread."""
        try:
            content = repository.get(name).artifact.read_report()
        except ArtifactError:  # it names files, which are no concern of clients
            raise HTTPException(
                404, f"the artifact of model {name!r} has no report as it was written; `laconic compress` writes one"
            ) from None
        return Response(content, media_type="text/html", headers=HEADERS | {"content-security-policy": REPORT_POLICY})


def send_file(name: str, content_type: str) -> Response:
    """Send one of the page's own files."""
    return FileResponse(HOME / name, media_type=content_type, headers=HEADERS)


def send_json(content: Mapping[str, Any]) -> Response:
    """Send figures, which are never kept."""
    return Response(to_json(content), media_type="application/json", headers={"cache-control": "no-store"})
