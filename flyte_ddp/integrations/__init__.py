"""One line for each of the training loops of others. Each file imports its framework, so that only
its users do.
"""
