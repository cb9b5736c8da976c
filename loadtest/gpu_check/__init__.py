"""The check of a machine with a GPU: that answers are right there, then how fast they come.

`python -m loadtest.gpu_check --out DIR`; see loadtest/README.md.
"""
