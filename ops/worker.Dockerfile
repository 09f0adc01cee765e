# A worker with its model inside, so that nothing is fetched when it runs. Build from the repository's root:
#   docker build -f ops/worker.Dockerfile -t jitney-worker .
# TORCH_INDEX: where torch comes from; empty = PyPI, whose Linux build brings CUDA along (for a GPU).
# MODEL: a registered name (`jitney model list`). A directory of your own is mounted instead: give its path as
# JITNEY_MODEL when the container runs.
FROM python:3.11-slim AS build

# For the kernels below; the image that runs has no compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/jitney
ENV PATH=/opt/jitney/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Dependencies in a layer of their own: a change of code does not install them again.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir -p shared/jitney api/jitney_api worker/jitney_worker \
    && touch shared/jitney/__init__.py api/jitney_api/__init__.py worker/jitney_worker/__init__.py \
    && pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt ".[worker,otel]"

COPY shared shared
COPY api api
COPY worker worker
RUN pip install --no-deps --force-reinstall .

ENV XDG_CACHE_HOME=/opt/models
# The kernels, for every CPU that the image may meet.
RUN python -m jitney_worker.model.native

ARG MODEL=smollm2-135m-instruct
RUN jitney model pull "$MODEL"


FROM python:3.11-slim

RUN useradd --create-home --uid 10001 jitney
COPY --from=build /opt/jitney /opt/jitney
COPY --from=build /opt/models /opt/models
ARG MODEL=smollm2-135m-instruct
ENV PATH=/opt/jitney/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/opt/models JITNEY_MODEL=$MODEL JITNEY_OFFLINE=true
USER jitney
WORKDIR /home/jitney
CMD ["jitney", "worker"]
