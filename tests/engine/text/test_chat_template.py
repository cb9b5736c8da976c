"""Conversations become the text that transformers makes of them, and templates have little room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.generation.request_reader import RequestReader
from engine.package.package import Package
from engine.requests.request import Chat, ChatMessage, GenerationRequest
from engine.text.chat_format import ChatFormat, read_chat_format
from engine.text.chat_template import ChatTemplate
from engine.text.constraint import ConstraintCompiler
from engine.text.tokenizer import SourceAndTarget, Tokenizer

# The published styles, in their documented form.
STYLES = {
    "llama 3": """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "chatml": """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
{% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "mistral": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
""",
    "phi 3": "{% for message in messages %}{% if message['role'] == 'system' and message['content']"
    " %}{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
    "what templates use": """{%- set ns = namespace(count=0) -%}
{%- for message in messages if message.role != 'tool' -%}
{%- set ns.count = ns.count + 1 -%}{%- if ns.count > 9 -%}{%- break -%}{%- endif -%}
{{ message | tojson(indent=2) }}{% generation %}{{ message['content'][::-1] | upper }}
{% endgeneration %}
{%- endfor -%}{{ tools | tojson }} {{ documents is none }} {{ undefined_one }}""",
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATS = {
    "a question": Chat((ChatMessage("user", "  What is a <weir> & why?\n"),)),
    "a system and turns": Chat(
        (
            ChatMessage("system", "Be brief."),
            ChatMessage("user", "Ünïcode 😀 {{ 7 * 7 }}"),
            ChatMessage("assistant", " yes\n"),
            ChatMessage("user", "</s><|im_end|> 日本"),
        )
    ),
}


def template(text: str, **settings: Any) -> ChatTemplate:
    return ChatTemplate(ChatFormat(template=text, tokens=TOKENS, **settings))


@pytest.fixture
def reader_of(
    make_package: Callable[..., Package], byte_tokenizer: Tokenizer
) -> Callable[[ChatTemplate | None], RequestReader]:
    """Return a function that makes the reader of a model over bytes with a chat template."""
    contract = make_package(max_len=500).manifest.generation
    assert contract is not None

    def make(chat: ChatTemplate | None) -> RequestReader:
        constraints = ConstraintCompiler(byte_tokenizer, contract.vocab_size, ())
        tokenizers = SourceAndTarget(byte_tokenizer, byte_tokenizer)
        return RequestReader(contract, tokenizers, constraints, EngineConfig(), chat)

    return make


@pytest.mark.parametrize("style", STYLES)
def test_a_conversation_becomes_the_text_of_transformers(
    style: str,
) -> None:
    ours, num_texts = template(STYLES[style]), 0

    for chat in CHATS.values():
        messages = [{"role": one.role, "content": one.content} for one in chat.messages]
        try:
            (expected,), _ = render_jinja_template(
                [messages], chat_template=STYLES[style], add_generation_prompt=True, **TOKENS
            )
        except Exception as error:  # any error of the template
            with pytest.raises(ValueError, match=str(error)[:20]):
                ours.render(chat)
        else:
            assert ours.render(chat) == expected
            num_texts += 1
    assert num_texts


@pytest.mark.parametrize("style", ["llama 3", "chatml", "mistral", "phi 3"])
def test_a_developer_is_a_system_to_a_template_that_knows_no_developers(style: str) -> None:
    said = (ChatMessage("user", "How?"), ChatMessage("assistant", "So."), ChatMessage("user", "a"))
    first = [Chat((ChatMessage(role, "Be brief."), *said)) for role in ("developer", "system")]

    texts = [template(STYLES[style]).render(chat) for chat in first]

    assert "Be brief." in texts[0]
    assert texts[0] == texts[1]


def test_a_template_that_knows_developers_gets_them() -> None:
    said = "{{ 'D' if m.role == 'developer' else m.role }}:{{ m.content }};"
    ours = template(f"{{% for m in messages %}}{said}{{% endfor %}}")

    text = ours.render(Chat((ChatMessage("developer", "a"), ChatMessage("user", "b"))))

    assert text == "D:a;user:b;"


@pytest.mark.parametrize("is_continued", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_a_conversation_ends_where_transformers_lets_it_end(style: str, is_continued: bool) -> None:
    ours = template(STYLES[style])
    for said in (" yes,  and\n", "no", "</s> 日本 "):
        spoken = (ChatMessage("user", "Is it?"), ChatMessage("assistant", said))
        chat = Chat(spoken, add_generation_prompt=False, continue_final_message=is_continued)
        messages = [{"role": one.role, "content": one.content} for one in spoken]
        (expected,), _ = render_jinja_template(
            [messages],
            chat_template=STYLES[style],
            add_generation_prompt=False,
            continue_final_message=is_continued,
            **TOKENS,
        )
        assert ours.render(chat) == expected


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ((), "says nothing that could be continued"),
        (" ", "says nothing that could be continued"),
        (None, "says nothing that could be continued"),
        ("a", "changes or leaves out the last message"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(said: Any, problem: str) -> None:
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    chat = (ChatMessage("user", "b"), ChatMessage("assistant", said))

    with pytest.raises(ValueError, match=problem):
        template(users).render(Chat(chat, continue_final_message=True))


FUNCTION = {"name": "now", "description": "<b>", "parameters": {"type": "object", "b": 1, "a": 2}}
TOOLS = ({"type": "function", "function": FUNCTION},)
ARGUMENTS = {"b": 1, "a": 2}
CALL = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
# As published models have it: in the words of Qwen 2.5, of Llama 3.2 and of Mistral 7B.
OF_TOOLS = {
    "hermes": """{%- if tools %}{% for tool in tools %}{{ "\n" }}{{ tool | tojson }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- "<|im_start|>" + message.role }}
        {%- if message.content %}{{ "\n" + message.content }}{% endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}{{ tool_call.name }}{{ '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{ '}\n</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {{- "<tool_response>" + message.content }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{ "end" }}{% endif %}
    {%- else %}{{ message.role + message.content }}{% endif %}
{%- endfor %}""",
    "llama3_json": """{%- if tools is not none %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary}.' }}
    {%- for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- message['role'] + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{ raise_exception("one call!") }}{% endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{ tool_call.arguments | tojson }}
    {%- elif message.content is mapping or message.content is iterable %}
        {{- message.content | tojson }}
    {%- endif %}
{%- endfor %}""",
    "mistral": """{%- for message in messages %}
    {%- if message["role"] == "user" and tools is not none and message == messages[0] %}
        {{- "[AVAILABLE_TOOLS] [" }}
        {%- for tool in tools %}{% set tool = tool.function %}{{ '{"function": {' }}
            {%- for key, val in tool.items() if key != "return" %}
                {%- if val is string %}{{ '"' + key + '": "' + val + '"' }}
                {%- else %}{{ '"' + key + '": ' + val|tojson }}{% endif %}
                {%- if not loop.last %}{{ ", " }}{% endif %}
            {%- endfor %}{{ "}}" }}
        {%- endfor %}{{ "][/AVAILABLE_TOOLS]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{ out[:-1] }}
            {%- if tool_call.id|length != 9 %}{{ raise_exception("ids of length 9!") }}{% endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
        {%- endfor %}{{ "]" + eos_token }}
    {%- elif message["role"] == "tool" %}{{ message.content|string + message.tool_call_id }}
    {%- endif %}
{%- endfor %}""",
}


@pytest.mark.parametrize("style", OF_TOOLS)
def test_functions_and_their_calls_become_the_text_of_transformers(style: str) -> None:
    chat = Chat(
        (
            ChatMessage("user", "What?"),
            ChatMessage("assistant", None, {"tool_calls": [CALL]}),
            ChatMessage("tool", "5 <b>", {"tool_call_id": "123456789"}),
        ),
        tools=TOOLS,
    )
    messages = [{"role": one.role, "content": one.content, **one.more} for one in chat.messages]
    ours = template(OF_TOOLS[style])

    (expected,), _ = render_jinja_template(
        [messages],
        tools=list(TOOLS),
        chat_template=OF_TOOLS[style],
        add_generation_prompt=True,
        **TOKENS,
    )

    assert ours.render(chat) == expected
    assert ours.problem_of_tools(chat) is None


def test_a_template_that_knows_no_functions_says_so() -> None:
    called = Chat((ChatMessage("assistant", None, {"tool_calls": [CALL]}),))
    asked = Chat((ChatMessage("user", "a"),), tools=TOOLS)

    for chat in (called, asked):
        assert "knows no tool" in (template(STYLES["chatml"]).problem_of_tools(chat) or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% else", "TemplateSyntaxError"),
        ("{{ messages[5].content.x }}", "UndefinedError"),
        ("{{ raise_exception('not so') }}", "refuses it: TemplateError: not so"),
        ("{{ 'a' * 2000000 }}", "more than 1,048,576"),
        ("{{ 10000000000 * 'a' }}", "more than 1,048,576"),
        ("{{ 'a'.center(10000000000) }}", "more than 1,048,576"),
        ("{{ 'a' | center(width=10000000000) }}", "more than 1,048,576"),
        ("{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}"
         "{% endfor %}", "more than 1,048,576"),
        ("{% set n = namespace(x='abcd') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
         "{% endfor %}", "more than 1,048,576"),
        ("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, "more than 1,000,000 turns"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    ],
)  # fmt: skip
def test_a_template_cannot_do_what_it_wants(text: str, message: str) -> None:
    ours = template("{% if messages[0].role == 'user' %}" + text + "{% endif %}done")

    with pytest.raises(ValueError, match=message):
        ours.render(CHATS["a question"])

    if message != "TemplateSyntaxError":
        assert ours.render(Chat((ChatMessage("system", "done"),))) == "done"


TEXTS = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
PARTS = TEXTS.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
BOTH = """{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content | trim }}
{%- else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text | trim }}{% endif %}
{%- endfor %}{% endif %};{% endfor %}"""


@pytest.mark.parametrize(
    ("text", "of_parts"), [(TEXTS, "user:a\nb;"), (PARTS, "user:ab;"), (BOTH, "user:ab;")]
)
def test_a_template_gets_what_is_said_in_the_form_that_it_reads(text: str, of_parts: str) -> None:
    ours = template(text)

    assert ours.render(Chat((ChatMessage("user", "hi"),))) == "user:hi;"
    assert ours.render(Chat((ChatMessage("user", ""),))) == "user:;"
    assert ours.render(Chat((ChatMessage("user", ("a", "b")),))) == of_parts
    if text != TEXTS:  # which transformers gives the list in Python's words
        parts = [{"type": "text", "text": said} for said in "ab"]
        (theirs,), _ = render_jinja_template(
            [[{"role": "user", "content": parts}]], chat_template=text, **TOKENS
        )
        assert theirs == of_parts


def test_a_conversation_of_which_nothing_is_left_is_refused() -> None:
    ours = template(
        "{% for m in messages if m.role == 'user' %}{{ m.content | upper }}{% endfor %}"
    )

    assert ours.render(Chat((ChatMessage("user", "hi"), ChatMessage("system", "lost")))) == "HI"
    assert ours.render(Chat((ChatMessage("user", ""),))) == ""
    with pytest.raises(ValueError, match="leaves out all that is said"):
        ours.render(Chat((ChatMessage("system", "lost"),)))


def test_variables_are_those_of_the_request_else_of_the_package() -> None:
    text = (
        "{% if thinks is defined and not thinks %}N{% else %}T{% endif %}{{ messages[0].content }}"
    )
    chat, without = CHATS["a question"].messages, {"thinks": False}

    assert template(text).render(Chat(chat)).startswith("T")
    assert template(text).render(Chat(chat, without)).startswith("N")
    assert template(text, variables=without).render(Chat(chat)).startswith("N")
    assert template(text, variables=without).render(Chat(chat, {"thinks": 1})).startswith("T")
    assert template(text).problem_of(["thinks"]) is None
    assert template(text).problem_of(["think", "messages"]) == (
        "the model's chat template has no variable think, messages to be set; it has thinks"
    )
    with pytest.raises(ValueError, match="variables: the model's chat template has no variable x"):
        template(text, variables={"x": 1})


def test_a_conversation_that_is_longer_than_any_prompt_is_not_rendered() -> None:
    with pytest.raises(ValueError, match="1,048,577 characters are more than 1,048,576"):
        template(TEXTS).render(Chat((ChatMessage("user", "a" * (2**20 + 1)),)))


async def test_the_text_of_a_conversation_gets_nothing_more_around_it(
    reader_of: Callable[..., RequestReader],
    byte_tokenizer: Tokenizer,
) -> None:
    reader = reader_of(template(STYLES["llama 3"]))

    request = await reader.read(GenerationRequest("one", CHATS["a question"]), 0.0)

    text = "<s><|start_header_id|>user<|end_header_id|>\n\nWhat is a <weir> & why?<|eot_id|>"
    text += "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert list(request.prompt_ids) == byte_tokenizer.encode_part(text)


async def test_a_conversation_that_is_refused_is_named_by_its_field(
    reader_of: Callable[..., RequestReader],
) -> None:
    request = GenerationRequest("one", CHATS["a system and turns"])

    with pytest.raises(InvalidRequest) as refused:
        await reader_of(template(STYLES["gemma"])).read(request, 0.0)
    with pytest.raises(InvalidRequest) as without:
        await reader_of(None).read(request, 0.0)

    (violation,) = refused.value.violations
    assert violation.field == "inputs[0].chat"
    assert "System role not supported" in violation.description
    assert "without a chat template" in without.value.violations[0].description


def test_a_format_with_anything_else_in_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text('{"template": "", "code": ""}')

    with pytest.raises(ValueError, match="code"):
        read_chat_format(path)
