"""The clients of object stores. `open_filesystem` opens each of them.

Some clients use private names of their library. Only the client's own file mentions such a name,
and each name may be missing. Without it a request waits longer, or an error names its cause less
exactly. Tests show that each name still helps.
"""
