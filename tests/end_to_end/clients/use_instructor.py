"""instructor: the default mode, JSON, responses, and an object that is filled as it comes."""

import instructor
from openai import OpenAI
from pydantic import BaseModel


class UserInfo(BaseModel):
    name: str
    age: int


client = instructor.from_openai(OpenAI())
user_info = client.chat.completions.create(
    model="assistant",
    response_model=UserInfo,
    messages=[{"role": "user", "content": "John Doe is 30 years old."}],
)
print(user_info.name, user_info.age)

mode = instructor.Mode.JSON_SCHEMA
as_json = instructor.from_openai(OpenAI(), mode=mode).chat.completions.create(
    model="assistant",
    response_model=UserInfo,
    messages=[{"role": "user", "content": "John Doe is 30 years old."}],
)
mode = instructor.Mode.RESPONSES_TOOLS
by_response = instructor.from_openai(OpenAI(), mode=mode).responses.create(
    model="assistant",
    response_model=UserInfo,
    input="John Doe is 30 years old.",
)
partial = list(
    client.chat.completions.create_partial(
        model="assistant",
        response_model=UserInfo,
        messages=[{"role": "user", "content": "John Doe is 30 years old."}],
    )
)

assert all(isinstance(one, UserInfo) for one in (user_info, as_json, by_response))
assert partial[-1].model_dump() == user_info.model_dump()
