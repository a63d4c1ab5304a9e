# Images of Laconic, each a target; the last one is built by default.
#   docker build -t laconic .                                          # serve, on a CPU, both engines
#   docker build -t laconic --build-arg ENGINE=openvino .              # one engine
#   docker build -t laconic-toolkit --target compress .                # the whole toolkit, for jobs
#   docker build -t laconic-gpu --target gpu .                         # serve, on NVIDIA GPUs: not run on one so far
ARG PYTHON=python:3.11-slim-bookworm
ARG GPU_BASE=python:3.11-slim-bookworm

FROM ${PYTHON} AS source
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_CONSTRAINT=/src/constraints.txt
WORKDIR /src
# pip compiles what it installs: a read-only root could not keep .pyc files, and without them a server starts half as fast.
# What changes seldom comes first: pip and the tool that lists what is installed stay cached while the source changes.
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN python -m venv /opt/laconic \
    && /opt/laconic/bin/pip install "setuptools>=77" \
    && python -m venv /opt/sbom \
    && PIP_CONSTRAINT="" /opt/sbom/bin/pip install cyclonedx-bom==7.5.0
COPY deploy/image/ deploy/image/
COPY laconic/ laconic/
COPY train/ train/
COPY compress/ compress/
COPY export/ export/
COPY serve/ serve/

FROM source AS install-serve
# openvino, onnxruntime or both; `generate` (models that write) brings both. Further extras, with commas: generate, remote, otel.
ARG ENGINE=both
ARG EXTRAS=
# What opens s3:// or gs:// beside the extra `remote`: s3fs or gcsfs, in versions that the constraints do not fit.
ARG STORE=
RUN case "$ENGINE" in both) engine=cpu ;; openvino|onnxruntime) engine=$ENGINE ;; *) echo "no ENGINE $ENGINE" >&2; exit 2 ;; esac \
    && /opt/laconic/bin/pip install ".[serve,$engine${EXTRAS:+,$EXTRAS}]" \
    && if [ -n "$STORE" ]; then PIP_CONSTRAINT="" /opt/laconic/bin/pip install "$STORE"; fi \
    && /opt/laconic/bin/pip uninstall --yes setuptools pip \
    && sh deploy/image/slim.sh /opt/laconic/lib/python3*/site-packages \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --output-file /opt/laconic/sbom.cdx.json /opt/laconic/bin/python

FROM source AS install-compress
# Where PyTorch's wheels come from beside PyPI: those for the CPU; empty for PyPI's, which bring CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /opt/laconic/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[serve,cpu,generate,remote,train,timm,ray]" \
    && /opt/laconic/bin/pip uninstall --yes pip \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --output-file /opt/laconic/sbom.cdx.json /opt/laconic/bin/python

FROM ${GPU_BASE} AS install-gpu
# The base has Python 3.11 or later; the extras name the engine (gpu or tensorrt), the wheels what it needs beside the driver.
ARG GPU_EXTRAS=serve,gpu
ARG GPU_WHEELS=onnxruntime-gpu[cuda,cudnn]
ENV PIP_NO_CACHE_DIR=1
COPY --from=source /src /src
WORKDIR /src
RUN python3 -m venv /opt/laconic \
    && /opt/laconic/bin/pip install -c constraints.txt ".[$GPU_EXTRAS]" "$GPU_WHEELS" \
    && /opt/laconic/bin/pip uninstall --yes pip \
    && python3 -m venv /opt/sbom \
    && /opt/sbom/bin/pip install cyclonedx-bom==7.5.0 \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --output-file /opt/laconic/sbom.cdx.json /opt/laconic/bin/python

FROM ${PYTHON} AS compress
COPY --from=install-compress /opt/laconic /opt/laconic
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="laconic-toolkit" \
      org.opencontainers.image.description="Compresses trained checkpoints and proves that the outputs still match; fine-tunes in little memory" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# PyTorch names its caches by the user, who has no entry in /etc/passwd.
ENV PATH=/opt/laconic/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=laconic
WORKDIR /models
USER 10001:10001
STOPSIGNAL SIGTERM
HEALTHCHECK NONE
ENTRYPOINT ["laconic"]
CMD ["--help"]

FROM ${GPU_BASE} AS gpu
COPY --from=install-gpu /opt/laconic /opt/laconic
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="laconic-gpu" \
      org.opencontainers.image.description="Serves compressed models over HTTP and gRPC, on NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/laconic/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /models
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=2)"]
ENTRYPOINT ["laconic", "serve", "--host", "0.0.0.0"]
CMD ["/models/model.laconic"]

FROM ${PYTHON} AS serve
COPY --from=install-serve /opt/laconic /opt/laconic
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="laconic" \
      org.opencontainers.image.description="Serves compressed models over HTTP and gRPC" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/laconic/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /models
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=2)"]
# What comes after the image's name replaces the model: any number of artifacts, and options.
ENTRYPOINT ["laconic", "serve", "--host", "0.0.0.0"]
CMD ["/models/model.laconic"]
