"""What callers ask of the engine, and what comes back."""
