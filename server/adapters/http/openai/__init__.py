"""OpenAI's protocol over HTTP, with what vLLM has beside it."""
