"""One module a server, each with `launch(LoadOptions, port) -> Launch`; see server_process.py."""
