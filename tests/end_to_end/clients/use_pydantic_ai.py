"""pydantic-ai: a plain agent, one with tools, its output as a type, by chats and by responses."""

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, RunContext
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

model = OpenAIChatModel("assistant")
agent = Agent(model, instructions="Be concise, reply with one sentence.")
result = agent.run_sync('Where does "hello world" come from?')
print(result.output)

dice = Agent(model, deps_type=str, instructions="You are a dice game.")


@dice.tool_plain
def roll_dice() -> str:
    """Roll a six-sided die and return the result."""
    return "4"


@dice.tool
def get_player_name(ctx: RunContext[str]) -> str:
    """Get the player's name."""
    return ctx.deps


game = dice.run_sync("My guess is 4", deps="Anne")


class CityLocation(BaseModel):
    city: str
    country: str


city = Agent(model, output_type=CityLocation).run_sync("Where were the olympics held in 2012?")
native = Agent(model, output_type=NativeOutput(CityLocation)).run_sync("Where were they in 2016?")
responses = OpenAIResponsesModel("assistant")
answered = Agent(responses).run_sync("What is a weir?")
again = Agent(responses).run_sync("And a dam?", message_history=answered.all_messages())
typed = Agent(responses, output_type=CityLocation).run_sync("Where were they in 2020?")
with Agent(responses).run_stream_sync("What is a weir?") as response:
    *_, in_events = response.stream_text(debounce_by=None)
with agent.run_stream_sync("What is a weir?") as response:
    *_, streamed = response.stream_text(debounce_by=None)

assert result.output == streamed == "A weir is a low dam across a river."
assert game.output == "It is 4"
assert answered.output == again.output == in_events == streamed
assert isinstance(typed.output, CityLocation)
assert isinstance(city.output, CityLocation) and isinstance(native.output, CityLocation)
assert result.usage.output_tokens > 0
