# Two images of one project:
#   docker build --target agent -t gpu-exporter/agent .
#   docker build --target reconciler -t gpu-exporter/reconciler .
# BASE is any image with Python 3.10 or newer, its venv module and /etc/ssl/certs. The driver comes from the host.
ARG BASE=docker.io/library/python:3.13-slim

FROM ${BASE} AS build
WORKDIR /src
# For a private package index, and for networks that replace its CA (mount the CA bundle at this path).
ARG PIP_INDEX_URL
ARG PIP_CERT
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/gpu-exporter
COPY exporter/locks exporter/locks

# Dependencies come from the locks, with hashes. The image needs neither pip nor setuptools. Compiled files with a hash in
# place of the time of their source are the same in each build, and the interpreter does not look for the source.
FROM build AS agent-build
RUN /opt/gpu-exporter/bin/pip install --no-compile --require-hashes -r exporter/locks/build.txt -r exporter/locks/agent.txt
COPY pyproject.toml README.md LICENSE ./
COPY exporter exporter
RUN /opt/gpu-exporter/bin/pip install --no-compile --no-deps --no-build-isolation . \
 && /opt/gpu-exporter/bin/pip uninstall --yes setuptools pip \
 && PYTHONHASHSEED=0 /opt/gpu-exporter/bin/python -m compileall -q -f --invalidation-mode unchecked-hash /opt/gpu-exporter/lib

# The reconciler never imports the client's asyncio half: compiled, it would be 30 MB.
FROM build AS reconciler-build
RUN /opt/gpu-exporter/bin/pip install --no-compile --require-hashes -r exporter/locks/build.txt -r exporter/locks/reconciler.txt
COPY pyproject.toml README.md LICENSE ./
COPY exporter exporter
RUN /opt/gpu-exporter/bin/pip install --no-compile --no-deps --no-build-isolation . \
 && /opt/gpu-exporter/bin/pip uninstall --yes setuptools pip \
 && PYTHONHASHSEED=0 /opt/gpu-exporter/bin/python -m compileall -q -f -x /kubernetes/aio/ --invalidation-mode unchecked-hash /opt/gpu-exporter/lib

FROM ${BASE} AS runtime
ARG BASE
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.source="https://github.com/gpu-exporter/gpu-exporter" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/gpu-exporter/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    MALLOC_ARENA_MAX=2

FROM runtime AS agent
LABEL org.opencontainers.image.title="gpu-exporter agent"
COPY --from=agent-build /opt/gpu-exporter /opt/gpu-exporter
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility
# The kubelet's PodResources socket belongs to uid 0. The chart drops every capability.
USER 0:0
EXPOSE 9836
ENTRYPOINT ["gpu-exporter"]

FROM runtime AS reconciler
LABEL org.opencontainers.image.title="gpu-exporter reconciler"
COPY --from=reconciler-build /opt/gpu-exporter /opt/gpu-exporter
USER 65532:65532
EXPOSE 9837
ENTRYPOINT ["gpu-exporter", "reconcile"]
