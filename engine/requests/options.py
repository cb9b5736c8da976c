"""The table of the options of a generation, for all parts of Tokenweir.

A new option is a row here, a field of the protocol with its like in the client, a field of
SamplingParams or LogitControls (which say its type and default), and the place that acts on it.
GenerationDefaults has a field of its name if a package may have a default of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Literal, NamedTuple, get_args

from engine.config import RequestLimits
from engine.requests.request import (
    BeamEnd,
    LengthPenaltyForm,
    LogitControls,
    SamplingParams,
    Strategy,
)

Kind = Literal[
    "flag",
    "whole",  # number
    "number",
    "word",  # one of several, in the order of their numbers in the protocol
    "id",  # a token's
    "ids",
    "run",  # ids of tokens in a row
    "runs",
    "biases",  # by token id
    "text",
    "texts",
    "file",  # the path of a text
]


class Range(NamedTuple):
    """The values that an option may have."""

    low: float
    high: float | str  # a name is that of a field of RequestLimits, or "vocab_size"
    ends: Literal["[]", "(]", "[)", "()"] = "[]"  # a round one leaves its end out

    def end(self, limits: RequestLimits, vocab_size: int) -> float:
        """Return the number that its upper end comes to."""
        if not isinstance(self.high, str):
            return self.high
        end: int = vocab_size if self.high == "vocab_size" else getattr(limits, self.high)
        return end

    def has(self, value: float, end: float) -> bool:
        """Say whether a value is in it."""
        begins = self.low <= value if self.ends[0] == "[" else self.low < value
        return begins and (value <= end if self.ends[1] == "]" else value < end)

    def refusal(self, end: float) -> str:
        """Return what is said of a value that is not in it."""
        low, high = (f"{n:g}" if isinstance(n, float) else n for n in (self.low, end))
        if end == inf:
            return f"is not above {low} and finite" if self.ends[0] == "(" else f"is below {low}"
        is_closed = self.ends == "[]"
        span = f"{low} to {high}" if is_closed else f"{self.ends[0]}{low}, {high}{self.ends[1]}"
        return f"is outside {span}"


@dataclass(frozen=True)
class Option:
    """An option, by the name that clients have for it."""

    name: str
    kind: Kind
    help: str  # on the command line
    bounds: Range | str = ""  # a list's is the field of RequestLimits that says how many
    off: str = ""  # which value changes nothing
    hint: str = ""  # stands in a refusal behind the bounds
    left_out: str = ""  # its value on the command line, if not named
    words: tuple[str, ...] = ()
    capability: str = ""  # the model needs it for a value that is not the default
    field: str = ""  # in SamplingParams or LogitControls, if it is not the name
    wire: str = ""  # the protocol's name, likewise
    typed: str = ""  # on the command line, likewise
    generate: str = ""  # in Hugging Face's `generate`, likewise
    message: str = ""  # the path of the message that it is in, from a GenerateRequest
    strategy: str = ""  # that it is an option of, if the others do not have it
    default: object = None  # the engine's

    @property
    def path(self) -> str:
        """The path of its field in a GenerateRequest."""
        return f"{self.message}.{self.wire}"


_DEFAULTS: Mapping[str, object] = {
    field.name: field.default for kind in (SamplingParams, LogitControls) for field in fields(kind)
}
_STRATEGIES = {"decoding.sampling": "sampling", "decoding.beam": "beam"}


def _in(message: str, *options: Option, capability: str = "") -> Iterator[Option]:
    for option in options:
        name, field = option.name, option.field or option.name
        yield replace(
            option,
            message=message,
            strategy=_STRATEGIES.get(message, ""),
            capability=option.capability or capability,
            field=field,
            wire=option.wire or name,
            typed=option.typed or f"--{name.replace('_', '-')}",
            generate=option.generate or name,
            default=_DEFAULTS.get(field),
        )


_SHARE = Range(0, 1, "(]")
_COUNT = Range(0, inf, "[)")
_TWO = Range(-2, 2)
_BANNED = "max_banned_tokens"

# fmt: off
# The rows stay together: with a line for each argument nobody would see a table.
OPTIONS = (
    *_in("decoding",
        Option("strategy", "word", "Decoding strategy", words=get_args(Strategy),
               left_out="what other options imply, or the model's"),
    ),
    *_in("decoding.sampling",
        Option("temperature", "number", "Sampling temperature; turns sampling on",
               Range(0, inf, "()"), hint="; for the most likely token ask for greedy"),
        Option("top_k", "whole", "Sample among so many of the likeliest tokens",
               Range(0, "vocab_size"), "0 means all", ", the vocabulary"),
        Option("top_p", "number", "Sample among the likeliest tokens with this probability in all",
               _SHARE, "1 means all"),
        Option("min_p", "number", "Sample no token below this share of the likeliest one's",
               Range(0, 1, "[)"), "0 means all"),
        Option("typical_p", "number", "Sample among typical tokens with this probability in all",
               _SHARE, "1 means all", capability="typical_p"),
        Option("seed", "whole", "Seed of sampling; the same one gives the same answer",
               Range(0, 2**64 - 1), left_out="drawn and returned"),
        Option("best_of", "whole", "Sample so many answers, and return the best",
               left_out="num_outputs", capability="best_of"),
    ),
    *_in("decoding.beam",
        Option("beam", "whole", "Number of beams; turns beam search on",
               Range(1, "max_beam_width"), hint=" hypotheses that beam search keeps",
               field="beam_width", wire="width"),
        Option("length_penalty", "number",
               "Exponent p: the score of n tokens is their sum of log-probabilities / n^p",
               # Beyond it only the length counts, and powers of it overflow.
               Range(-10, 10), "0 means none", left_out="0.6, paper"),
        Option("length_penalty_form", "word", "Divisor: n^p, or the paper's ((5+n)/6)^p",
               words=get_args(LengthPenaltyForm), left_out="power, if there is a length penalty"),
        Option("beam_end", "word",
               "When beam search ends: no other can win; none seems to; enough ended; at the limit",
               words=get_args(BeamEnd), wire="end"),
        Option("renormalize", "flag",
               "Let probabilities add up to 1 again after bans and penalties",
               left_out="no-renormalize", typed="--renormalize/--no-renormalize",
               generate="renormalize_logits"),
    ),
    *_in("decoding",
        Option("num_outputs", "whole", "Answers to a prompt; several are not streamed",
               Range(1, "max_num_outputs")),
    ),
    *_in("decoding.controls",
        Option("repetition_penalty", "number", "Penalty on tokens of prompt and answer",
               Range(0.01, 100), "1 means none"),  # logits must stay finite
        Option("frequency_penalty", "number", "Penalty on a token for each use in the answer",
               _TWO, "0 means none"),
        Option("presence_penalty", "number", "Penalty on tokens that the answer has",
               _TWO, "0 means none"),
        Option("no_repeat_ngram", "whole", "Write no run of so many tokens twice", _COUNT,
               "0 means none", generate="no_repeat_ngram_size"),
        Option("logit_bias", "biases", "Numbers added to the logits of tokens",
               "max_logit_biases"),
        Option("banned_tokens", "ids", "Tokens that are never written", _BANNED,
               typed="--ban"),
        Option("banned_sequences", "runs",
               "Runs of tokens that are never written, such as 5,7", _BANNED,
               typed="--ban-run"),
        Option("begin_banned_tokens", "ids", "Tokens that the answer does not begin with",
               _BANNED, typed="--ban-begin"),
        Option("allowed_token_ids", "ids", "The only tokens that are written", _BANNED,
               typed="--allow"),
        Option("encoder_no_repeat_ngram", "whole",
               "Write no run of so many tokens that the source has", _COUNT, "0 means none",
               generate="encoder_no_repeat_ngram_size"),
        capability="controls",
    ),
    *_in("decoding",
        Option("forced_begin", "run", "The answer begins with these tokens, such as 5,7",
               "max_forced_tokens", hint="; send them as target prefix"),
        Option("forced_end", "id", "The last token where an answer is cut at the limit"),
        capability="forced_tokens",
    ),
    *_in("decoding.constraint",
        Option("json_schema", "file", "The answer is JSON that fits this schema"),
        Option("regex", "text", "The answer matches this regular expression"),
        Option("grammar", "file",
               "The answer is a sentence of this grammar, in the Lark of llguidance"),
        Option("choice", "texts", "Texts, one of which is the answer", "max_choices"),
        capability="constraint",
    ),
    *_in("stopping",
        Option("max_new_tokens", "whole", "Most tokens of the answer; 0 only reads the prompt",
               _COUNT, hint="; leave it out for the model's limit", left_out="model's"),
        Option("min_new_tokens", "whole", "No end before so many tokens", _COUNT),
        Option("stop", "texts", "Texts that end the answer", "max_stop_strings",
               field="stop_strings", wire="strings"),
        Option("stop_token_ids", "ids", "Tokens that end the answer", "max_stop_token_ids",
               wire="token_ids", typed="--stop-token"),
        Option("include_stop", "flag", "Keep the text or token that ended the answer"),
        Option("ignore_eos", "flag", "Continue past the end of the sequence; for measurements"),
    ),
    *_in("output",
        Option("logprobs", "whole", "Log-probability of every token, with so many alternatives",
               Range(0, "max_logprobs"), hint=" alternatives; 0 gives the chosen token's",
               capability="logprobs"),
        Option("prompt_logprobs", "whole",
               "The same for the prompt, or for the target prefix of an encoder-decoder",
               Range(0, "max_logprobs"), hint=" alternatives; 0 gives the chosen token's",
               capability="prompt_logprobs"),
        Option("prompt_token_ids", "flag", "Tokens that the prompt was made into",
               wire="prompt_tokens"),
        Option("alignment", "flag", "Attention of every token to the source",
               capability="alignment"),
        Option("skip_special_tokens", "flag",
               "Leave special tokens, such as <|im_end|>, out of texts",
               left_out="skip-special-tokens", typed="--skip-special-tokens/--keep-special-tokens"),
        Option("allow_partial", "flag",
               "Return a partial answer at the deadline, or when the server drains",
               capability="allow_partial"),
    ),
)
# fmt: on
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}
