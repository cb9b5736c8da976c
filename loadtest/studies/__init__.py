"""Studies that are about to leave; the others are in loadtest.lab."""
