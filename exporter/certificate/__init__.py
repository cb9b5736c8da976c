"""Shows that a package gives what its eager model gives."""
