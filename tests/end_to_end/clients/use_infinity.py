"""Infinity's client: vectors of texts, which it asks for without /v1."""

import os

from infinity_client import Client
from infinity_client.api.default import embeddings
from infinity_client.models import OpenAIEmbeddingResult
from infinity_client.models.open_ai_embedding_input_text import OpenAIEmbeddingInputText

url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
client = Client(base_url=url)

with client as client:
    asked = OpenAIEmbeddingInputText.from_dict({"input": ["a fox", "a dog"], "model": "embedder"})
    answer = embeddings.sync(client=client, body=asked)

assert isinstance(answer, OpenAIEmbeddingResult)
assert [len(one.embedding) for one in answer.data] == [2, 2]
assert answer.usage.prompt_tokens > 0
