"""How many tokens there are, and how many a model takes."""

from __future__ import annotations

from typing import Annotated

from exporter.models.config.sizes import WITH_DECODER, Length, SizeOptions, VocabSize, unless


class VocabularyOptions(SizeOptions):
    """Sizes of what goes in and comes out."""

    vocab_size: VocabSize = 0  # 0: vit
    # What the encoder before a decoder reads; None: vocab_size
    source_vocab_size: Annotated[VocabSize | None, unless(None)] = None
    max_source_len: Length = 0  # encoder positions
    max_target_len: Length = 0  # decoder positions

    @property
    def vocabulary_problems(self) -> list[str]:
        """Say which size the family lacks."""
        needs = {
            "vocab_size": self.family != "vit",
            "max_source_len": self.family not in ("gpt", "vit"),
            "max_target_len": self.family in WITH_DECODER,
        }
        lacking = [
            name for name, is_needed in needs.items() if is_needed and not getattr(self, name)
        ]
        found = [f"{self.family} needs {name}" for name in lacking]
        if self.source_vocab_size is not None and self.family != "encoder-decoder":
            found.append(f"source_vocab_size is for encoder-decoder, got {self.family}")
        return found
