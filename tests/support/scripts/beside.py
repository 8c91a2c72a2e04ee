"""A module beside a script."""

NAME = "beside"
