"""Compares two forms of a model by what they write or say."""
