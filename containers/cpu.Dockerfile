# anabatic on a CPU: docker build -f containers/cpu.Dockerfile -t anabatic:cpu .
FROM python:3.12-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY . /opt/anabatic
# What serve needs, and hatchling, which builds the package, come by checksum; torch by version alone.
RUN pip install --no-cache-dir --require-hashes --no-deps -r /opt/anabatic/requirements-serve.txt
RUN pip install --no-cache-dir --no-deps --extra-index-url ${TORCH_INDEX} torch==2.13.0+cpu
RUN pip install --no-cache-dir --no-deps --no-build-isolation /opt/anabatic
RUN useradd --create-home --uid 1000 anabatic
USER 1000
WORKDIR /home/anabatic
CMD ["anabatic", "doctor"]
