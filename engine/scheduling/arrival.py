"""Makes what the scheduler keeps of a request that has come."""

from __future__ import annotations

from engine.package.manifest import GenerationContract
from engine.sampling.beam_search import BeamSearch
from engine.sampling.plain import is_plain
from engine.sampling.random_stream import SequenceDraws
from engine.sampling.sampler import num_top
from engine.sampling.stop_rule import StopRule, searched_text
from engine.sampling.token_rules import token_rules
from engine.scheduling.estimates import max_cost
from engine.scheduling.sequence import Request, Sequence, TokenRequest
from engine.text.tokenizer import Tokenizer


def make_request(
    asked: TokenRequest, contract: GenerationContract, tokenizer: Tokenizer | None = None
) -> Request:
    """Return a request with its sequences, of which nothing is computed.

    `tokenizer` makes the text of those with stop strings.
    """
    params, start = asked.params, contract.decoder_start_token_id
    given = asked.prompt_ids if start is None else (start,)
    tokens = (*given, *asked.target_ids)
    room = contract.cache.max_len - len(tokens)
    stop_rule = StopRule(params, frozenset(contract.eos_token_ids), room)
    rules = token_rules(params, stop_rule, asked.prompt_ids)
    request = Request(
        asked,
        stop_rule,
        rules,
        is_plain=rules is None and is_plain(params),
        needs_encoding=start is not None,
        num_top=max(num_top(params), params.prompt_logprobs or 0),
        score_from=asked.score_from,
    )
    request.sequences = [
        Sequence(request, i, list(tokens), len(tokens)) for i in range(params.num_sequences)
    ]
    if asked.matcher is not None:
        for sequence in request.sequences:
            sequence.matcher = asked.matcher.fork()
    text = None
    if params.stop_strings:
        assert tokenizer is not None, "stop strings are looked for in text"
        text = searched_text(params, tokenizer, asked.target_ids)
    for sequence in request.sequences:
        if text is not None and params.strategy != "beam":
            sequence.text = text.fork()
        sequence.mark_emitted()
        if request.is_plain and params.strategy == "sampling":
            sequence.draws = SequenceDraws(asked.seed, sequence.index)
    request.max_cost = max_cost(request)
    if params.strategy == "beam":
        request.beams = [request.leader]
        request.search = BeamSearch(params, stop_rule, text)
        request.num_top = max(request.num_top, request.search.num_candidates)
    return request
