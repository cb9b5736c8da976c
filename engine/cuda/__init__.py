"""All that is for CUDA; the factory passes it to an engine, which knows its seams alone."""
