# syntax=docker/dockerfile:1
#
#   docker build --tag qwen-packed .
#   docker run --rm --gpus all --ipc host --entrypoint python qwen-packed -m trainer.doctor
#   mkdir -p runs
#   docker run --rm --gpus all --ipc host --user "$(id -u)" --env HOME=/tmp -v "$PWD/data:/app/data" \
#       -v "$PWD/runs:/app/runs" qwen-packed --shards data/packed --eval-shards data/packed-eval --model random:0.8B
#
# Packages are the newest that pyproject.toml allows. CUDA has torch's major release; the minor one may differ, of which
# torch warns when causal-conv1d is built. Nothing is downloaded at run time but what --model and --source name; Triton
# and TileLang compile their kernels there, so gcc and nvcc stay in.
ARG CUDA=13.0.2
ARG UBUNTU=24.04

# ------------------------------------------------------------------------------------------------------------ build
FROM nvidia/cuda:${CUDA}-devel-ubuntu${UBUNTU} AS build
SHELL ["/bin/bash", "-e", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    CUDA_HOME=/usr/local/cuda

# Dependencies before the code, so that a change of the code rebuilds none of them.
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
RUN mkdir pipeline trainer \
    && touch pipeline/__init__.py trainer/__init__.py \
    && pip install "qwen-packed-finetune[gpu,build] @ file:///src"

# causal-conv1d has no wheels on PyPI: nvcc builds it against the torch just installed. A job takes gigabytes of memory.
ARG MAX_JOBS=4
ENV MAX_JOBS=${MAX_JOBS} \
    CAUSAL_CONV1D_FORCE_BUILD=TRUE
RUN pip install --no-build-isolation "qwen-packed-finetune[conv] @ file:///src"

COPY pipeline pipeline
COPY trainer trainer
RUN pip install --no-deps --no-build-isolation --force-reinstall . \
    && pip check \
    && for module in fla flash_qla causal_conv1d_cuda triton; do \
        python -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('${module}') is None)"; \
    done

# ---------------------------------------------------------------------------------------------------------- runtime
FROM nvidia/cuda:${CUDA}-base-ubuntu${UBUNTU}
ARG CUDA
SHELL ["/bin/bash", "-e", "-o", "pipefail", "-c"]
# The compiler packages of the base image's own release: 13.0.2 -> 13-0.
# hadolint ignore=DL3008
RUN release="$(cut -d. -f1-2 --output-delimiter=- <<< "${CUDA}")" \
    && apt-get update \
    && apt-get install --yes --no-install-recommends \
        g++ python3-dev "cuda-nvcc-${release}" "cuda-cudart-dev-${release}" \
    && rm -rf /var/lib/apt/lists/* \
    && /usr/local/cuda/bin/nvcc --version \
    && useradd --create-home --uid 10001 trainer \
    && mkdir --parents /app/runs \
    && chown --recursive 10001:10001 /app
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY --chown=10001:10001 data/sample data/sample
ENV PATH=/opt/venv/bin:$PATH \
    CUDA_HOME=/usr/local/cuda \
    PYTHONUNBUFFERED=1 \
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
USER 10001
ENTRYPOINT ["python", "-m", "trainer.train"]
CMD ["--help"]
