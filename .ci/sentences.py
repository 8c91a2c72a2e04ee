"""Check that comments stand alone and that no comprehension contains another one. Prints ratios.

    python .ci/sentences.py flyte_ddp tasks workflows

The exit status is 1 if a comment begins as a fragment of the code beside it.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

# Words with which a comment begins that needs the code on its left.
FRAGMENT = re.compile(
    r"#\s*(as|both|by|for|in|it|its|likewise|of|so|that|those|what|which|who|whose|with)\b", re.I
)
COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)


def find_fragments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each comment at the end of a line that begins as a fragment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_behind_code = token.line[: token.start[1]].strip() != ""
        if token.type == tokenize.COMMENT and is_behind_code and FRAGMENT.match(token.string):
            yield token.start[0], token.string


def find_nested(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and a note for each comprehension that contains another one."""
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            inner = [each for each in ast.walk(node) if each is not node]
            if any(isinstance(each, COMPREHENSIONS) for each in inner):
                yield node.lineno, "a comprehension within a comprehension"


def main(places: list[str]) -> int:
    """Check the Python files below `places`, and return the exit status."""
    counts = dict.fromkeys(("statements", "ternaries", "walruses"), 0)
    problems = []
    for file in sorted(file for place in places for file in Path(place).rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        for line, problem in [*find_fragments(source), *find_nested(tree)]:
            problems.append(f"{file}:{line}: {problem}")
        for node in ast.walk(tree):
            counts["statements"] += isinstance(node, ast.stmt)
            counts["ternaries"] += isinstance(node, ast.IfExp)
            counts["walruses"] += isinstance(node, ast.NamedExpr)
    for name in ("ternaries", "walruses"):
        ratio = 1000 * counts[name] / max(1, counts["statements"])
        sys.stdout.write(f"{name} per 1,000 statements: {ratio:.1f}\n")
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
