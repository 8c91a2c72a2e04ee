"""An S3 server of this machine that pods and tests reach alike: it checks keys, and can be taken
away.
"""

from __future__ import annotations

import io
import re
import secrets
from typing import TYPE_CHECKING, Any

import fsspec
from moto.server import ThreadedMotoServer

if TYPE_CHECKING:
    import torch


class Store:
    """moto's server, with keys that are checked."""

    def __init__(self, host: str) -> None:
        self.keys = {
            "AWS_ACCESS_KEY_ID": f"AKIA{secrets.token_hex(8).upper()}",
            "AWS_SECRET_ACCESS_KEY": secrets.token_hex(8),
            "AWS_REGION": "us-east-1",
        }
        self.server = ThreadedMotoServer(host, 0, verbose=False)
        self.server.start()
        self.url = "http://{}:{}".format(*self.server.get_host_and_port())
        assert self.server._server is not None
        self._app = self.server._server.app
        self.server._server.app = self._guarded

    def _guarded(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Answer as S3 does where keys are missing, wrong or not allowed; moto alone takes any."""
        authorization = environ.get("HTTP_AUTHORIZATION", "")
        code = ""
        if f"Credential={self.keys['AWS_ACCESS_KEY_ID']}/" not in authorization:
            code = "InvalidAccessKeyId" if authorization else "AccessDenied"
        if not code:
            return self._app(environ, start_response)
        body = f"<Error><Code>{code}</Code><Message>Refused.</Message></Error>".encode()
        start_response(
            "403 Forbidden",
            [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))],
        )
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def stop(self) -> None:
        """Close the listening socket: connections are refused from now on."""
        self.server.stop()
        assert self.server._server is not None
        self.server._server.server_close()

    @property
    def files(self) -> Any:
        return fsspec.filesystem(
            "s3",
            endpoint_url=self.url,
            key=self.keys["AWS_ACCESS_KEY_ID"],
            secret=self.keys["AWS_SECRET_ACCESS_KEY"],
            use_listings_cache=False,
        )

    def state(self, run: str) -> dict[str, torch.Tensor]:
        """The state dict that the run left."""
        import torch  # This import is late: tests of processes without torch import this module.

        state: dict[str, torch.Tensor] = torch.load(
            io.BytesIO(self.files.cat_file(f"runs/{run}/model_state.pt")), weights_only=True
        )
        return state

    def checkpoint_steps(self, run: str) -> list[int]:
        """The steps of the run's complete checkpoints."""
        steps = []
        for path in self.files.ls(f"runs/{run}", detail=False):
            match = re.fullmatch(r"step-(\d+)\.json", path.rsplit("/", 1)[-1])
            if match:
                steps.append(int(match[1]))
        return sorted(steps)
