"""Version 1 of the protocol, generated from proto/tokenweir/v1 by proto/generate.sh."""
