# Two images of one project:
#   docker build --target agent -t gpu-exporter/agent .
#   docker build --target reconciler -t gpu-exporter/reconciler .
# BASE is any image with Python 3.10 or newer, its venv module and /etc/ssl/certs. The driver comes from the host.
ARG BASE=docker.io/library/python:3.13-slim

FROM ${BASE} AS source
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY exporter exporter
# For a private package index, and for networks that replace its CA (mount the CA bundle at this path).
ARG PIP_INDEX_URL
ARG PIP_CERT
RUN python3 -m venv /opt/gpu-exporter

FROM source AS agent-build
RUN /opt/gpu-exporter/bin/pip install --no-cache-dir --disable-pip-version-check '.[web-auth]'

FROM source AS reconciler-build
RUN /opt/gpu-exporter/bin/pip install --no-cache-dir --disable-pip-version-check '.[reconciler,web-auth]'

FROM ${BASE} AS agent
COPY --from=agent-build /opt/gpu-exporter /opt/gpu-exporter
ENV PATH=/opt/gpu-exporter/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    MALLOC_ARENA_MAX=2 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility
# The kubelet's PodResources socket belongs to uid 0. The chart drops every capability.
USER 0:0
EXPOSE 9836
ENTRYPOINT ["gpu-exporter"]

FROM ${BASE} AS reconciler
COPY --from=reconciler-build /opt/gpu-exporter /opt/gpu-exporter
ENV PATH=/opt/gpu-exporter/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    MALLOC_ARENA_MAX=2
USER 65532:65532
EXPOSE 9837
ENTRYPOINT ["gpu-exporter", "reconcile"]
