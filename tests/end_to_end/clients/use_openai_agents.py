"""openai-agents: a function, a handoff, an output type, by its default and by chats."""

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
# By its name, a model answers with responses.
MODELS = ["assistant", OpenAIChatCompletionsModel("assistant", AsyncOpenAI())]


@function_tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


class CalendarEvent(BaseModel):
    name: str
    participants: list[str]


async def use(model: object) -> None:
    agent = Agent(name="Assistant", instructions="You are a helpful assistant", model=model)
    result = await Runner.run(agent, "Write a haiku about recursion in programming.")
    print(result.final_output)

    weather = Agent(name="Weather", tools=[get_weather], model=model)
    told = await Runner.run(weather, "What's the weather in Tokyo?")
    triage = Agent(name="Triage", instructions="Hand off.", handoffs=[weather], model=model)
    handed = await Runner.run(triage, "What's the weather in Tokyo?")

    events = Agent(name="Events", output_type=CalendarEvent, model=model)
    event = await Runner.run(events, "Alice and Bob go to a fair.")

    streamed = Runner.run_streamed(weather, "What's the weather in Tokyo?")
    kinds = {one.type async for one in streamed.stream_events()}

    assert result.final_output == "A weir is a low dam across a river."
    assert told.final_output == streamed.final_output == "It is sunny in Tokyo"
    assert handed.last_agent is weather
    assert isinstance(event.final_output, CalendarEvent)
    assert {"raw_response_event", "run_item_stream_event"} <= kinds


async def main() -> None:
    for model in MODELS:
        await use(model)


asyncio.run(main())
