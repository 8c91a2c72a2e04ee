"""Download one file over HTTP: checked, from several mirrors, and resumed after a broken connection.

Written here because pooch, the usual library for this, starts a broken download again from the beginning.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from flyte_ddp.errors import DataError

NUM_TRIES = 4  # per mirror
TIMEOUT = 30.0  # seconds without a byte


def download(urls: Sequence[str], file: Path, md5: str) -> None:
    """Download one of `urls` to `file`, complete and with the given MD5 sum.

    Received bytes are kept beside `file` as `.part`. The next try, also of a later process, requests only the rest. A
    complete part with another sum is deleted.

    Raises:
        DataError: no mirror returned the file; the message has the reason of every mirror.
    """
    if file.exists() and _md5(file) == md5:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    reasons = []
    for url in urls:
        for attempt in range(NUM_TRIES):
            try:
                _continue(url, part)
                if _md5(part) == md5:
                    os.replace(part, file)
                    return
                part.unlink()
                reason = "its contents have another MD5 sum than published"
            # URLError and timeouts are OSErrors.
            except (OSError, EOFError, http.client.HTTPException) as error:
                reason = str(error)
                if isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500 and error.code != 429:
                    break
            time.sleep(0.5 * 2**attempt)
        reasons.append(f"{url}: {reason}")
    raise DataError(
        f"data: {file.name} could not be downloaded: {'; '.join(reasons)}. "
        "Give a directory that has the files, or try again: received bytes are kept"
    )


def _continue(url: str, part: Path) -> None:
    """Append to `part` the bytes of `url` that it does not have."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing follows: the part is complete
            return
        raise
    with response:
        resumes = response.status == 206
        expected = response.headers.get("Content-Length")
        received = 0
        with open(part, "ab" if resumes else "wb") as file:  # 200: the server sends all of it again
            while block := response.read(1 << 16):
                file.write(block)
                received += len(block)
        if expected is not None and received < int(expected):
            raise EOFError(f"the connection ended after {received} of {expected} bytes")


def _md5(file: Path) -> str:
    return hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
