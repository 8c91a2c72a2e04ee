"""Code that travels to other processes and machines: the files of a project, and classes without a
module.
"""
