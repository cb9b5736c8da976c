"""The name by which scripts beside the project load what is in engine.cuda."""
