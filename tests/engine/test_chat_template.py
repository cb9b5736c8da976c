"""Conversations become the text that transformers makes of them, and templates have little room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

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
from engine.text.tokenizer import Tokenizer

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


@pytest.fixture
def template() -> Iterator[Callable[[str], ChatTemplate]]:
    """Return a function that makes a template, whose process ends with the test."""
    made = []

    def make(text: str) -> ChatTemplate:
        made.append(ChatTemplate(ChatFormat(template=text, tokens=TOKENS)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def reader_of(
    make_package: Callable[..., Package], byte_tokenizer: Tokenizer
) -> Callable[[ChatTemplate | None], RequestReader]:
    """Return a function that makes the reader of a model over bytes with a chat template."""
    contract = make_package(max_len=500).manifest.generation
    assert contract is not None

    def make(chat: ChatTemplate | None) -> RequestReader:
        constraints = ConstraintCompiler(byte_tokenizer, contract.vocab_size, ())
        return RequestReader(contract, byte_tokenizer, constraints, EngineConfig(), chat)

    return make


@pytest.mark.parametrize("style", STYLES)
def test_a_conversation_becomes_the_text_of_transformers(
    style: str, template: Callable[[str], ChatTemplate]
) -> None:
    ours, num_texts = template(STYLES[style]), 0

    for chat in CHATS.values():
        messages = [{"role": one.role, "content": one.content} for one in chat.messages]
        try:
            (expected,), _ = render_jinja_template(
                [messages], chat_template=STYLES[style], add_generation_prompt=True, **TOKENS
            )
        except Exception as error:  # of the template
            with pytest.raises(ValueError, match=str(error)[:20]):
                ours.render(chat)
        else:
            assert ours.render(chat) == expected
            num_texts += 1
    assert num_texts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% if", "TemplateSyntaxError"),
        ("{{ messages[5].content.x }}", "UndefinedError"),
        ("{{ raise_exception('not so') }}", "refuses it: TemplateError: not so"),
        ("{{ 'a' * 2000000 }}", "more than 1,048,576"),
        ("{{ 'a' * 10**9 }}", "memory"),
        ("{% set n = namespace(x='abcd') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
         "{% endfor %}", "memory"),
    ],
)  # fmt: skip
def test_a_template_cannot_do_what_it_wants(
    text: str, message: str, template: Callable[[str], ChatTemplate]
) -> None:
    with pytest.raises(ValueError, match=message):
        template(text).render(CHATS["a question"])


def test_a_template_without_end_is_ended_and_the_next_conversation_answered(
    template: Callable[[str], ChatTemplate],
) -> None:
    turns = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    ours = template("{% if messages[0].role == 'user' %}" + turns + "{% endif %}done")

    with pytest.raises(ValueError, match="too much time or memory, send a shorter conversation"):
        ours.render(CHATS["a question"])

    assert ours.render(CHATS["a system and turns"]) == "done"


async def test_the_text_of_a_conversation_gets_nothing_more_around_it(
    template: Callable[[str], ChatTemplate],
    reader_of: Callable[..., RequestReader],
    byte_tokenizer: Tokenizer,
) -> None:
    reader = reader_of(template(STYLES["llama 3"]))

    request = await reader.read(GenerationRequest("one", CHATS["a question"]), 0.0)

    text = "<s><|start_header_id|>user<|end_header_id|>\n\nWhat is a <weir> & why?<|eot_id|>"
    text += "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert list(request.prompt_ids) == byte_tokenizer.encode_part(text)


async def test_a_conversation_that_is_refused_is_named_by_its_field(
    template: Callable[[str], ChatTemplate], reader_of: Callable[..., RequestReader]
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
