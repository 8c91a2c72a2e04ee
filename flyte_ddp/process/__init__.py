"""What belongs to one process of a machine and knows no training: its threads, streams, devices and
memory.
"""
