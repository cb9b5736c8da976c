"""Takes the weights of a model out of the files of an original."""
