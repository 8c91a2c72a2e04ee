"""The session for other training loops, one line of code for each. Each file imports its framework,
so that only users of the framework need it.
"""
