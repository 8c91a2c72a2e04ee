# One image for the Flyte task, the driver, the Dask scheduler and workers, and the Dask operator.
# GPUs work through the CUDA libraries that come with torch's wheels and the driver that the node mounts.
#
#   docker build --build-arg IMAGE=registry.example.com/flyte-ddp:1 -t registry.example.com/flyte-ddp:1 .
#
# BASE     the base image; for a release by its digest, debian:bookworm-slim@sha256:..., as deploy/README.md shows
# COMPILER 1: with the C++ compiler that torch.compile (`compile: true`) starts, 450 MB more
#
# examples/project/Dockerfile has the same instructions up to the code: a project's image shares these layers.

ARG BASE=debian:bookworm-slim
FROM $BASE AS base
# The pins are tested on amd64 alone. tini is a process 1 that passes signals on and reaps what a killed rank leaves behind.
RUN test "$(uname -m)" = x86_64 || { echo "expected an amd64 machine or --platform linux/amd64, got $(uname -m)" >&2; exit 1; }
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv tini \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/venv \
    && useradd --uid 1000 --home-dir /root flyte && chown flyte:flyte /root
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv PYTHONUNBUFFERED=1 NVIDIA_DRIVER_CAPABILITIES=compute,utility

# What installs packages, and in which layer.
FROM base AS pins
COPY requirements.txt /pins/
RUN cd /pins && sed -n '/^uv==/,/[^\\]$/p' requirements.txt > uv.txt \
    && awk '/^[a-z0-9]/ { gpu = /^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==/ } gpu' requirements.txt > gpu.txt
FROM base
# The gigabytes: they change with torch's version alone.
COPY --from=pins /pins/uv.txt /pins/gpu.txt /pins/
RUN pip install --no-cache-dir --quiet --require-hashes -r /pins/uv.txt \
    && uv pip install --no-cache --no-deps --require-hashes --compile-bytecode -r /pins/gpu.txt
# Everything else that is not ours.
COPY requirements.txt /pins/
RUN uv pip install --no-cache --no-deps --require-hashes --compile-bytecode -r /pins/requirements.txt

# flytekit leaves its S3 sessions open, and reports them in an ERROR line at the end of each process of a task. That end
# closes them anyway. Here, because the process of a fast registration runs none of our code.
RUN echo 'import atexit, sys; atexit.register(lambda: "aiohttp" in sys.modules and setattr(sys.modules["aiohttp"].ClientSession, "__del__", lambda self: None))' \
    > "$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/quiet_exit.pth"

# torch.compile builds kernels' launchers with it, on GPUs too.
ARG COMPILER=0
RUN case $COMPILER in \
      0) ;; \
      1) apt-get update && apt-get install -y --no-install-recommends g++ python3-dev && rm -rf /var/lib/apt/lists/* ;; \
      *) echo "COMPILER: expected 0 or 1, got $COMPILER" >&2; exit 1 ;; \
    esac

# The code, kilobytes: what .dockerignore lets through. A fast registration unpacks newer code into the working directory,
# which comes first on the path and has all of it, so that the two are never mixed.
WORKDIR /root
COPY . /opt/flyte-ddp/

# The image's own name: what tasks are registered with and what the Dask pods of a task start from.
ARG IMAGE=""
ENV FLYTE_INTERNAL_IMAGE=$IMAGE PYTHONPATH=/root:/opt/flyte-ddp
# A number, so that Kubernetes can tell that it is not root.
USER 1000
ENTRYPOINT ["tini", "--"]
