"""LlamaIndex: complete, chat, stream, a function, structured output, embeddings in two ways."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

url = os.environ["OPENAI_BASE_URL"]
llm = OpenAILike(
    model="assistant",
    api_base=url,
    api_key="fake",
    context_window=8192,
    is_chat_model=True,
    is_function_calling_model=True,
)
messages = [
    ChatMessage(role="system", content="You are a pirate with a colorful personality"),
    ChatMessage(role="user", content="What is your name"),
]
completed = llm.complete("Paul Graham is ")
answer = llm.chat(messages)
print(answer)
pieces = [one.delta for one in llm.stream_chat(messages)]


class Song(BaseModel):
    """A song with name and artist"""

    name: str
    artist: str


def generate_song(name: str, artist: str) -> Song:
    """Generates a song with provided name and artist."""
    return Song(name=name, artist=artist)


tool = FunctionTool.from_defaults(fn=generate_song)
called = llm.predict_and_call([tool], "Pick a random song for me")
song = llm.as_structured_llm(Song).complete("Pick a random song for me")

embedding = OpenAILikeEmbedding(model_name="embedder", api_base=url, api_key="fake")
vector = embedding.get_text_embedding("Open new doors")
vectors = embedding.get_text_embedding_batch(["a fox", "a dog"])

tei = TextEmbeddingsInference(
    model_name="BAAI/bge-large-en-v1.5",  # for the instructions before texts
    base_url=url.removesuffix("/v1"),
    timeout=60,
    embed_batch_size=10,
)
by_tei = tei.get_text_embedding("Hello World!")

assert completed.text == answer.message.content == "A weir is a low dam across a river."
assert "".join(pieces) == answer.message.content
assert called.sources[0].raw_input["kwargs"] == {"name": "Tokyo", "artist": "Tokyo"}
assert isinstance(song.raw, Song)
assert (len(vector), len(vectors), len(by_tei)) == (2, 2, 2)
