"""The commands `tokenweir loadtest` and `tokenweir bench`, which the command line finds here."""
