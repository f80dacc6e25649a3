# Python, the locked packages and the daemon, nothing else. Runs as any user and writes only below /tmp.
ARG PYTHON_VERSION=3.13

FROM python:${PYTHON_VERSION}-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# The build backend stays out of the image. Packages are installed before the code, which changes more often.
RUN python -m venv /build && /build/bin/pip install "hatchling>=1.27,<2"
RUN python -m venv --without-pip /opt/gpustackd
COPY requirements.lock ./
RUN python -m pip --python /opt/gpustackd/bin/python install --require-hashes --only-binary :all: --requirement requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY gpustackd gpustackd
COPY migrations migrations
RUN /build/bin/hatchling build -t wheel -d /dist \
    && python -m pip --python /opt/gpustackd/bin/python install --no-deps --no-index /dist/*.whl

FROM python:${PYTHON_VERSION}-slim
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="gpustackd" \
      org.opencontainers.image.description="Places AI model instances on workers and GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
COPY --from=build /opt/gpustackd /opt/gpustackd
ENV PATH=/opt/gpustackd/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    HF_HOME=/tmp/huggingface \
    GPUSTACKD_HTTP=0.0.0.0:9480 \
    GPUSTACKD_LOG_FORMAT=json
# A number, so that Kubernetes can verify that it is not root.
USER 10001:10001
WORKDIR /tmp
EXPOSE 9480
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['GPUSTACKD_HTTP'].rpartition(':')[2] + '/healthz', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["gpustackd"]
CMD ["run"]
