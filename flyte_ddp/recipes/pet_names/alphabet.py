"""The characters of a name as the model and its data number them."""

# The tutorial's 31 characters in its order: * is "no letter (yet)", + is the end of a name.
ALPHABET = "*+abcdefghijklmnopqrstuvwxyz-. "
BLANK, END = ALPHABET.index("*"), ALPHABET.index("+")
