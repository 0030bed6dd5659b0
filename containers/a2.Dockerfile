# anabatic on Atlas A2 (910B): docker build -f containers/a2.Dockerfile --build-arg CANN_IMAGE=... -t anabatic:a2 .
# CANN_IMAGE: an image of Ascend/cann-container-image with CANN 9.2.0, the operators of this chip (a tag with 910b)
# and Python 3.10 to 3.12. With another CANN, take torch and torch_npu from its row of the table in the install guide.
ARG CANN_IMAGE
FROM ${CANN_IMAGE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY . /opt/anabatic
# What serve needs, and hatchling, which builds the package, come by checksum; torch, and torch_npu with what it needs,
# by version alone.
RUN pip install --no-cache-dir --require-hashes --no-deps -r /opt/anabatic/requirements-serve.txt
# On x86-64 plain torch is a CUDA build, which torch_npu rejects; on aarch64 it is the CPU build.
RUN if [ "$(uname -m)" = x86_64 ]; then pip install --no-cache-dir --extra-index-url ${TORCH_INDEX} torch==2.13.0+cpu; else pip install --no-cache-dir torch==2.13.0; fi
RUN pip install --no-cache-dir -c /opt/anabatic/constraints.txt torch-npu==2.13.0
RUN pip install --no-cache-dir --no-deps --no-build-isolation /opt/anabatic
CMD ["anabatic", "doctor"]
