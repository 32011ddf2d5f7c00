# docker build -t tupe .                                                      GPUs and CPUs
# docker build -t tupe --build-arg STACK=train --build-arg PYTHON=3.13 .      without fairseq (docs/engines.md)
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm
ARG STACK=fairseq
RUN apt-get update && apt-get install -y --no-install-recommends g++ git libtcmalloc-minimal4 && rm -rf /var/lib/apt/lists/*
WORKDIR /tupe
COPY . .
RUN bash scripts/setup.sh --stack ${STACK} && { [ -e .venv ] || ln -s .venv-${STACK} .venv; } && rm -rf /root/.cache/pip
ENV PATH=/tupe/.venv/bin:$PATH
WORKDIR /data
ENTRYPOINT ["tupe"]
