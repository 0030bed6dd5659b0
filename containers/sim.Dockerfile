# Simulated Ascend NPUs for tests of any project: docker build -f containers/sim.Dockerfile -t anabatic-sim .
# docker run --rm -v "$PWD:/project" -w /project anabatic-sim anabatic-sim --npus 2 -- pytest
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

FROM python:3.12-slim-bookworm AS build
ARG TORCH
ARG TORCH_INDEX
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --extra-index-url ${TORCH_INDEX} torch==${TORCH}+cpu numpy pyyaml hatchling auditwheel
COPY . /src
RUN python /src/scripts/build_sim_wheels.py --torch ${TORCH} --use ${TORCH}=/usr/local/bin/python --work /tmp/work --out /dist

FROM python:3.12-slim-bookworm
ARG TORCH
ARG TORCH_INDEX
COPY --from=build /dist /dist
RUN pip install --no-cache-dir --extra-index-url ${TORCH_INDEX} torch==${TORCH}+cpu pytest pytest-xdist /dist/*.whl
# The wheel of torch_npu becomes part of the image: it needs no network when it runs.
ENV ANABATIC_CACHE=/opt/anabatic-sim
RUN anabatic-sim -- python -c "import torch; torch.ones(1, device='npu')"
CMD ["anabatic-sim", "--", "npu-smi", "info"]
