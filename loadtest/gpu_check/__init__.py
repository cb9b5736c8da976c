"""What a machine with a GPU is to show: that answers are right there, then how fast they come.

`python -m loadtest.gpu_check --out DIR`; see loadtest/README.md.
"""
