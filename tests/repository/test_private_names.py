"""Private names of other libraries have one place per library, where each name may be missing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCUMENTED = {"_asdict", "_replace", "_fields", "_exit", "_getframe", "_current_frames"}
DOCUMENTED |= {"_metadata"}  # a state dict has it
# Names by file. Each file is the one place of a library, or of a part of it.
NAMES = {
    # Python
    "process/interpreter.py": {"_config", "_forkserver", "_initializing", "_register_atexit"},
    # torch
    "rank/fast_start.py": {
        "_set_ddp_runtime_logging_sample_rate",
        "_check_reducer_finalized",
        "_get_ddp_logging_data",
        "_get_backend",
        "_get_default_store",
        "_timeout",
        "_dump_snapshot",
        "_get_root_mesh",
        "_orig_mod",
    },
    "rank/collectives.py": {"_world", "_dump_fr_trace"},  # flight recorder; imports no torch
    "checkpoints/state.py": {"_utils"},  # split tensors
    "training/batch_norm.py": {"_BatchNorm"},
    "rehearsal/watch.py": {"_non_persistent_buffers_set"},
    # torchmetrics
    "training/metrics.py": {"_defaults", "_reductions"},
    # transformers
    "integrations/transformers.py": {"_load_from_checkpoint"},
    "recipes/text/recipe.py": {"_no_split_modules"},
    # flytekit
    "flyte/deck.py": {"_output_deck", "_write_decks"},
    "flyte/rank_call.py": {"_output_to_literal_map"},
    "flyte/distributed.py": {"_checkpoint_dest", "_checkpoint_src"},
    "flyte2/distributed.py": {"_context"},
    # clients of stores
    "storage/filesystem.py": {"_strip_protocol", "_cache"},  # fsspec
    "storage/clients/s3.py": {"_call_s3"},
    "storage/clients/google.py": {"_request"},
    "storage/clients/azure.py": {"_config", "_pipeline", "_transport"},
}


def of_self(node):
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_names(tree):
    """Yield the private attributes that code reads or sets on other objects than its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr) and not of_self(node):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = getattr(node.args[1], "value", None)
            if re.match("_[^_]", str(name)):
                yield name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            path = [getattr(node, "module", None) or "", *(each.name for each in node.names)]
            if not path[0].startswith("flyte_ddp"):
                yield from (each for each in ".".join(path).split(".") if re.match("_[^_]", each))


def own_names(tree):
    """Yield the private names that code itself gives."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            yield node.attr


@pytest.mark.long
def test_private_names_of_libraries_are_in_their_places():
    package = REPOSITORY / "flyte_ddp"
    trees = {
        path.relative_to(package).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    }
    own = {name for tree in trees.values() for name in own_names(tree)} - set().union(
        *NAMES.values()
    )
    found = {}
    for file, tree in trees.items():
        names = set(private_names(tree)) - own - DOCUMENTED
        if names:
            found[file] = names
    assert found == NAMES


def private_functions(tree):
    """Yield the private functions and classes of this package that a test imports or calls."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flyte_ddp"):
            modules |= {each.asname or each.name for each in node.names}
            yield from (each.name for each in node.names if re.match("_[^_]", each.name))
    for node in ast.walk(tree):
        called = isinstance(node, ast.Call) and node.func
        if isinstance(called, ast.Attribute) and re.match("_[^_]", called.attr):
            owner = called.value
            if isinstance(owner, ast.Name) and owner.id in modules and owner.id.islower():
                yield called.attr


@pytest.mark.long
def test_tests_use_no_private_function_of_a_module():
    found = {}
    for folder in ("tests", "benchmarks"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            names = set(private_functions(ast.parse(path.read_text(encoding="utf-8"))))
            if names:
                found[path.name] = names
    assert found == {}
