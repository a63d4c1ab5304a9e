"""Ranking of documents, `POST /v1/rerank`."""

import re
from typing import Any

from serve.asgi.wire import Answer, to_json
from serve.http.openai_endpoint import SampleEndpoint
from serve.model_repository.model import Model, Prediction
from serve.openai.rerank_request import RerankRequest
from serve.requests.public_errors import InvalidParameter


class Rerank(SampleEndpoint[RerankRequest]):
    """Documents by how well they answer a query."""

    pattern = re.compile(r"/v1/rerank")

    def read_request(self, match: re.Match[str], content: Any) -> RerankRequest:
        return RerankRequest.read(content)

    def choose_values(self, request: RerankRequest, model: Model) -> list[Any]:
        if not model.task.ranks:
            raise InvalidParameter("model", f"model {model.name!r} does {model.task.name}, and ranks no documents")
        return [[request.query, text] for text in request.texts]

    async def write_answer(self, request: RerankRequest, prediction: Prediction) -> Answer:
        results = request.format_results([answer["score"] for answer in prediction.answers])
        usage = {"prompt_tokens": prediction.tokens, "total_tokens": prediction.tokens}
        return Answer(to_json({"object": "list", "model": request.model, "results": results, "usage": usage}))
