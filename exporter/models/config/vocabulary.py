"""How many tokens there are, and how many a model takes."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.models.config.checked import Checks
from exporter.models.config.sizes import WITH_DECODER, Length, SizeOptions, VocabSize, Width


class VocabularyOptions(SizeOptions):
    """Sizes of what goes in and comes out."""

    vocab_size: VocabSize = 0  # 0: vit
    # The vocabulary of the encoder before a decoder; None: vocab_size
    source_vocab_size: VocabSize | None = None
    # Width of the tokens' vectors where a product makes them as wide as the model, and one makes
    # what the output reads as narrow: gpt; None: d_model
    token_dim: Width | None = None
    max_source_len: Length = 0  # encoder positions
    max_target_len: Length = 0  # decoder positions
    # bert: longer texts are cut to so many tokens; None: texts that are longer than max_source_len
    # are refused
    cut_at: Length | None = None
    cuts_left: bool = False  # a text that is cut keeps its end

    @property
    def vocabulary_checks(self) -> Checks:
        """Which sizes a family needs."""
        return self._check_needed, self._check_source, self._check_token_dim, self._check_cut

    def _check_needed(self) -> Iterator[str]:
        needs = {
            "vocab_size": self.family != "vit",
            "max_source_len": self.family not in ("gpt", "vit"),
            "max_target_len": self.family in WITH_DECODER,
        }
        for name, is_needed in needs.items():
            if is_needed and not getattr(self, name):
                yield f"{self.family} needs {name}"

    def _check_source(self) -> Iterator[str]:
        if self.source_vocab_size is not None and self.family != "encoder-decoder":
            yield f"source_vocab_size is for encoder-decoder, got {self.family}"

    def _check_token_dim(self) -> Iterator[str]:
        if self.token_dim is not None and self.family != "gpt":
            yield f"token_dim is for gpt, got {self.family}"

    def _check_cut(self) -> Iterator[str]:
        if self.cut_at is None:
            if self.cuts_left:
                yield "cuts_left needs cut_at"
            return
        if self.family != "bert":
            yield f"cut_at is for bert, got {self.family}"
        elif not 0 < self.cut_at <= self.max_source_len:
            yield f"cut_at ({self.cut_at}) must be 1 to max_source_len ({self.max_source_len})"
