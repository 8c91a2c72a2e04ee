"""The clients of object stores. `open_filesystem` opens each of them.

A private name of another library stands in the file of this library alone, and each can be missing.
Without it a request waits longer, or an error names its cause less exactly. Tests show that each
name still helps.
"""
