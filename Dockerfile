# One image for server and worker: they share a database, so they must be of one version.
#
#   docker build --build-arg PYTHON_IMAGE=… --build-arg TORCH="torch==2.11.0" -t flopwatch .
#
# Which index torch comes from (CPU or a CUDA version) is pip's setting, not ours: pass PIP_EXTRA_INDEX_URL or
# PIP_INDEX_URL as a build argument, or nothing for pip's own default.

ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
ARG TORCH="torch==2.13.0"
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/flopwatch
ENV PATH=/opt/flopwatch/bin:$PATH
# Torch alone, and first: this layer of several gigabytes outlives changes to the source.
RUN pip install "${TORCH}"
COPY pyproject.toml README.md CHANGELOG.md /src/
COPY app /src/app
COPY kernels /src/kernels
COPY migrations /src/migrations
COPY parallel /src/parallel
COPY workers /src/workers
RUN pip install "${TORCH}" /src

FROM ${PYTHON_IMAGE}
# Triton and torch.compile compile at run time: they need a C and C++ compiler, not only the wheels.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/flopwatch /opt/flopwatch
# Not root: a job runs whatever model its worker has installed.
RUN useradd --create-home --uid 10001 flopwatch \
 && install --directory --owner=flopwatch --group=flopwatch /data
USER flopwatch
WORKDIR /home/flopwatch
# All addresses: a published port leads to the container's own. So the server refuses to start without
# FLOPWATCH_API_TOKEN, unless FLOPWATCH_INSECURE=true.
# NVIDIA_*: what the container runtime hands in; `utility` is NVML, which the worker asks for its devices.
ENV PATH=/opt/flopwatch/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    FLOPWATCH_DATA_DIR=/data \
    FLOPWATCH_HOST=0.0.0.0 \
    FLOPWATCH_PORT=8000 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /data
EXPOSE 8000
# The form without a shell, so that SIGTERM reaches flopwatch itself.
ENTRYPOINT ["flopwatch"]
CMD ["up"]
