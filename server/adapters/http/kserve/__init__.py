"""The Open Inference Protocol (KServe v2) over HTTP."""
