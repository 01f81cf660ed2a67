# Convoy in a container: a plain user, the versions that the tests ran with, nothing else.
#
#   docker build -t convoy .                                  with CUDA; every package is checked against requirements.lock
#   docker build -t convoy --build-arg TORCH_INDEX=URL .      with the torch of another index, e.g. PyTorch's for CPUs
#   docker build -t convoy --build-arg EXTRAS=demo,timm .     with other extras
#   docker build -t convoy --build-arg PACKAGES=g++ .         with a compiler, for --compile
#
# A tag may become another image: give BASE with its digest (python:3.11-slim-bookworm@sha256:...) where that matters.
# With another index or other extras, versions are those of constraints.txt, and checksums are not compared.
ARG BASE=python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
ARG TORCH_INDEX=""
ARG EXTRAS="demo"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/convoy
ENV PATH=/opt/convoy/bin:${PATH}
WORKDIR /build
# torch first, in a layer of its own: it is most of the image, and seldom changes.
COPY constraints.txt requirements.lock ./
RUN if [ -z "${TORCH_INDEX}" ] && [ "${EXTRAS}" = demo ] && [ "$(uname -m)" = x86_64 ]; then \
        pip install --require-hashes -r requirements.lock; \
    else \
        pip install -c constraints.txt ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch; \
    fi
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install -c constraints.txt ".[${EXTRAS}]"

# hadolint ignore=DL3006
FROM ${BASE}
ARG PACKAGES=""
# hadolint ignore=DL3008,SC2086
RUN if [ -n "${PACKAGES}" ]; then \
        apt-get update && apt-get install -y --no-install-recommends ${PACKAGES} && rm -rf /var/lib/apt/lists/*; \
    fi \
    && groupadd --gid 1000 convoy && useradd --uid 1000 --gid 1000 --create-home convoy \
    && install -d -o convoy -g convoy /runs
COPY --from=build /opt/convoy /opt/convoy
ENV PATH=/opt/convoy/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
WORKDIR /home/convoy
ENTRYPOINT ["convoy"]
CMD ["--help"]
