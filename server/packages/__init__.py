"""Packages, wherever they are: found, fetched once a node, and known by their manifests."""
