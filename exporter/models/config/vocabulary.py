"""How many tokens there are, and how many a model takes."""

from __future__ import annotations

from exporter.models.config.sizes import WITH_DECODER, Length, SizeOptions, VocabSize


class VocabularyOptions(SizeOptions):
    """Sizes of what goes in and comes out."""

    vocab_size: VocabSize = 0  # 0: vit
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
        return [f"{self.family} needs {name}" for name in lacking]
