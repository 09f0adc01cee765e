# The HTTP side, and the bridges from RQ and Celery: no torch, no model. Build from the repository's root:
#   docker build -f ops/api.Dockerfile -t jitney-api .
FROM python:3.11-slim AS build

RUN python -m venv /opt/jitney
ENV PATH=/opt/jitney/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src

# Dependencies in a layer of their own: a change of code does not install them again.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir -p shared/jitney api/jitney_api worker/jitney_worker \
    && touch shared/jitney/__init__.py api/jitney_api/__init__.py worker/jitney_worker/__init__.py \
    && pip install -c constraints.txt ".[api,http,rq,celery,otel]"

COPY shared shared
COPY api api
COPY worker worker
RUN pip install --no-deps --force-reinstall .


FROM python:3.11-slim

# A volume takes over whose the folder is.
RUN useradd --create-home --uid 10001 jitney && install -d -o jitney /var/lib/jitney /var/lib/jitney/files
COPY --from=build /opt/jitney /opt/jitney
ENV PATH=/opt/jitney/bin:$PATH PYTHONUNBUFFERED=1
USER jitney
WORKDIR /home/jitney
EXPOSE 8000
# Refuses to start until JITNEY_API__ACCESS says who may come in: see docs/API_KEYS.md.
CMD ["jitney", "api", "--host", "0.0.0.0", "--port", "8000"]
