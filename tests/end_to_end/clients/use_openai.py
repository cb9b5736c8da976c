"""openai: chat, streamed chat, functions, structured output, embeddings, responses."""

import json

from openai import OpenAI
from pydantic import BaseModel

client = OpenAI()

completion = client.chat.completions.create(
    model="assistant",
    messages=[
        {"role": "developer", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello!"},
    ],
)
print(completion.choices[0].message)

stream = client.chat.completions.create(
    model="assistant", messages=[{"role": "user", "content": "Say this is a test"}], stream=True
)
pieces = [chunk.choices[0].delta.content or "" for chunk in stream]

tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get current temperature for a given location.",
            "parameters": {
                "type": "object",
                "properties": {"location": {"type": "string", "description": "City and country"}},
                "required": ["location"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
messages = [{"role": "user", "content": "What is the weather like in Paris today?"}]
called = client.chat.completions.create(model="assistant", messages=messages, tools=tools)
call = called.choices[0].message.tool_calls[0]
messages.append(called.choices[0].message)
messages.append({"role": "tool", "tool_call_id": call.id, "content": "14 degrees"})
told = client.chat.completions.create(model="assistant", messages=messages, tools=tools)


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


event = client.chat.completions.parse(
    model="assistant",
    messages=[
        {"role": "system", "content": "Extract the event information."},
        {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."},
    ],
    response_format=CalendarEvent,
)

asked = {"model": "assistant", "input": "Write a one-sentence bedtime story about a unicorn."}
response = client.responses.create(**asked)
events = list(client.responses.create(**asked, stream=True))
story = client.responses.parse(**asked, text_format=CalendarEvent)

tool = {"type": "function", **tools[0]["function"]}
conversation = [{"role": "user", "content": "What is the weather like in Paris today?"}]
step = client.responses.create(model="assistant", input=conversation, tools=[tool])
conversation += step.output
conversation.append(
    {"type": "function_call_output", "call_id": step.output[0].call_id, "output": "14 degrees"}
)
final = client.responses.create(model="assistant", input=conversation, tools=[tool])

embedding = client.embeddings.create(
    model="embedder", input="Your text string goes here", encoding_format="float"
)

assert completion.choices[0].message.content == "A weir is a low dam across a river."
assert "".join(pieces) == completion.choices[0].message.content and len(pieces) > 2
assert json.loads(call.function.arguments) == {"location": "Tokyo"}
assert told.choices[0].message.content == "It is 14 degrees"
assert isinstance(event.choices[0].message.parsed, CalendarEvent)
assert response.output_text == completion.choices[0].message.content
assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == (
    response.output_text
)
assert events[-1].response.output_text == response.output_text
assert isinstance(story.output_parsed, CalendarEvent)
assert json.loads(step.output[0].arguments) == {"location": "Tokyo"}
assert final.output_text == "It is 14 degrees"
assert len(embedding.data[0].embedding) == 2
names = [model.id for model in client.models.list()]
assert (names[0], set(names[1:])) == ("assistant", {"embedder", "classifier", "ranker"})
