"""What the engine alone takes on work of fixed shape: tokens a second, parts of a step, memory."""
