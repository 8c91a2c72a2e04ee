"""The scripts of `examples/scripts/`: started by this package and by torchrun, each ends in the
same loss.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "examples/scripts"
SHORT = {
    "ddp.py": ["--epochs", "2"],
    "fsdp2.py": ["--steps", "12"],
    "adversarial.py": [],
    "lightning_digits.py": ["--epochs", "2"],
    "accelerate_digits.py": ["--epochs", "2"],
    "hugging_face_digits.py": ["--steps", "10"],
    "lightning_session.py": ["--epochs", "2"],
    "accelerate_session.py": ["--epochs", "2"],
    "hugging_face_session.py": ["--steps", "10"],
    "lora.py": ["15"],
}
PACKAGES = {  # packages of the extra `bench` that single scripts need
    "lightning_digits.py": "lightning",
    "accelerate_digits.py": "accelerate",
    "hugging_face_digits.py": "transformers",
}


def last_loss(module, script, directory, num_ranks=2, options=None):
    num_tries = 1
    if module == ["flyte_ddp", "run"]:
        module = [*module, "--checkpoints", f"{directory}-checkpoints"]
    else:
        # A thread of gloo may abort a rank that has ended well. Ranks that torchrun itself starts
        # again sometimes wait for each other for ever.
        num_tries = 4
    command = [sys.executable, "-m", *module, "--nproc-per-node", str(num_ranks), SCRIPTS / script]
    for _ in range(num_tries):
        done = subprocess.run(
            [*command, *(options or SHORT[script])],
            cwd=directory,
            env={
                **os.environ,
                "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            },
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"^(?:\[rank 0\] )?(?:epoch|step) \d+: loss ([\d.]+)$", done.stdout, re.M)
    assert losses, done.stdout + done.stderr
    return float(losses[-1])


@pytest.mark.slow  # `make test-docs` runs them, and the CI
@pytest.mark.parametrize(
    "script", [script for script in SHORT if not script.endswith(("_session.py", "lora.py"))]
)
def test_a_script_ends_in_the_same_loss_as_under_torchrun(script, tmp_path):
    """One that uses a framework has two lines more here, which need the session, than under
    torchrun.
    """
    if script in PACKAGES:
        pytest.importorskip(PACKAGES[script])
    ours = last_loss(["flyte_ddp", "run"], script.replace("_digits", "_session"), tmp_path)
    theirs = last_loss(["torch.distributed.run"], script, tmp_path)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert list(tmp_path.iterdir()) == []  # no script leaves anything in the working directory


@pytest.mark.slow
def test_a_fine_tuning_with_lora_resumes_exactly_at_another_size(tmp_path):
    """Against one run under torchrun, because each process takes ten seconds to import peft."""
    pytest.importorskip("peft")
    whole = last_loss(["torch.distributed.run"], "lora.py", tmp_path)
    last_loss(["flyte_ddp", "run"], "lora.py", tmp_path, 2, ["5"])
    parts = last_loss(["flyte_ddp", "run"], "lora.py", tmp_path, 1)
    assert parts == pytest.approx(whole, rel=1e-4)


def test_every_script_is_tested_and_says_how_it_is_started():
    scripts = {path.name: path.read_text() for path in SCRIPTS.glob("*.py")}
    del scripts["s3_images.py"]  # a module for scripts
    assert scripts.keys() == SHORT.keys()
    for name, text in scripts.items():
        for command in ("flyte-ddp run", "torchrun"):
            assert re.search(
                rf"^ *{command} --nproc-per-node 2 examples/scripts/{name}", text, re.M
            )
        assert len(text.splitlines()) <= 85


@pytest.mark.parametrize("framework", ["lightning", "accelerate", "hugging_face"])
def test_a_script_of_a_framework_needs_two_lines(framework):
    plain, ours = (code_of(SCRIPTS / f"{framework}_{kind}.py") for kind in ("digits", "session"))
    changes = [line for line in difflib.ndiff(plain, ours) if line[0] in "+-"]
    added = [line for line in changes if line[0] == "+"]
    removed = [line for line in changes if line[0] == "-"]
    assert len(added) == 2, changes
    assert not removed or (framework, len(removed)) == ("accelerate", 1)


def code_of(file):
    """The lines behind the docstring, without empty ones."""
    return [line for line in file.read_text().split('"""')[-1].splitlines() if line]
