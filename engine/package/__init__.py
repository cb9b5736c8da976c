"""Exported packages on disk: what they say of themselves, and the checks before they are loaded."""
