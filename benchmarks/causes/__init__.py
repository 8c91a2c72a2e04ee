"""Faults of 20 kinds in real runs of two and three nodes: what the product says, and the truth."""
