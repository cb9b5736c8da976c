"""The check of a machine with a GPU: right answers first, then their speed; see README.md."""
