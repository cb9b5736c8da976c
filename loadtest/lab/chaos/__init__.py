"""Does harm to the processes of a server that is under load, and looks at every answer."""
