"""A cache of one row for each sequence, and the runner of the graphs on it."""
