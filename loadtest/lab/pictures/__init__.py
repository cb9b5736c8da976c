"""Pictures of the pages, from what runs."""
