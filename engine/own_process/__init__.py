"""The steps of a generating engine in a process of their own."""
