# anabatic on a CPU: docker build -f containers/cpu.Dockerfile -t anabatic:cpu .
FROM python:3.12-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY . /opt/anabatic
RUN pip install --no-cache-dir -c /opt/anabatic/constraints.txt --extra-index-url ${TORCH_INDEX} torch==2.13.0+cpu '/opt/anabatic[serve]'
RUN useradd --create-home --uid 1000 anabatic
USER 1000
WORKDIR /home/anabatic
CMD ["anabatic", "doctor"]
