"""The calls of `inference.GRPCInferenceService` that describe the server and its models, in the words of HTTP."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from laconic.errors import UnknownModel
from serve.grpc import inference_pb2 as pb
from serve.grpc.grpc_call import Call, Context, call
from serve.grpc.grpc_messages import parse_message, serialize
from serve.model_repository.model import Model
from serve.model_repository.repository import Repository
from serve.model_repository.watched_folder import WatchedFolder
from serve.protocol import extensions, metadata
from serve.settings.server_settings import Settings


class GrpcControl:
    """Answers calls that run no model."""

    def __init__(self, repository: Repository, settings: Settings, folders: Sequence[WatchedFolder]) -> None:
        """folders: where models are loaded from."""
        self.folders = folders
        self.repository = repository
        self.settings = settings

    def calls(self) -> dict[str, Call]:
        """Make the calls, by name. That of a call gives the names of its request and its response."""
        answers: dict[str, Callable[[Any], Mapping[str, Any]]] = {
            "ServerLive": lambda _: {"live": True},
            "ServerReady": lambda _: {"ready": metadata.is_ready(metadata.check_server, self.repository)},
            "ModelReady": self._model_ready,
            "ServerMetadata": lambda _: metadata.server_metadata(),
            "ModelMetadata": lambda request: metadata.model_metadata(self._find(request)),
            "ModelConfig": lambda request: {"config": metadata.model_configuration(self._find(request))},
            "ModelStatistics": self._statistics,
            "RepositoryIndex": lambda _: {"models": metadata.repository_index(self.repository)},
            "TraceSetting": self._trace_settings,
            "LogSettings": log_settings,
        }
        for kind in ("System", "Cuda"):
            answers |= {
                f"{kind}SharedMemoryStatus": find_region,
                f"{kind}SharedMemoryRegister": refuse_region,
                f"{kind}SharedMemoryUnregister": lambda _: {},  # leaves no region, as before
            }
        return {name: self._describe(name, answer) for name, answer in answers.items()} | {
            "RepositoryModelLoad": self._act("RepositoryModelLoad", WatchedFolder.load),
            "RepositoryModelUnload": self._act("RepositoryModelUnload", WatchedFolder.unload),
        }

    def _describe(self, name: str, answer: Callable[[Any], Mapping[str, Any]]) -> Call:
        """Make a call. answer: makes the response's fields from the request, as HTTP names them; the response has those
        that the protocol has over gRPC too."""
        request, response = find_messages(name)

        async def respond(body: bytes, _: Context) -> bytes:
            fields = answer(parse_message(request, body))
            return serialize(json_format.ParseDict(fields, response(), ignore_unknown_fields=True))

        return call(self.settings, respond)

    def _act(self, name: str, act: Callable[[WatchedFolder, str], None]) -> Call:
        """Make a call that loads or unloads a model."""
        kind, response = find_messages(name)

        async def respond(body: bytes, _: Context) -> bytes:
            request: Any = parse_message(kind, body)
            content = {"parameters": dict(request.parameters)}
            await extensions.control_model(self.folders, self.settings, act, request.model_name, content)
            return serialize(response())

        return call(self.settings, respond)

    def _find(self, request: Any) -> Model:
        return self.repository.get(request.name, request.version)

    def _model_ready(self, request: Any) -> dict[str, Any]:
        try:
            model = self._find(request)
        except UnknownModel:  # that there is no such model is no error, as in Triton
            return {"ready": False}
        return {"ready": metadata.is_ready(metadata.check_model, self.repository, model)}

    def _statistics(self, request: Any) -> dict[str, Any]:
        if not request.name:
            return metadata.all_statistics(self.repository)
        return metadata.model_statistics(self._find(request))

    def _trace_settings(self, request: Any) -> dict[str, Any]:
        if request.model_name:
            self.repository.get(request.model_name)
        lists = {name: isinstance(value, list) for name, value in extensions.TRACE_SETTINGS.items()}
        changes = {
            name: (list(change.value) if lists.get(name) else change.value[0]) if change.value else None
            for name, change in request.settings.items()
        }
        kept = extensions.keep_settings(extensions.TRACE_SETTINGS, changes, "tracing")
        return {"settings": {name: {"value": value if lists[name] else [value]} for name, value in kept.items()}}


LOG_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}
"""The field of a log setting, by the type of its value."""


def log_settings(request: Any) -> dict[str, Any]:
    """Return the settings of the log, which stay as they are."""
    choices = {name: change.WhichOneof("parameter_choice") for name, change in request.settings.items()}
    changes = {name: choice and getattr(request.settings[name], choice) for name, choice in choices.items()}
    kept = extensions.keep_settings(extensions.LOG_SETTINGS, changes, "logging")
    return {"settings": {name: {LOG_FIELDS[type(value)]: value} for name, value in kept.items()}}


def find_region(request: Any) -> dict[str, Any]:
    """Describe the regions of shared memory, of which there are none. Raises UnknownRegion where one is named."""
    extensions.find_region(request.name)
    return {}


def refuse_region(request: Any) -> dict[str, Any]:
    """Raise InputError: no region is registered."""
    extensions.refuse_region(request.name)
    return {}


def find_messages(call_name: str) -> tuple[type[Message], type[Message]]:
    """Find the classes of a call's request and response."""
    return getattr(pb, f"{call_name}Request"), getattr(pb, f"{call_name}Response")
