"""A real browser for tests: headless Chromium, controlled over a pipe by the DevTools protocol.

Neither a driver nor a port is needed, and the protocol reports every console message and every
failed request.
"""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    # its own sandbox does not work as root in a container; the pages are the tests' own
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # 64 MB in many containers
    "--no-first-run",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TIMEOUT = 60.0  # seconds for any one answer


class Browser:
    """One Chromium with one page. `profile` is an empty directory. A context manager: it ends with
    the block.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_browser, ours_out = os.pipe()
        ours_in, from_browser = os.pipe()
        # Chromium reads commands from descriptor 3 and writes to 4. Only bash knows descriptors of
        # two digits.
        redirect = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                redirect,
                "bash",
                CHROMIUM,
                *FLAGS,
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._in, self._out = ours_in, ours_out
        self._received = b""
        self._last_id = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._session = ""
        self.call("Browser.close")
        self._process.wait(TIMEOUT)
        os.close(self._in)
        os.close(self._out)

    def open(
        self, file: Path, width: int = 1280, height: int = 900, dark: bool = False
    ) -> list[str]:
        """Show `file` in a window of that size, and return all that went wrong: console errors,
        failed requests.
        """
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if width < 600 else 1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self._wait_for("Page.loadEventFired")
        self.events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        self._wait_for("Page.loadEventFired")
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))")
        return [problem for event in self.events if (problem := _problem(event))]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._last_id:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def _wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self._received:
            readable, _, _ = select.select(
                [self._in], [], [], max(0.0, deadline - time.monotonic())
            )
            chunk = os.read(self._in, 1 << 20) if readable else b""
            assert chunk, (
                f"Chromium gave no answer within {TIMEOUT:.0f} s (exit status "
                f"{self._process.poll()})"
            )
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))


def _problem(event: dict[str, Any]) -> str:
    """Describe the problem that `event` reports; "" if it reports none."""
    parameters = event.get("params", {})
    match event.get("method"):
        case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
            return f"console: {[argument.get('value') for argument in parameters['args']]}"
        case "Runtime.exceptionThrown":
            return f"exception: {parameters['exceptionDetails']}"
        case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
            return f"log: {parameters['entry']['text']}"
        case "Network.loadingFailed":
            return f"request: {parameters['errorText']}"
        case "Network.requestWillBeSent" if not parameters["request"]["url"].startswith(
            ("file:", "data:")
        ):
            return f"request for {parameters['request']['url']}"
    return ""
