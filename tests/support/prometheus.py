"""Read a task's metrics while it trains, as Prometheus would; and Prometheus' tool."""

from __future__ import annotations

import shutil
import subprocess
import urllib.error
import urllib.request

import pytest

from flyte_ddp.observers.metrics import PORT_VARIABLE
from flyte_ddp.observers.reports.publisher import PagePublisher
from tests.support.ports import free_port

needs_prometheus = pytest.mark.skipif(
    not shutil.which("promtool"),
    reason="no promtool on this machine: apt-get install --no-install-recommends prometheus",
)


def promtool(*arguments, stdin=""):
    """Run promtool; AssertionError with everything that it printed if it fails or warns."""
    done = subprocess.run(
        ["promtool", *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def record_figures(patch):
    """Let tasks serve their figures, and return the list to which each new report adds them, or
    "".
    """
    port = free_port()
    figures = []

    def scrape(*_):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                figures.append(answer.read().decode())
        except urllib.error.URLError:
            figures.append("")

    patch.setenv(PORT_VARIABLE, str(port))
    patch.setattr(PagePublisher, "_publish", scrape)
    return figures
