"""An HTTP server of OpenAI's protocol in front of a server of ours: a client of it, no more."""
