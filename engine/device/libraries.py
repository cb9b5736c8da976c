"""Loads the libraries of CUDA for scripts beside the project; see engine.cuda.libraries."""

from engine.cuda.libraries import load_cuda_libraries

__all__ = ["load_cuda_libraries"]
