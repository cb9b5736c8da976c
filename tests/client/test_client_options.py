"""Options of the client become fields of the protocol, or are refused by their names."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenweir import AsyncClient, Client
from tokenweir._requests import generate_request, prediction_request, score_request
from tokenweir.v1 import common_pb2, prediction_service_pb2
from tokenweir.v1 import generation_service_pb2 as pb
from tokenweir.v1.prediction_service_pb2 import ClassifyRequest as Classify


def _request(**options: Any) -> pb.GenerateRequest:
    return generate_request("m", "p", options)  # type: ignore[arg-type]  # what is tested


def test_best_of_and_typical_p_ask_for_sampling() -> None:
    decoding = _request(best_of=4, typical_p=0.5).decoding

    assert decoding == pb.Decoding(sampling=pb.Sampling(best_of=4, typical_p=0.5))


def test_a_prompt_can_be_a_conversation() -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]

    (one,) = generate_request("m", said, {}).inputs  # type: ignore[arg-type]

    messages = [pb.ChatMessage(**message) for message in said]
    assert one == pb.Input(chat=pb.Chat(messages=messages))


def test_what_is_said_may_come_in_parts_and_with_variables_of_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    said = [{"role": "user", "content": parts, "name": "bob", "refusal": None}]

    options = {"add_generation_prompt": False, "continue_final_message": True}
    options |= {"chat_template_kwargs": {"thinks": False}}
    (one,) = generate_request("m", said, options).inputs  # type: ignore[arg-type]

    (message,) = one.chat.messages
    assert message == pb.ChatMessage(role="user", parts=["a", "b"])
    assert dict(one.chat.template_variables) == {"thinks": False}
    assert one.chat.HasField("add_generation_prompt") and not one.chat.add_generation_prompt
    assert one.chat.continue_final_message


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "text": "Why?"}, "prompt[1].text cannot be sent; a message has role and"),
        ({"role": "user"}, "prompt[1].content is missing; a message has role and content"),
        ({"role": 5, "content": "a"}, "prompt[1].role=5: "),
        ({"role": "user", "content": "\ud800"}, "prompt[1].content is not Unicode text"),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "prompt[1].content[0].text is None; give",
        ),
        ({"role": "user", "content": ["a"]}, "prompt[1].content[0] is no part; one is"),
        ("a", "prompt[1] is no message; a message has role and content"),
    ],
)
def test_what_is_no_message_is_named_by_its_place(message: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(problem)):
        generate_request("m", [{"role": "user", "content": "a"}, message], {})


def test_texts_that_are_too_long_may_be_cut() -> None:
    right = prediction_service_pb2.TRUNCATION_RIGHT

    assert prediction_request(Classify, "m", ["a"], {"truncate": "right"}).truncation == right
    with pytest.raises(ValueError, match="truncate=True must be one of right, left"):
        prediction_request(Classify, "m", ["a"], {"truncate": True})  # type: ignore[typeddict-item]


def test_texts_that_are_too_long_may_be_labelled_in_windows() -> None:
    label = prediction_service_pb2.LabelRequest
    assert prediction_request(label, "m", ["a"], {}, stride=0).HasField("stride")
    assert not prediction_request(label, "m", ["a"], {}, stride=None).HasField("stride")
    with pytest.raises(TypeError, match="stride='2': give a whole number"):
        prediction_request(label, "m", ["a"], {}, stride="2")
    with pytest.raises(TypeError, match="unknown option stride; known are"):
        prediction_request(Classify, "m", ["a"], {"stride": 2})  # type: ignore[typeddict-unknown-key]


def test_variables_of_a_template_are_a_mapping_and_of_a_conversation() -> None:
    said = [{"role": "user", "content": "a"}]
    for prompt, variables in (("a", {"b": 1}), (said, 5), (said, {"b": object()})):
        with pytest.raises((TypeError, ValueError), match="chat_template_kwargs"):
            generate_request("m", prompt, {"chat_template_kwargs": variables})  # type: ignore[arg-type,typeddict-item]


def test_variables_of_a_template_are_as_deep_as_protobuf_can_send() -> None:
    said: Any = [{"role": "user", "content": "a"}]
    nested: Any = {"x": 1}
    for _ in range(23):
        nested = {"x": nested}

    sent = generate_request("m", said, {"chat_template_kwargs": nested})

    assert type(sent).FromString(sent.SerializeToString()) == sent
    for deeper in ({"x": nested}, {"x": [nested]}):
        with pytest.raises(ValueError, match="is nested more than 24 deep; give flatter values"):
            generate_request("m", said, {"chat_template_kwargs": deeper})


def test_a_flag_is_no_huge_number() -> None:
    with pytest.raises(TypeError, match="skip_special_tokens=10{20}: give true or false"):
        _request(skip_special_tokens=10**20)


def test_a_refusal_quotes_the_beginning_of_a_long_value() -> None:
    with pytest.raises(TypeError) as refused:
        _request(top_k="x" * 10**6)
    assert len(str(refused.value)) < 400
    assert str(refused.value).endswith("x: give a whole number")


def test_a_word_that_an_option_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="length_penalty_form='log' must be one of power, paper"):
        _request(beam=2, length_penalty=1.0, length_penalty_form="log")
    with pytest.raises(ValueError, match="beam_end='soon' must be one of bound, estimate, enough"):
        _request(beam=2, beam_end="soon")


def test_beams_without_a_width_have_the_models() -> None:
    assert _request(strategy="beam").decoding == pb.Decoding(beam=pb.BeamSearch())
    assert _request(length_penalty=0.5).decoding.beam == pb.BeamSearch(length_penalty=0.5)


def test_what_is_left_out_is_left_to_the_model() -> None:
    request = _request(banned_tokens=None, forced_begin=())

    assert request.decoding == pb.Decoding()
    assert request.without_defaults == ["forced_begin"]


def test_empty_lists_and_names_rule_defaults_out() -> None:
    request = _request(
        banned_tokens=[], banned_sequences=[], begin_banned_tokens=[1], without_defaults=["beam"]
    )

    assert request.without_defaults == ["beam", "banned_tokens", "banned_sequences"]


def test_without_controls_or_constraint_none_are_sent() -> None:
    decoding = _request(repetition_penalty=None, regex=None).decoding

    assert not decoding.HasField("controls") and not decoding.HasField("constraint")


def test_a_schema_may_be_a_mapping() -> None:
    schema = {"type": "object", "properties": {"day": {"type": "integer"}}}

    constraint = _request(json_schema=schema).decoding.constraint

    assert json.loads(constraint.json_schema) == schema


@pytest.mark.parametrize(
    ("batch_invariant", "expected"),
    [
        (True, common_pb2.DETERMINISM_BATCH_INVARIANT),
        (False, common_pb2.DETERMINISM_BEST_EFFORT),
        (None, common_pb2.DETERMINISM_UNSPECIFIED),
    ],
)
def test_scheduling(batch_invariant: bool | None, expected: int) -> None:
    scheduling = _request(priority=-2, tenant="team", batch_invariant=batch_invariant).scheduling

    assert (scheduling.priority, scheduling.tenant) == (-2, "team")
    assert scheduling.determinism == expected


def test_target_prefix_as_text_or_ids() -> None:
    (text,) = _request(target_prefix="20").inputs
    (ids,) = _request(target_prefix=[4, 5]).inputs
    (none,) = _request().inputs

    assert text.prefix_text == "20"
    assert list(ids.prefix_tokens.ids) == [4, 5]
    assert none.WhichOneof("target_prefix") is None


def test_score() -> None:
    request = score_request("m", "source", [4, 5], {"top_logprobs": 3, "request_id": "r"})

    assert request == pb.ScoreRequest(
        model="m",
        request_id="r",
        inputs=[pb.Input(text="source", prefix_tokens=common_pb2.TokenIds(ids=[4, 5]))],
        top_logprobs=3,
    )


def test_a_score_is_scheduled_as_asked() -> None:
    request = score_request("m", "source", "target", {"priority": 2, "tenant": "team"})

    assert request.scheduling == pb.Scheduling(priority=2, tenant="team")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 4, "temperature": 0.5}, "temperature, beam: give options of sampling or of beam"),
        ({"without_defaults": "beam"}, "without_defaults='beam' is one name; give a list"),
        ({"strategy": "greedy", "beam": 2}, "beam mean nothing with strategy='greedy'"),
        ({"beam": "wide"}, "beam='wide'"),
        ({"regex": "a", "choice": ["a"]}, "regex, choice: give one of them only"),
        ({"choice": "yes"}, "choice='yes' is one text; give a list of them"),
        ({"choice": [1]}, "choice=[1]"),
        ({"regex": "no\udce9"}, "regex is not Unicode text"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias="),
        ({"logit_bias": 3}, "logit_bias=3"),
        ({"banned_tokens": ["a"]}, "banned_tokens="),
        ({"target_prefix": "no\udce9"}, "target_prefix is not Unicode text"),
        ({"target_prefix": ["a"]}, "target_prefix=['a'] is neither a text nor"),
        ({"logprobs": "all"}, "logprobs='all'"),
        ({"priority": 2**40}, "priority="),
        ({"seed": -1}, "seed=-1"),
        ({"top_k": "many"}, "top_k='many'"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids"),
        ({"stop_token_ids": [None]}, "stop_token_ids=[None]: give a list, each a whole number"),
        ({"strategy": "beams"}, "strategy='beams' must be one of greedy, sampling, beam"),
        ({"stop": "no\udce9"}, "stop is not Unicode text: half a surrogate pair at character 3"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        _request(**options)

    assert message in str(caught.value)


def test_text_that_is_no_unicode_is_refused() -> None:
    with Client("127.0.0.1:9") as client:
        for call in (client.generate, client.stream, client.classify, client.label):
            with pytest.raises(ValueError, match=r"(prompt|items\[0\]) is not Unic.* character 4"):
                call("m", "caf\udce9")


@pytest.mark.parametrize("timeout", [float("nan"), float("inf")])
async def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout: float) -> None:
    async with AsyncClient("127.0.0.1:9") as client:
        with pytest.raises(ValueError, match=rf"timeout \({timeout}\) must be seconds, or None"):
            await client.generate("m", "x", timeout=timeout)
        with pytest.raises(ValueError, match=rf"timeout \({timeout}\)"):
            client.stream("m", "x", timeout=timeout)
    with Client("127.0.0.1:9", timeout=timeout) as client:
        for ask in (client.generate, client.stream):
            with pytest.raises(ValueError, match=rf"timeout \({timeout}\)"):
                ask("m", "x")
