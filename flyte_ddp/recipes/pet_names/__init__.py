"""The tutorial's names of pets. Model and data number the characters of a name as here."""

# The tutorial's 31 characters in its order: * is "no letter (yet)", + is the end of a name.
ALPHABET = "*+abcdefghijklmnopqrstuvwxyz-. "
BLANK, END = ALPHABET.index("*"), ALPHABET.index("+")
