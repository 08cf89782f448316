# Two images, of one version, since server and worker share a database:
#
#   docker build --target server -t flopwatch-server .      no torch: some hundred megabytes
#   docker build --target worker -t flopwatch-worker .      the last, so that without --target it is this one
#
# Build arguments: PYTHON_IMAGE, TORCH ("torch==2.11.0"). Which index torch comes from (CPU or a CUDA version) is pip's
# setting, not ours: pass PIP_EXTRA_INDEX_URL or PIP_INDEX_URL, or nothing for pip's own default.

# By digest, so that an image built tomorrow has the base of one built today: the index (of all platforms) that
# python:3.12-slim named on 2026-08-05, as github.com/docker-library/repo-info records it in
# repos/python/remote/3.12-slim.md: Python 3.12.13 on Debian trixie. docs/operations.md says how to move on.
ARG PYTHON_IMAGE=python:3.12-slim@sha256:229a2c5bfa27522db7815ea81f9bed70af17ccb9de9fc7ad142b1877b5830d36

FROM ${PYTHON_IMAGE} AS source
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml README.md CHANGELOG.md LICENSE /src/
COPY app /src/app
COPY flopwatch /src/flopwatch
COPY kernels /src/kernels
COPY migrations /src/migrations
COPY parallel /src/parallel
COPY workers /src/workers
RUN pip wheel --no-deps --wheel-dir /wheel /src

FROM ${PYTHON_IMAGE} AS base
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Not root: a job runs whatever model its worker has installed.
RUN useradd --create-home --uid 10001 flopwatch \
 && install --directory --owner=flopwatch --group=flopwatch /data /cache \
 && python -m venv /opt/flopwatch
WORKDIR /home/flopwatch
# All addresses: a published port leads to the container's own. So the server refuses to start without
# FLOPWATCH_API_TOKEN, unless FLOPWATCH_INSECURE=true.
ENV PATH=/opt/flopwatch/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    FLOPWATCH_DATA_DIR=/data \
    FLOPWATCH_HOST=0.0.0.0 \
    FLOPWATCH_PORT=8000
VOLUME /data
# The form without a shell, so that SIGTERM reaches flopwatch itself.
ENTRYPOINT ["flopwatch"]

FROM base AS server
RUN --mount=type=bind,from=source,source=/wheel,target=/wheel pip install "$(echo /wheel/*.whl)[objects,postgresql]"
USER 10001
EXPOSE 8000
CMD ["serve"]

FROM base AS worker
# Triton and torch.compile compile at run time: they need a C and C++ compiler, not only the wheels. Unpinned, since
# Debian removes old versions.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
ARG TORCH="torch==2.13.0"
# In layers of their own, before anything of ours: torch's several gigabytes outlive changes to the source. TORCH and the
# wheel say which versions.
# hadolint ignore=DL3013
RUN pip install "${TORCH}"
# hadolint ignore=DL3013
RUN --mount=type=bind,from=source,source=/wheel,target=/wheel pip install "${TORCH}" "$(echo /wheel/*.whl)[worker,objects,postgresql]"
USER 10001
# What is compiled at run time, each cache by content: worth keeping in a volume.
# NVIDIA_*: what the container runtime hands in; `utility` is NVML, which the worker asks for its devices.
ENV TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TORCH_EXTENSIONS_DIR=/cache/extensions \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /cache
CMD ["worker"]
