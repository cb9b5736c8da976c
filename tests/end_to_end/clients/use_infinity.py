"""Infinity's client: the models, vectors, ranks and classes, which it asks for without /v1."""

import os

from infinity_client import Client
from infinity_client.api.default import classify, embeddings, models, rerank
from infinity_client.models import (
    ClassifyInput,
    OpenAIEmbeddingInputText,
    OpenAIEmbeddingResult,
    OpenAIModelInfo,
    RerankInput,
)
from infinity_client.types import Response

i_client = Client(base_url=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"))

with i_client as client:
    model_info: OpenAIModelInfo = models.sync(client=client)
    # or if you need more info (e.g. status_code)
    response: Response[OpenAIModelInfo] = models.sync_detailed(client=client)
    embeds: OpenAIEmbeddingResult = embeddings.sync(
        client=client,
        body=OpenAIEmbeddingInputText.from_dict(
            {
                "input": ["Hello, this is a sentence-to-embed", "Hello, my cat is cute"],
                "model": "embedder",
            }
        ),
    )
    documents = ["Munich is in Germany.", "The sky is blue."]
    asked = RerankInput(query="Where is Munich?", documents=documents, model="ranker", top_n=1)
    ranked = rerank.sync(client=client, body=asked)
    labelled = classify.sync(client=client, body=ClassifyInput(["I am feeling really sad today."]))

assert "embedder" in {one.id for one in model_info.data}
assert response.status_code == 200
assert [len(one.embedding) for one in embeds.data] == [2, 2]
assert embeds.usage.prompt_tokens > 0
assert [one.index for one in ranked.results] == [0]
assert 0 < ranked.results[0].relevance_score < 1
assert [one.label for one in labelled.data[0]] == ["DET", "VERB", "NOUN"]
