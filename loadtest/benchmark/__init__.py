"""The engine alone on work of fixed shape: tokens a second, parts of a step, memory."""
