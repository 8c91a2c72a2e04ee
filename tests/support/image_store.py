"""An S3 server of this machine that holds drawn images, notes every request, and misbehaves on
request.
"""

from __future__ import annotations

import contextlib
import io
import uuid
from collections import defaultdict
from urllib.parse import parse_qs

import pytest
from moto.s3.models import get_canned_acl, s3_backends
from moto.server import ThreadedMotoServer
from PIL import Image

from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.prepare import describe_data, prepare_data

COLOURS = {"blue": (30, 60, 220), "green": (40, 190, 60), "red": (220, 40, 30)}


def saved(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def image_bytes(colour, number=0, size=(40, 32), kind="PNG", mode="RGB", **options):
    """A plain image, but for a corner that shows `number`."""
    image = Image.new("RGB", size, colour)
    image.paste((number * 37 % 256, number // 256, 0), (0, 0, 12, 12))
    return saved(image.convert(mode), kind, **options)


def image_tree(splits=("train", "val"), classes=("blue", "green", "red"), count=4):
    """{name: contents} of `count` images for each split and class."""
    return {
        f"{split}{'/' if split else ''}{name}/{number:03d}.png": image_bytes(
            COLOURS[name], number + 1000 * len(split) + 10_000 * index
        )
        for split in splits
        for index, name in enumerate(classes)
        for number in range(count)
    }


def write_tree(tree, directory):
    """Write the files of `tree` below `directory`, and return its path."""
    for name, contents in tree.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(contents)
    return str(directory)


def prepare(source, directory, **options):
    """Prepare `source` for recipe image_folder; return (recipe, training data, held-out data,
    description).
    """
    recipe = get_recipe("image_folder", {"image_size": 32, **options})
    prepare_data(recipe, str(source), directory)
    return (recipe, *recipe.datasets(directory), describe_data(directory)["description"])


class ImageStore:
    """The server's requests and faults, by the name of the object.

    `faults[name]` is a list of what happens to the next requests for it, one each: "throttle",
    "cut" (the connection ends early), "short" (a whole answer with fewer bytes) or "fine".
    """

    def __init__(self, app):
        self.app = app
        self.requests = []  # (method, path, query, range, authorization)
        self.faults = defaultdict(list)
        # every request fails with this: "unavailable", or the code of an answer of S3
        self.fault = ""

    def __call__(self, environ, start_response):
        path, query = environ["PATH_INFO"], environ["QUERY_STRING"]
        self.requests.append(
            (
                environ["REQUEST_METHOD"],
                path,
                parse_qs(query),
                environ.get("HTTP_RANGE", ""),
                environ.get("HTTP_AUTHORIZATION", ""),
            )
        )
        if self.fault:
            status, code = "403 F", self.fault
            if code == "unavailable":
                status, code = "503 Unavailable", "ServiceUnavailable"
            elif code == "ExpiredToken":
                status = "400 Bad Request"
            body = (
                f"<Error><Code>{code}</Code><Message>a test wants this</Message></Error>".encode()
            )
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
            if code == "RequestTimeTooSkewed":
                headers.append(("Date", "Mon, 01 Jan 2024 00:00:00 GMT"))
            start_response(status, headers)
            return [body] if environ["REQUEST_METHOD"] != "HEAD" else []
        name = path.split("/", 2)[-1]
        fault = self.faults[name].pop(0) if self.faults.get(name) else "fine"
        if fault == "throttle":
            body = (
                b"<Error><Code>SlowDown</Code><Message>Please reduce your request "
                b"rate.</Message></Error>"
            )
            start_response(
                "503 Slow Down",
                [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))],
            )
            return [body]
        if fault not in ("cut", "short"):
            return self.app(environ, start_response)
        answer = []
        body = b"".join(self.app(environ, lambda *values: answer.extend(values)))[:-20]
        if fault == "short":
            answer[1] = [
                (key, value) for key, value in answer[1] if key.lower() != "content-length"
            ]
            answer[1].append(("Content-Length", str(len(body))))
        start_response(*answer[:2])
        return [body]

    def new_bucket(self):
        """The URL of a bucket that is empty."""
        bucket = f"bucket-{uuid.uuid4().hex}"
        s3_backends["123456789012"]["aws"].create_bucket(bucket, "us-east-1")
        return f"s3://{bucket}"

    def fill(self, tree):
        """The URL of `tree`'s files in a new bucket, which anybody may read."""
        url = f"{self.new_bucket()}/images"
        for name, contents in tree.items():
            self.put(url, name, contents).set_acl(get_canned_acl("public-read"))
        return url

    def delete(self, url, name):
        s3_backends["123456789012"]["aws"].delete_object(url.split("/")[2], f"images/{name}")

    def put(self, url, name, contents):
        return s3_backends["123456789012"]["aws"].put_object(
            url.split("/")[2], f"images/{name}", contents
        )

    def asked_for(self, name):
        """The methods of the requests for the object."""
        return [method for method, path, *_ in self.requests if path.endswith(f"/{name}")]

    def ranges_of(self, bucket, name):
        """The ranges of bytes that were fetched of the object; "" stands for all bytes."""
        own = bucket.removeprefix("s3:/") + f"/{name}"
        return {
            span for method, path, _, span, _ in self.requests if (method, path) == ("GET", own)
        }


@contextlib.contextmanager
def running_store():
    """A store at the address that the environment names, for this process and those it starts."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    store = server._server.app = ImageStore(server._server.app)
    store.endpoint_url = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", store.endpoint_url)
        patch.setenv("AWS_ACCESS_KEY_ID", "the-access-key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-key")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield store
    server.stop()
