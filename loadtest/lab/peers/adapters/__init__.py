"""One module an engine, each with `load(LoadOptions) -> Adapter`; see worker.py."""
