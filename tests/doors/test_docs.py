"""Every block of commands and code in the README, in docs/ and in examples/ is run, so that it
stays true.

A block that cannot run on any machine has a line directly before it with its needs: `<!-- needs:
cluster -->`. Its commands are still compared with the workflows, modules and make targets that
there are. Blocks of one page run in one directory, a copy of the repository, from the first to the
last.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import flyte_ddp
from flyte_ddp.__main__ import COMMANDS
from flyte_ddp.launch.run_options import OWN_OPTIONS
from flyte_ddp.project.admission import Allowed
from flyte_ddp.project.settings import Settings, Size
from flyte_ddp.recipes import Recipe, get_recipe
from tests.support.checkout import copy_repository
from tests.support.image_store import image_tree, write_tree

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    [REPOSITORY / "README.md", *REPOSITORY.glob("docs/**/*.md"), REPOSITORY / "examples/README.md"]
)
TARGETS = (REPOSITORY / "Makefile").read_text()
# The commands of these pages need a cluster: tests/outside/kubernetes/test_guide.py follows them.
GUIDES = sorted(REPOSITORY.glob("deploy/*.md"))
# The commands on this page take hours, and some of them do not exist any more.
FIGURES = REPOSITORY / "benchmarks/README.md"
# packages that not every environment has: tests/doors/test_how_to.py runs their blocks where they
# are
PACKAGES = ("datasets", "onnxscript", "peft")
NEEDS = (
    *("cluster", "gpu", "network", "hours", "registry", "helm", "flyte", "torchtitan"),
    *PACKAGES,
)
# many short blocks of Python: tests/doors/test_how_to.py runs them in one process
SHORT = REPOSITORY / "docs/how-to.md"
BLOCK = re.compile(
    (
        r"^(?:<!-- needs: (?P<needs>\w+) "
        r"-->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$"
    ),
    re.M | re.S,
)

# Replacements that make a documented command cheap enough for every run of the tests.
CHEAPER = (
    (
        r"\bmake (test(?:-all|-gpu|-flyte|-kubernetes)?|lint|audit|bench|format|help)\b",
        (
            r"make "
            r"--dry-run \1"
        ),
    ),
    (r"\bmake (train|train-multi-node)\b", r"""make \1 PROCESSES=1 CONFIG='{"epochs": 1}'"""),
    (r"\b((?!script_wf)\w+_wf)\b", r"""\1 --config '{"epochs": 1}'"""),  # a later --config wins
    (r'"epochs": \d+', '"epochs": 1'),
    (
        r'"parallel": "fsdp", "epochs": 1',
        (
            r'\g<0>, "sample_size": 64, "recipe_options": {"layers": '
            r'1, "width": 32}'
        ),
    ),
    (r'"recipe_options": \{"layers": 2, "context": 64\}', r'"sample_size": 64, \g<0>'),
    (r"(--recipe |RECIPE=)mnist\b", r"\1digits"),
    (r"--data ~/MNIST", ""),
    (r"--num_processes \d+", ""),
    (r"\bsingle_node_training_wf\b", r"\g<0> --num_processes 1"),
    (r"--nproc-per-node \d+", "--nproc-per-node 1"),
    (r"flyte-ddp train ([\w.]+)", r"\g<0> --nproc-per-node 1 --epochs 1"),
    (r"(s3|gs)://bucket/", "DIRECTORY/bucket/"),
    (r"/tmp/", "DIRECTORY/tmp/"),
    (r'"initial_model_state": "torchvision:\w+", ', ""),  # the weights are on torchvision's servers
)


@dataclasses.dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    needs: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    @property
    def file(self) -> str:
        """The name of the file that the block is, from a first line such as `# flowers.py`; else
        "".
        """
        match = re.match(r"# ([\w/.]+\.\w+)\n", self.text)
        return match[1] if match else ""


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, match.start()) + 1,
            match["language"],
            match["needs"] or "",
            match["text"],
        )
        for match in BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
OF_GUIDES = [block for page in GUIDES for block in blocks_of(page)]
SHELL = [block for block in [*BLOCKS, *OF_GUIDES] if block.language == "sh"]
# Blocks by their texts: a block that stands on several pages runs on the first of them.
RUN: dict[str, Block] = {}
for each in BLOCKS:
    is_short = each.page == SHORT and each.language == "python"
    if each.language in ("sh", "python") and not each.needs and not is_short:
        RUN.setdefault(each.text, each)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """directories(page): the copy of the repository in which the blocks of `page` run, with its
    files in it.
    """
    made = {}

    def get(page):
        if page not in made:
            made[page] = tmp_path_factory.mktemp(page.stem)
            copy_repository(made[page])
            write_tree(image_tree(count=16), made[page] / "bucket/flowers")
            for block in blocks_of(page):
                if block.file:
                    (made[page] / block.file).parent.mkdir(parents=True, exist_ok=True)
                    (made[page] / block.file).write_text(block.text)
        return made[page]

    return get


# Other tests show the same; `make test-docs` and the CI run these blocks.
@pytest.mark.slow
@pytest.mark.parametrize("block", [pytest.param(each, id=str(each)) for each in RUN.values()])
def test_a_block_runs_with_cheaper_settings(block, directories):
    directory = directories(block.page)
    text = block.text
    for pattern, replacement in CHEAPER:
        text = re.sub(pattern, replacement, text)
    text = text.replace("DIRECTORY", str(directory))  # last: its own path may begin with /tmp/
    if block.language == "python":
        command = [sys.executable, *([block.file] if block.file else ["-c", text])]
    else:
        command = ["bash", "-euo", "pipefail", "-c", text]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=directory,
        env=kept
        | {
            "PATH": f"{directory}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(directory),
            # a file in recipes/ is no script
            "PYTHONPATH": str(directory) if block.language == "python" else "",
            "WANDB_MODE": "disabled",
            "VERSION": "v1",  # the copy is no git repository
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def test_the_reference_of_recipes_names_all_that_one_may_define():
    page = (REPOSITORY / "docs/recipes.md").read_text()
    table = page.partition("## What a recipe may define")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)", table))
    assert not {name for name in dir(Recipe) if not name.startswith("_")} - named


@pytest.mark.long
def test_the_task_of_ones_own_trains(tmp_path, monkeypatch):
    from flyte_ddp.flyte.inputs import TrainingOverrides

    monkeypatch.setenv("WANDB_MODE", "disabled")
    (block,) = [block for block in BLOCKS if block.file == "workflows/own_task.py"]
    (tmp_path / "own_task.py").write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_task")
    assert 0 < own.own_wf(config=TrainingOverrides(epochs=1)) <= 1
    assert own.best_accuracy.resources.requests.gpu == "1"


def test_every_language_of_a_block_is_known_and_every_need_is_one_of_a_few():
    for block in [block for page in [*PAGES, *GUIDES] for block in blocks_of(page)]:
        assert block.language in (
            "",
            "sh",
            "python",
            "yaml",
            "json",
            "toml",
            "mermaid",
            "diff",
            "dockerfile",
        ), block
        assert block.needs in ("", *NEEDS), block
    for page in [*PAGES, *GUIDES]:
        assert page.read_text().count("<!-- needs:") == sum(
            bool(block.needs) for block in blocks_of(page)
        ), page


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_refer_to_existing_files_and_targets(block):
    text = block.text.replace("\\\n", " ")
    for target in re.findall(r"^make ([a-z-]+)", text, re.M):
        assert re.search(rf"^{target}:", TARGETS, re.M), target
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module), module
    for command in re.findall(r"(?:^|\n *)flyte-ddp ([a-z]+)", text):
        assert command in COMMANDS, command
    for line in re.findall(r"pyflyte run (?!.*remote-launchplan)(.+)", text):
        words = shlex.split(line, comments=True)
        at = next(position for position, word in enumerate(words) if word.endswith(".py"))
        file, workflow = words[at], words[at + 1]
        inputs = _inputs(REPOSITORY / file, workflow)
        for word in words[at + 2 :]:
            assert not word.startswith("--") or word[2:] in inputs, (
                f"{workflow} has no input {word}"
            )


def _inputs(file, workflow):
    (function,) = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == workflow
    ]
    return [argument.arg for argument in function.args.args]


@pytest.mark.parametrize(
    "page", [*PAGES, *GUIDES, FIGURES], ids=lambda page: str(page.relative_to(REPOSITORY))
)
def test_every_link_has_a_target(page):
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
            assert anchor in [
                re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings
            ], anchor


def test_what_users_read_imports_names_from_the_package_itself():
    """One path for each name, in all that they copy. The modules where the names live work too."""
    homes = set(flyte_ddp._HOMES.values()) | {"flyte_ddp.recipes"}
    texts = {str(block): block.text for block in BLOCKS if block.language == "python"}
    for directory in ("examples", "recipes", "workflows", "tasks"):
        for file in (REPOSITORY / directory).rglob("*.py"):
            texts[str(file.relative_to(REPOSITORY))] = file.read_text()
    for notebook in (REPOSITORY / "examples").rglob("*.ipynb"):
        for cell in json.loads(notebook.read_text())["cells"]:
            texts[f"{notebook.name}: {cell['source'][:1]}"] = "".join(cell["source"])
    for place, text in texts.items():
        for module, names in re.findall(r"^ *from (flyte_ddp[\w.]*) import (.+)$", text, re.M):
            named = set(re.findall(r"\w+", names)) & set(flyte_ddp.__all__)
            assert module not in homes or not named, (place, module, names)
    for name in flyte_ddp.__all__:
        assert getattr(flyte_ddp, name) is not None
    from flyte_ddp.recipes import Recipe as same

    assert same is flyte_ddp.Recipe


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_lines_of_a_page_are_short_outside_tables_and_code(page):
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    long = [line for line in text.splitlines() if len(line) > 100]
    # A single piece of code or link is not broken.
    long = [line for line in long if " " in re.sub("`[^`]*`", "", line.strip())]
    assert [line for line in long if not line.startswith(("| ", "#", "!["))] == []


def test_every_option_of_a_run_is_on_its_page():
    text = (REPOSITORY / "docs/your-own-function.md").read_text()
    names = [*(name for name, _, _ in OWN_OPTIONS), "--nnodes"]
    assert [name for name in names if f"`{name}" not in text] == []


def test_every_setting_is_in_the_table_of_its_page():
    text = (REPOSITORY / "docs/settings.md").read_text()
    names = [each.name for kind in (Settings, Size, Allowed) for each in dataclasses.fields(kind)]
    known = re.sub(r"(wandb|mlflow|tensorboard)\.", r"\1_", text)
    known = known.replace("`allowed.", "`")
    assert [name for name in names if f"`{name}`" not in known and name != "allowed"] == []


@pytest.mark.parametrize("recipe", ["image_folder", "text"])
def test_the_table_of_a_recipes_options_has_each_with_its_default(recipe):
    page = (REPOSITORY / "docs/recipes.md").read_text()
    tables = re.findall(r"\| option \| default \| \|\n\|---.*\n((?:\|.*\n)+)", page)
    found = {}
    for line in tables[["image_folder", "text"].index(recipe)].splitlines():
        names, defaults = line.split("|")[1:3]
        names = re.findall(r"`(\w+)`", names)
        values = [each.strip(" `") for each in defaults.split(",")]
        found |= dict(zip(names, values, strict=True))
    made = get_recipe(recipe)
    expected = {
        each.name: {"True": "on", "False": "off"}.get(str(value), f"{value}".removesuffix(".0"))
        for each in dataclasses.fields(made)
        for value in [getattr(made, each.name)]
        if not isinstance(value, Mapping)
    }
    assert found.pop("architecture") == ("resnet18" if recipe == "image_folder" else "")
    expected.pop("architecture", None)
    if recipe == "image_folder":  # 0 chooses by the data: the page has both sizes
        expected["image_size"] = "224"
    assert found == expected


def test_the_limits_of_the_page_about_reliability_have_the_defaults_of_the_code():
    from flyte_ddp.cluster.config import ClusterConfig, KubernetesConfig
    from flyte_ddp.config import TrainingConfig
    from flyte_ddp.project.settings import load_settings

    settings = load_settings(environment={})
    assert (settings.profile, settings.training.timeout_hours) == (
        "production",
        settings.driver.timeout_hours,
    )
    defaults = {
        each.name: each.default
        for kind in (ClusterConfig, KubernetesConfig, TrainingConfig)
        for each in dataclasses.fields(kind)
    }
    defaults["timeout_hours"] = settings.training.timeout_hours
    table = (
        (REPOSITORY / "docs/reliability.md")
        .read_text()
        .partition("\n## Limits\n")[2]
        .partition("\n## ")[0]
    )
    rows = []
    for line in table.splitlines():
        if line.count("|") == 4:
            rows.append([cell.strip() for cell in line.split("|")[1:-1]])
    found = {
        name: default
        # two rows are about timeout_hours, and the first one counts
        for limit, default, _ in reversed(rows)
        for name in re.findall(r"`(?:kubernetes\.)?(\w+)`", limit)
        if name in defaults
    }
    assert len(found) == 11
    for name, text in found.items():
        assert re.search(rf"\b{defaults[name]:g}\b", text), f"{name}: {text}"
    (doubled,) = (default for limit, default, _ in rows if limit == "twice `timeout_hours`")
    assert doubled == f"{2 * defaults['timeout_hours']} h"


def test_the_readmes_recipe_is_the_file_of_the_checkout():
    (code,) = re.findall(
        r"```python\n# recipes/flowers.py\n(.*?)```",
        (REPOSITORY / "README.md").read_text(),
        re.DOTALL,
    )
    file = (REPOSITORY / "recipes/flowers.py").read_text()
    assert file.partition('"""\n\n')[2] == code


def test_the_index_of_the_docs_names_every_page():
    index = (REPOSITORY / "docs/README.md").read_text()
    pages = {page.name for page in REPOSITORY.glob("docs/*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)\)", index))


def test_the_page_about_settings_lists_every_hyperparameter():
    command = [sys.executable, "-m", "flyte_ddp", "fields"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"```\n{printed}```\n" in (REPOSITORY / "docs/settings.md").read_text()
