"""The tutorial's names of pets. Model and data use the same numbers for the characters."""

# The tutorial's 31 characters in its order: * is "no letter (yet)", + is the end of a name.
ALPHABET = "*+abcdefghijklmnopqrstuvwxyz-. "
BLANK, END = ALPHABET.index("*"), ALPHABET.index("+")
