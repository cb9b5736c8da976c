"""Text: tokenizers, stop strings, constraints."""
