"""Requests to rank documents by how well they answer a query, in the shape of Jina's and Cohere's APIs."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from serve.openai.request_body import RequestBody, RequestPart


class Document(RequestPart):
    """A document."""

    text: str


class RerankRequest(RequestBody):
    """Documents to rank. top_n: the most results; all where None."""

    query: str
    documents: list[str | Document] = Field(min_length=1)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    user: str | None = None

    @property
    def texts(self) -> Sequence[str]:
        """The documents as texts."""
        return [document if isinstance(document, str) else document.text for document in self.documents]

    def format_results(self, scores: Sequence[float]) -> Sequence[Mapping[str, Any]]:
        """Format the results, best first. scores: of all documents."""
        texts = self.texts
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.top_n]
        return [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": texts[index]}} if self.return_documents else {})
            for index in order
        ]
