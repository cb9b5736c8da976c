"""Proves the graphs of a package equal to their eager model, or lets none be written."""
