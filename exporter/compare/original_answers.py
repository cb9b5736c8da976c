"""Compares what an imported model writes with what `generate` of its original writes.

Ours is decoded by the engine's own scheduler and sampler, from logits of the eager model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from engine.config import EngineConfig
from engine.errors import CertificateError, CheckpointError
from engine.factory import core_on_slots
from engine.package.manifest import GenerationContract
from engine.requests.defaults import sampling_params
from engine.sampling.top_k import step_logits
from engine.scheduling.output import HypothesisOutput, TokensOutput
from engine.scheduling.sequence import TokenRequest
from engine.slots.batch import PrefillChunk, RowLengths, RowOp, ScheduledBatch
from engine.slots.step_block import Pending
from exporter.checkpoint import CheckpointConfig
from exporter.compare.original_texts import around
from exporter.compare.quality import until_end
from exporter.compare.sides import EagerWriter
from exporter.graphs.contracts import generation_contract
from exporter.huggingface.generation import NEUTRAL
from exporter.prover.arithmetic import float64, reordered
from exporter.prover.eager import NUM_ORDERS, Floats
from exporter.prover.generation_cases import Case
from exporter.samples import SEED, Tokens, TokenSampler

NUM_PROMPTS, NUM_TOKENS = 8, 16
_LENGTH = 8  # tokens of a prompt
_FEWEST = 4  # prompts that are to count
_NUM_BEAMS = 2  # unless the model's default is more
_CHUNK = 128  # tokens, more than any prompt has


class Answers(NamedTuple):
    """The answers of an original to prompts, or sources."""

    prompts: Sequence[Tokens]
    by_width: Mapping[int, Sequence[Tokens]]  # by number of beams; 1: greedy


class Search(NamedTuple):
    """How a model is asked to write."""

    described: CheckpointConfig
    contract: GenerationContract
    asked: Mapping[str, int]  # options of `generate` that a person's languages ask for

    @classmethod
    def of(cls, described: CheckpointConfig, asked: Mapping[str, int] = {}) -> Search | None:
        """Return it; None: it writes nothing, has no room to, or is not for prompts so short."""
        contract = generation_contract(described.model)
        scaling = described.model.positions.rotary_scaling
        if scaling and scaling.least_len > 1:
            return None
        found = contract and cls(described, contract, asked)
        return found if found and found.num_tokens > 0 else None

    @property
    def length(self) -> int:
        """Tokens of a prompt or source."""
        if self.contract.cross_cache:
            return min(_LENGTH, self.contract.cross_cache.max_len)
        return max(1, min(_LENGTH, self.contract.cache.max_len - NUM_TOKENS))

    @property
    def num_tokens(self) -> int:
        """Tokens to be written."""
        given = 1 if self.contract.cross_cache else self.length
        return min(NUM_TOKENS, self.contract.cache.max_len - given)

    def theirs(self, original: Any) -> Answers:
        """Return what the original writes, greedily and by its own number of beams."""
        sampler = TokenSampler(np.random.default_rng(SEED), self.contract.prompt_vocab_size)
        prompts = [sampler.sample(self.length) for _ in range(NUM_PROMPTS)]
        widths = (1, max(original.generation_config.num_beams or 1, _NUM_BEAMS))
        return Answers(prompts, {n: self._generated(original, prompts, n) for n in widths})

    def compare(self, model: nn.Module, theirs: Answers, original: Callable[[], Any]) -> list[str]:
        """Return in words what was compared.

        A prompt behind which ours writes other tokens is given to the original alone, for among
        others its beams may end later. It does not count if the original itself writes other tokens
        in float64, or with other orders of sums. Raises CertificateError where it does not, and
        CheckpointError if too few prompts count.
        """
        words, uncounted = [], self.described.model.uncounted_token_id
        for width, answers in theirs.by_width.items():
            how, count = f"by {width} beams" if width > 1 else "greedy", 0
            ours = self._ours(model, theirs.prompts, answers, width)
            for prompt, tokens, answer in zip(theirs.prompts, ours, answers, strict=True):
                if tokens == answer:
                    count += 1
                elif uncounted not in answer:  # to transformers it is padding, and has no place
                    alone = self._alone(original(), prompt, width)
                    count += tokens == alone[0]
                    if tokens not in alone and len({*alone}) == 1:
                        raise CertificateError(
                            f"behind {list(prompt)} it writes other tokens than `generate`, {how}: "
                            f"{around(tokens, alone[0])}"
                        )
            if count < _FEWEST:
                raise CheckpointError(
                    f"{count} of {NUM_PROMPTS} prompts can be compared with `generate`, {how}, and "
                    f"{_FEWEST} are needed: behind the others several tokens are equally likely, "
                    "or the answer has padding; look for weights that are all zero or all equal, "
                    "or import with --no-comparison"
                )
            words.append(f"{count} of {NUM_PROMPTS} prompts {how}")
        return words

    def _alone(self, original: Any, prompt: Tokens, width: int) -> list[Tokens]:
        """Return what the original writes in float32, in float64, and with other orders of sums."""
        ways: list[AbstractContextManager[None]] = [nullcontext(), float64()]
        found = []
        for way in (*ways, *map(reordered, range(1, 1 + NUM_ORDERS))):
            with way:
                found += self._generated(original, [prompt], width)
        return found

    def _generated(self, original: Any, prompts: Sequence[Tokens], width: int) -> list[Tokens]:
        """Return what the original writes, with its own options but those that imports leave."""
        options = copy.deepcopy(original.generation_config)
        options.update(**NEUTRAL, do_sample=False, max_new_tokens=self.num_tokens)
        options.update(prompt_lookup_num_tokens=None, low_memory=None)  # other ways to the same
        options.update(num_beams=width, return_dict_in_generate=False, **self.asked)
        if not self.contract.cross_cache:
            options.update(forced_bos_token_id=None, min_length=0)
        if options.eos_token_id in (None, []):  # imports take that of config.json
            options.eos_token_id = list(self.contract.eos_token_ids) or None
        original = copy.copy(original)  # `generate` takes the model's own options for None
        original.generation_config = options
        ids = torch.tensor(prompts)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            found = original.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=options
            )
        first = 1 if self.contract.cross_cache else ids.shape[1]
        ends = self.contract.eos_token_ids
        return [until_end(tuple(row[first:].tolist()), ends) for row in found]

    def _ours(
        self, model: nn.Module, prompts: Sequence[Tokens], guess: Sequence[Tokens], width: int
    ) -> list[Tokens]:
        """Return what the engine writes with the eager model."""
        defaults = self.described.generation
        asked: dict[str, Any] = {"strategy": "greedy", "max_new_tokens": self.num_tokens}
        if width > 1:
            asked["strategy"] = "beam"
            asked |= {} if defaults.beam else {"beam_width": width}
        params = sampling_params(asked, defaults)
        rows = len(prompts) * params.num_sequences
        config = EngineConfig(
            max_num_seqs=rows, max_num_batched_tokens=rows + _CHUNK, reuse_prefixes=False
        )
        runner = _EagerRunner(model, self.contract, rows)
        runner.guess(prompts, guess)
        core = core_on_slots(config, self.contract, runner)
        for key, prompt in enumerate(prompts):
            core.scheduler.add(TokenRequest(key, "", prompt, params, 0, 0.0))
        found: dict[int, Tokens] = dict.fromkeys(range(len(prompts)), ())
        while core.has_requests:
            for output in core.step():
                if isinstance(output, TokensOutput):
                    found[output.key] += tuple(output.token_ids)
                elif isinstance(output, HypothesisOutput) and output.index == 0:
                    found[output.key] = output.hypothesis.token_ids
        return list(found.values())


class _EagerRunner:
    """A ModelRunner whose rows hold tokens, for a model that computes them anew in every step."""

    num_padding = 0
    is_on_device = False

    def __init__(self, model: nn.Module, contract: GenerationContract, num_rows: int) -> None:
        self._writer, self._contract, self._num_rows = EagerWriter(model), contract, num_rows
        self._known: dict[tuple[Tokens, Tokens], Floats] = {}  # logits behind a source and tokens
        self.reset()

    def reset(self) -> None:
        """See ModelRunner."""
        self._rows: list[Tokens] = [()] * self._num_rows
        self._sources: list[Tokens] = [()] * self._num_rows

    @property
    def row_lengths(self) -> RowLengths:
        """See ModelRunner."""
        return RowLengths(tuple(map(len, self._rows)), tuple(map(len, self._sources)))

    def guess(self, prompts: Sequence[Tokens], answers: Sequence[Tokens]) -> None:
        """Compute what is needed to write these answers in one pass, not in one a token."""
        start, cases = self._contract.decoder_start_token_id, []
        for prompt, tokens in zip(prompts, answers, strict=True):
            source, given = ((), prompt) if start is None else (prompt, (start,))
            read = (*given, *tokens[:-1])
            cases.append(Case(source, read, 1, num_prompt_logits=len(tokens)))
        self._compute(cases)

    def start(self, batch: ScheduledBatch, *of_a_device: object) -> Pending:
        """See ModelRunner."""
        for op in batch.row_ops:
            self._change(op)
        for encode in batch.encodes:
            self._sources[encode.row] = encode.source_ids
        sources = batch.decode_sources or (0,) * len(batch.decode_ids)
        decoding = enumerate(zip(batch.decode_ids, sources, strict=True))
        asked = [PrefillChunk(row, (token,), 1, source) for row, (token, source) in decoding]
        cases = []
        for row, tokens, num_logits, source in (*asked, *batch.chunks):
            self._rows[row] += tokens
            if num_logits:
                case = Case(self._sources[source], self._rows[row], 1, num_prompt_logits=num_logits)
                cases.append(case)
        self._compute(cases)
        keys = [key for case in cases for key in _keys(case)]
        rows = [self._known[key] for key in keys]
        logits = np.stack(rows) if rows else np.zeros((0, self._contract.vocab_size), np.float32)
        found = step_logits(logits, batch.num_top)
        return lambda: found

    def _compute(self, cases: Sequence[Case]) -> None:
        new = [case for case in cases if any(key not in self._known for key in _keys(case))]
        if new:
            for case, found in zip(new, self._writer.follow(new, [(0,)] * len(new)), strict=True):
                self._known |= zip(_keys(case), found, strict=True)

    def _change(self, op: RowOp) -> None:
        """Change a row; of sources none is copied where nothing is reused."""
        rows = self._sources if op.kind.endswith("_source") else self._rows
        origin, target = rows[op.origin], rows[op.target]
        match op.kind.removesuffix("_source"):
            case "cut" | "clear":
                rows[op.target] = target[: op.start]
            case "swap":
                rows[op.origin], rows[op.target] = target, origin
            case "copy":
                rows[op.target] = origin[: op.stop]
            case "move":
                rows[op.origin], rows[op.target] = (), origin


def _keys(case: Case) -> list[tuple[Tokens, Tokens]]:
    """Return source and tokens up to each position whose logits are wanted."""
    ends = range(case.first_logit + 1, len(case.prompt) + 1)
    return [(case.source, case.prompt[:end]) for end in ends]
