"""Complete programs: models of other classes trained, exported and asked; pairs to train on."""
