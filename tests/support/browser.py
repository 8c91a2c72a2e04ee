"""Headless Chromium for tests: one look at a page, with the values of expressions in it."""

import html
import json
import re
import shutil
import subprocess
import tempfile
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
    "--allow-file-access-from-files",
    "--enable-logging=stderr",
    "--virtual-time-budget=60000",
    "--dump-dom",
)
REQUESTS = "performance.getEntriesByType('resource').map(each => each.name)"
# The page in a frame, because no window of Chromium's is as narrow as a phone.
LOOK = """<iframe src="%s" width="%d" height="900"></iframe><pre></pre><script>
const frame = document.querySelector("iframe");
frame.onload = async () => {
  const values = [];
  for (const each of %s) values.push(await frame.contentWindow.eval(each));
  document.querySelector("pre").textContent = JSON.stringify(values);
};
</script>"""


def look(file: Path, *expressions: str, width: int = 1280, dark: bool = False) -> list[Any]:
    """Return the values of JavaScript expressions in a page; a promise is waited for.

    AssertionError for messages on its console, and for requests.
    """
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as profile:
        page = Path(profile, "look.html")
        page.write_text(LOOK % (file.as_uri(), width, json.dumps([REQUESTS, *expressions])))
        scheme = f"--blink-settings=preferredColorScheme={int(not dark)}"
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}/profile", scheme, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    (found,) = re.findall(r"<pre>(.*)</pre>", done.stdout, re.DOTALL)
    requests, *values = json.loads(html.unescape(found))
    assert all(each.startswith("data:") for each in requests), requests
    return values
