"""The operators that eager models emit: one a file, with its eager form and its bodies."""
