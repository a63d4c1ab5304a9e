"""The routes of OpenAI's API whose answers come from samples: a request names its model, and gets one answer."""

import time
from abc import abstractmethod
from typing import Any

from serve.asgi.wire import Answer
from serve.http.endpoint import BodyEndpoint, ModelCall, Request
from serve.model_repository.model import Model, Prediction
from serve.observation.tracing import count_step
from serve.openai.openai_shape import to_openai_answer
from serve.requests.offload import offload


class SampleEndpoint(BodyEndpoint[Request]):
    """Answers for the samples of a request, in OpenAI's API."""

    @abstractmethod
    def choose_values(self, request: Request, model: Model) -> list[Any]:
        """Choose the samples as the model's task takes them. Raises InputError for what the model does not do."""

    @abstractmethod
    async def write_answer(self, request: Request, prediction: Prediction) -> Answer:
        """Write the HTTP answer."""

    def refuse(self, error: BaseException) -> Answer:
        return to_openai_answer(error)

    async def respond(self, call: ModelCall[Request]) -> Answer:
        if call.is_long:
            values = await offload(self.choose_values, call.request, call.model, long=True)
        else:
            values = self.choose_values(call.request, call.model)
        prediction = await call.model.predict(values, timeout=call.timeout)
        predicted = time.monotonic_ns()
        answer = await self.write_answer(call.request, prediction)
        count_step("write", call.model.statistics.write, predicted)
        call.reservation.add(len(answer.body))
        return answer
