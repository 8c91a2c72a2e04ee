"""Headless Chromium for tests: looks at pages, each with the values of expressions in it. It starts
once, because a start takes longer than a look.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
FLAGS = (
    "--headless",
    # Chrome's own sandbox does not work as root in a container; the pages are the tests' own.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # 64 MB in many containers
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",  # Phones show no scrollbars either.
    "--remote-debugging-pipe",
)
REQUESTS = "performance.getEntriesByType('resource').map(each => each.name)"
MESSAGES = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


class Browser:
    """A running Chromium, to which commands of its debugging protocol are sent. Each command and
    each answer is JSON that ends in a NUL.
    """

    def __init__(self, commands: int, answers: int):
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._unread = b""
        self._last_id = 0
        self._events: list[dict[str, Any]] = []

    def look(
        self, file: Path, *expressions: str, width: int = 1280, dark: bool = False
    ) -> list[Any]:
        """Return the values of JavaScript expressions in a page; a promise is waited for.

        AssertionError for messages on its console, and for requests.
        """
        self._events.clear()
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        page = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._send(f"{domain}.enable", page)
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._send("Emulation.setDeviceMetricsOverride", page, **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", page, features=[scheme])
        self._send("Page.navigate", page, url=file.as_uri())
        while not self._messages("Page.loadEventFired"):
            self._events.append(self._receive())
        requests, *values = [self._evaluate(page, each) for each in (REQUESTS, *expressions)]
        self._send("Target.closeTarget", targetId=target)
        assert not self._messages(*MESSAGES)
        assert all(each.startswith("data:") for each in requests), requests
        return values

    def _evaluate(self, page: str, expression: str) -> Any:
        options = {"awaitPromise": True, "returnByValue": True}
        answer = self._send("Runtime.evaluate", page, expression=expression, **options)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _messages(self, *methods: str) -> list[dict[str, Any]]:
        return [each for each in self._events if each["method"] in methods]

    def _send(self, method: str, page: str = "", **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result. Events that come before it are kept."""
        self._last_id += 1
        command = {"id": self._last_id, "method": method, "params": parameters}
        if page:
            command["sessionId"] = page
        self._commands.write(json.dumps(command).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._last_id:
            self._events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = self._answers.read(65536)
            assert more, "Chromium has ended"
            self._unread += more
        message, self._unread = self._unread.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """A Chromium that ends with the block."""
    assert CHROMIUM is not None
    (reader, commands), (answers, writer) = os.pipe(), os.pipe()
    # Chromium reads commands from descriptor 3 and writes answers to 4, which the pipes may have.
    given = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (reader, writer)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        redirect = f'exec "$@" 3<&{given[0]} 4>&{given[1]}'
        process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={profile}/data"],
            pass_fds=given,
            stderr=subprocess.DEVNULL,
        )
        for each in (reader, writer, *given):
            os.close(each)
        try:
            yield Browser(commands, answers)
        finally:
            process.kill()
            process.wait()
