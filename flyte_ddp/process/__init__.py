"""Threads, streams, devices and memory of one process. No module here knows about training."""
