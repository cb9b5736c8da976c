"""LangChain: invoke, stream, tools, structured output in both ways, responses, embeddings."""

import os

from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

llm = ChatOpenAI(model="assistant", temperature=0)
messages = [
    ("system", "You are a helpful translator. Translate the user sentence to French."),
    ("human", "I love programming."),
]
answer = llm.invoke(messages)
print(answer)
pieces = [chunk.text for chunk in llm.stream(messages)]


class GetWeather(BaseModel):
    """Get the current weather in a given location"""

    location: str = Field(..., description="The city and state, e.g. San Francisco, CA")


class GetPopulation(BaseModel):
    """Get the current population in a given location"""

    location: str = Field(..., description="The city and state, e.g. San Francisco, CA")


tools = llm.bind_tools([GetWeather, GetPopulation])
called = tools.invoke("Which city is hotter today and which is bigger: LA or NY?")
required = llm.bind_tools([GetWeather], tool_choice="any").invoke("How is it in Rome?")


class Joke(BaseModel):
    """Joke to tell user."""

    setup: str = Field(description="The setup of the joke")
    punchline: str = Field(description="The punchline to the joke")
    rating: int | None = Field(description="How funny the joke is, from 1 to 10")


jokes = [
    llm.with_structured_output(Joke, method=method).invoke("Tell me a joke about cats")
    for method in ("function_calling", "json_schema")
]

responses = ChatOpenAI(model="assistant", use_responses_api=True)
responded = responses.invoke(messages)
in_events = [chunk.text for chunk in responses.stream(messages)]
by_response = responses.bind_tools([GetWeather]).invoke("How is it in Rome?")

embeddings = OpenAIEmbeddings(model="embedder", check_embedding_ctx_length=False)
vector = embeddings.embed_query("This is a test document")
vectors = embeddings.embed_documents(["a fox", "a dog"])

url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
tei = HuggingFaceEndpointEmbeddings(model=url, model_kwargs={"prompt_name": "query"})
by_tei = tei.embed_query("What is deep learning?")

assert answer.content == "".join(pieces) == "A weir is a low dam across a river."
assert answer.usage_metadata["total_tokens"] > 0
(call,) = called.tool_calls
assert (call["name"], call["args"]) == ("GetWeather", {"location": "Tokyo"})
assert responded.text == "".join(in_events) == answer.content
assert by_response.tool_calls[0]["args"] == {"location": "Tokyo"}
assert required.tool_calls[0]["name"] == "GetWeather"
assert all(isinstance(joke, Joke) for joke in jokes)
assert (len(vector), len(vectors), len(by_tei)) == (2, 2, 2)
