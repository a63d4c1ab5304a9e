"""The routes of OpenAI's API whose answers come from samples: a request names its model, and gets one answer."""

import re
import time
from abc import abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from serve.asgi.body import read_body, read_json
from serve.asgi.wire import Answer, Receive, Scope, WhileConnected
from serve.http.endpoint import Endpoint, read_timeout
from serve.model_repository.model import Model, Prediction
from serve.observation.tracing import count_step
from serve.openai.openai_shape import to_openai_answer
from serve.requests.memory_budget import Reservation
from serve.requests.offload import OFFLOAD_FROM, offload


class NamesModel(Protocol):
    """A request that names its model."""

    @property
    def model(self) -> str:
        """The name."""


Request = TypeVar("Request", bound=NamesModel)


class SampleEndpoint(Endpoint, Generic[Request]):
    """Answers for the samples of a request."""

    @abstractmethod
    def read_request(self, content: Any) -> Request:
        """Read the request in a body. Raises InputError."""

    @abstractmethod
    def choose_values(self, request: Request, model: Model) -> list[Any]:
        """Choose the samples as the model's task takes them. Raises InputError for what the model does not do."""

    @abstractmethod
    async def write_answer(self, request: Request, prediction: Prediction) -> Answer:
        """Write the HTTP answer."""

    def refuse(self, error: BaseException) -> Answer:
        return to_openai_answer(error)

    async def _answer(self, match: re.Match[str], scope: Scope, receive: Receive, reservation: Reservation) -> Answer:
        headers = dict(scope["headers"])
        body = await read_body(headers, receive, self.settings.max_body, reservation)
        started = time.monotonic_ns()
        long = len(body) > OFFLOAD_FROM
        async with WhileConnected(scope, receive):
            content = await read_json(body, self.settings, reservation)
            request = await offload(self.read_request, content, long=True) if long else self.read_request(content)
            model = self.repository.get(request.model)
            model.users += 1
            try:
                model.check_ready()
                if long:
                    values = await offload(self.choose_values, request, model, long=True)
                else:
                    values = self.choose_values(request, model)
                prediction = await model.predict(values, timeout=read_timeout(headers))
                predicted = time.monotonic_ns()
                answer = await self.write_answer(request, prediction)
                count_step("write", model.statistics.write, predicted)
                reservation.add(len(answer.body))
            except BaseException as error:
                model.statistics.count_failure(started, error)
                raise
            finally:
                model.users -= 1
            model.statistics.count_success(started)
            return answer
