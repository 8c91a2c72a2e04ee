"""Shards of samples, of any size, and the order in which an epoch visits their samples."""
