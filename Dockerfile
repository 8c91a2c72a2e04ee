# One image for all roles: Flyte task, driver, Dask scheduler and worker, and the Dask operator where a cluster has none.
# GPUs work through the CUDA libraries that come with torch's wheels and the driver that the node mounts.
#
#   docker build --build-arg IMAGE=registry.example.com/flyte-ddp:1 -t registry.example.com/flyte-ddp:1 .

# For a release, pin the base by its digest: --build-arg BASE=debian:bookworm-slim@sha256:...
ARG BASE=debian:bookworm-slim
FROM $BASE AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The packages of the image: the pins that every environment shares, without the development tools. A separate stage, so
# that a new linter changes a text file here and no layer of the image.
FROM base AS pins
# The pins are tested on amd64 alone.
RUN test "$(uname -m)" = x86_64 || { echo "expected an amd64 machine or --platform linux/amd64, got $(uname -m)" >&2; exit 1; }
RUN python3 -m venv /uv && /uv/bin/pip install --no-cache-dir uv==0.13.9
WORKDIR /pins
COPY pyproject.toml requirements.txt ./
RUN /uv/bin/uv pip compile pyproject.toml --constraint requirements.txt --python-version 3.11 \
        --no-annotate --no-header --quiet -o all.txt \
    && grep -E '^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==' all.txt > gpu.txt

FROM base
# torch.compile, on GPUs too, builds its kernels' launchers with a C++ compiler; tini is a process 1 that passes signals
# on and reaps what a killed rank leaves behind.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev tini \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && useradd --uid 1000 --home-dir /root flyte \
    && chown flyte:flyte /root
ENV PATH=/opt/venv/bin:$PATH \
    VIRTUAL_ENV=/opt/venv \
    PYTHONUNBUFFERED=1

# The gigabytes: they change with torch's version alone. uv comes and goes within the layer.
COPY --from=pins /pins/gpu.txt /pins/
RUN python3 -m venv /tmp/uv && /tmp/uv/bin/pip install --no-cache-dir --quiet uv \
    && /tmp/uv/bin/uv pip install --no-cache --no-deps --compile-bytecode -r /pins/gpu.txt \
    && rm -rf /tmp/uv
# Everything else that is not ours.
COPY --from=pins /pins/all.txt /pins/
RUN python3 -m venv /tmp/uv && /tmp/uv/bin/pip install --no-cache-dir --quiet uv \
    && /tmp/uv/bin/uv pip install --no-cache --no-deps --compile-bytecode -r /pins/all.txt \
    && rm -rf /tmp/uv

# flytekit leaves its S3 sessions open, and reports them in an ERROR line at the end of each process of a task. That end
# closes them anyway. Here, because the process of a fast registration runs none of our code.
RUN echo 'import atexit, sys; atexit.register(lambda: "aiohttp" in sys.modules and setattr(sys.modules["aiohttp"].ClientSession, "__del__", lambda self: None))' \
        > "$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/quiet_exit.pth"

# The code, kilobytes: what .dockerignore lets through. A fast registration unpacks newer code into the working directory,
# which comes first on the path and has all of it, so that the two are never mixed.
WORKDIR /root
ENV PYTHONPATH=/root:/opt/flyte-ddp \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY . /opt/flyte-ddp/

# The image's own name: what tasks are registered with and what the Dask pods of a task start from.
ARG IMAGE=""
ENV FLYTE_INTERNAL_IMAGE=$IMAGE
# A number, so that Kubernetes can tell that it is not root.
USER 1000
ENTRYPOINT ["tini", "--"]
