"""litellm: completion, a stream, a function, structured output, text, vectors, ranks, responses."""

import json
import os

from litellm import completion, embedding, rerank, responses, text_completion
from pydantic import BaseModel

place = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": "sk-1234"}
messages = [{"role": "user", "content": "Hey, how's it going?"}]
response = completion(model="openai/assistant", messages=messages, **place)
print(response)
stream = completion(model="openai/assistant", messages=messages, stream=True, **place)
pieces = [part.choices[0].delta.content or "" for part in stream]

tools = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather in a given location",
            "parameters": {
                "type": "object",
                "properties": {
                    "location": {"type": "string", "description": "The city and state"},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["location"],
            },
        },
    }
]
asked = {"model": "openai/assistant", "messages": messages, "tools": tools}
called = completion(**asked, tool_choice="auto", **place)
required = completion(**asked, tool_choice="required", **place)


class CalendarEvent(BaseModel):
    name: str
    participants: list[str]


event = completion(
    model="openai/assistant", messages=messages, response_format=CalendarEvent, **place
)
text = text_completion(
    model="text-completion-openai/assistant", prompt="Say", **place, max_tokens=7
)
asked = {"model": "openai/assistant", "input": "Hey, how's it going?"}
answer = responses(**asked, **place)
events = list(responses(**asked, **place, stream=True))
vectors = embedding(model="openai/embedder", input=["good morning from litellm"], **place)
ranked = rerank(
    model="infinity/ranker",
    query="What is the capital of the United States?",
    documents=["Washington, D.C. is the capital.", "Capital punishment has existed."],
    top_n=1,
    api_base=place["api_base"].removesuffix("/v1"),
    api_key="any",
)

assert response.choices[0].message.content == "A weir is a low dam across a river."
assert "".join(pieces) == response.choices[0].message.content
assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)["location"] == "Tokyo"
assert "location" in json.loads(required.choices[0].message.tool_calls[0].function.arguments)
assert CalendarEvent.model_validate_json(event.choices[0].message.content)
assert answer.output[0].content[0].text == response.choices[0].message.content
assert events[-1].type == "response.completed"
assert text.usage.completion_tokens > 0
assert len(vectors.data[0]["embedding"]) == 2
assert [one["index"] for one in ranked.results] == [0]
