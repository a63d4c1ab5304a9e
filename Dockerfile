# The CPU server. `docker build -t laconic .`, then
# `docker run --rm -p 8000:8000 -v ./minilm.laconic:/models/model.laconic:ro laconic`
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
# What of Laconic is installed; `remote` besides for artifacts at addresses.
ARG EXTRAS=serve,cpu,generate
WORKDIR /src
# What changes seldom comes first: the dependencies stay cached while the source changes.
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN python -m venv /opt/laconic \
    && /opt/laconic/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt "setuptools>=77"
COPY laconic/ laconic/
COPY train/ train/
COPY compress/ compress/
COPY export/ export/
COPY serve/ serve/
RUN /opt/laconic/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt ".[${EXTRAS}]" \
    && /opt/laconic/bin/pip uninstall --yes --disable-pip-version-check setuptools pip

FROM ${PYTHON}
COPY --from=build /opt/laconic /opt/laconic
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
