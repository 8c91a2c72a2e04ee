"""Fetch one file over HTTP so that a broken connection costs what was not yet received, and nothing else."""

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
    """Have the contents of one of `urls` in `file`, whole and with the given MD5 sum.

    What has arrived is kept beside `file` as `.part`, and the next try, also that of another process later on, asks
    only for the rest. A finished part with another sum is thrown away.

    Raises:
        DataError: no mirror gave the file; the message has every mirror's reason.
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
            # URLError and time-outs are OSErrors.
            except (OSError, EOFError, http.client.HTTPException) as error:
                reason = str(error)
                if isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500 and error.code != 429:
                    break
            time.sleep(0.5 * 2**attempt)
        reasons.append(f"{url}: {reason}")
    raise DataError(
        f"data: {file.name} could not be downloaded: {'; '.join(reasons)}. "
        "Give a directory that holds the files instead, or try again: what has arrived is kept"
    )


def _continue(url: str, part: Path) -> None:
    """Append to `part` what it still lacks of `url`."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing lies beyond what we have: it is whole
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
