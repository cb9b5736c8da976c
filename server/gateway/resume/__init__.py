"""Streams that go on at another worker when theirs is lost."""
