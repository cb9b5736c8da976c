"""The Open Inference Protocol, generated from proto/tokenweir/open_inference by proto/generate.sh."""
