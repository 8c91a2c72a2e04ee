"""Faults made on purpose in runs of a user's own training, and the verdict on them."""
