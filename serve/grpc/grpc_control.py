"""The calls of `inference.GRPCInferenceService` that describe the server and its models, in the words of HTTP."""

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from laconic.errors import NotReady, UnknownModel
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

    def __init__(self, repository: Repository, settings: Settings, folder: WatchedFolder | None) -> None:
        """folder: where models are loaded from."""
        self.folder = folder
        self.repository = repository
        self.settings = settings

    def calls(self) -> dict[str, Call]:
        """The calls by name."""
        describe = self._describe
        return {
            "ServerLive": describe(pb.ServerLiveRequest, pb.ServerLiveResponse, lambda _: {"live": True}),
            "ServerReady": describe(pb.ServerReadyRequest, pb.ServerReadyResponse, self._server_ready),
            "ModelReady": describe(pb.ModelReadyRequest, pb.ModelReadyResponse, self._model_ready),
            "ServerMetadata": describe(pb.ServerMetadataRequest, pb.ServerMetadataResponse, self._server_metadata),
            "ModelMetadata": describe(pb.ModelMetadataRequest, pb.ModelMetadataResponse, self._model_metadata),
            "ModelConfig": describe(pb.ModelConfigRequest, pb.ModelConfigResponse, self._configuration),
            "ModelStatistics": describe(pb.ModelStatisticsRequest, pb.ModelStatisticsResponse, self._statistics),
            "RepositoryIndex": describe(pb.RepositoryIndexRequest, pb.RepositoryIndexResponse, self._index),
            "RepositoryModelLoad": self._act(
                pb.RepositoryModelLoadRequest, pb.RepositoryModelLoadResponse, WatchedFolder.load
            ),
            "RepositoryModelUnload": self._act(
                pb.RepositoryModelUnloadRequest, pb.RepositoryModelUnloadResponse, WatchedFolder.unload
            ),
            "TraceSetting": describe(pb.TraceSettingRequest, pb.TraceSettingResponse, self._trace_settings),
            "LogSettings": describe(pb.LogSettingsRequest, pb.LogSettingsResponse, log_settings),
            "SystemSharedMemoryStatus": describe(
                pb.SystemSharedMemoryStatusRequest, pb.SystemSharedMemoryStatusResponse, region_status
            ),
            "SystemSharedMemoryRegister": describe(
                pb.SystemSharedMemoryRegisterRequest, pb.SystemSharedMemoryRegisterResponse, register_region
            ),
            "SystemSharedMemoryUnregister": describe(
                pb.SystemSharedMemoryUnregisterRequest, pb.SystemSharedMemoryUnregisterResponse, unregister_region
            ),
            "CudaSharedMemoryStatus": describe(
                pb.CudaSharedMemoryStatusRequest, pb.CudaSharedMemoryStatusResponse, region_status
            ),
            "CudaSharedMemoryRegister": describe(
                pb.CudaSharedMemoryRegisterRequest, pb.CudaSharedMemoryRegisterResponse, register_region
            ),
            "CudaSharedMemoryUnregister": describe(
                pb.CudaSharedMemoryUnregisterRequest, pb.CudaSharedMemoryUnregisterResponse, unregister_region
            ),
        }

    def _describe(
        self, kind: type[Message], response: Callable[[], Message], answer: Callable[[Any], Mapping[str, Any]]
    ) -> Call:
        """A call. answer: makes the response's fields from the request, as HTTP names them; the response has those
        that the protocol has over gRPC too."""

        async def respond(body: bytes, _: Context) -> bytes:
            fields = answer(parse_message(kind, body))
            return serialize(json_format.ParseDict(fields, response(), ignore_unknown_fields=True))

        return call(self.settings, respond)

    def _act(
        self, kind: type[Message], response: Callable[[], Message], act: Callable[[WatchedFolder, str], None]
    ) -> Call:
        """A call that loads or unloads a model."""

        async def respond(body: bytes, _: Context) -> bytes:
            asked: Any = parse_message(kind, body)
            content = {"parameters": dict(asked.parameters)}
            await extensions.control_model(self.folder, self.settings, act, asked.model_name, content)
            return serialize(response())

        return call(self.settings, respond)

    def _find(self, asked: Any) -> Model:
        return self.repository.get(asked.name, asked.version)

    def _server_ready(self, _: object) -> dict[str, Any]:
        try:
            metadata.check_server(self.repository)
        except NotReady:
            return {"ready": False}
        return {"ready": True}

    def _model_ready(self, asked: Any) -> dict[str, Any]:
        try:
            metadata.check_model(self.repository, self._find(asked))
        except (NotReady, UnknownModel):  # that there is no such model is no error, as in Triton
            return {"ready": False}
        return {"ready": True}

    def _server_metadata(self, _: object) -> dict[str, Any]:
        return metadata.server_metadata()

    def _model_metadata(self, asked: Any) -> dict[str, Any]:
        return metadata.model_metadata(self._find(asked))

    def _configuration(self, asked: Any) -> dict[str, Any]:
        return {"config": metadata.model_configuration(self._find(asked))}

    def _statistics(self, asked: Any) -> dict[str, Any]:
        if not asked.name:
            return metadata.all_statistics(self.repository)
        return metadata.model_statistics(self._find(asked))

    def _index(self, _: object) -> dict[str, Any]:
        return {"models": metadata.repository_index(self.repository)}

    def _trace_settings(self, asked: Any) -> dict[str, Any]:
        if asked.model_name:
            self.repository.get(asked.model_name)
        lists = {name: isinstance(value, list) for name, value in extensions.TRACE_SETTINGS.items()}
        changes = {
            name: (list(each.value) if lists.get(name) else each.value[0]) if each.value else None
            for name, each in asked.settings.items()
        }
        kept = extensions.keep_settings(extensions.TRACE_SETTINGS, changes, "tracing")
        return {"settings": {name: {"value": value if lists[name] else [value]} for name, value in kept.items()}}


LOG_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}
"""The field of a log setting, by the type of its value."""


def log_settings(asked: Any) -> dict[str, Any]:
    """The settings of the log."""
    choices = {name: each.WhichOneof("parameter_choice") for name, each in asked.settings.items()}
    changes = {name: choice and getattr(asked.settings[name], choice) for name, choice in choices.items()}
    kept = extensions.keep_settings(extensions.LOG_SETTINGS, changes, "logging")
    return {"settings": {name: {LOG_FIELDS[type(value)]: value} for name, value in kept.items()}}


def region_status(asked: Any) -> dict[str, Any]:
    """The regions of shared memory: none."""
    extensions.find_region(asked.name)
    return {}


def register_region(asked: Any) -> dict[str, Any]:
    """Registers nothing."""
    extensions.refuse_region(asked.name)
    return {}


def unregister_region(_: object) -> dict[str, Any]:
    """Leaves no region, as before."""
    return {}
