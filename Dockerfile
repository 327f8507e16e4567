# Images of vpmm's programs. The GPU driver is not inside: NVIDIA's container toolkit lends the host's.
#
#   docker build -t vpmm-stress .                        vpmm-stress, which tests a GPU: the default target
#   docker build -t vpmm-server --target server .        the server example
#   docker build --target build .                        the library and its headers are under /out/usr/local
#
# tests/image.sh builds and runs both without a Docker engine.

# Debian 12, by the digest that all architectures share.
ARG BASE_IMAGE=docker.io/library/debian:bookworm-20260918-slim\
@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251

FROM ${BASE_IMAGE} AS build
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    cmake gcc libc6-dev libck-dev libcrypt-dev libgnutls28-dev libmicrohttpd-dev make pkg-config zlib1g-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# By itself, because without a cuda.h in the base image it fetches 800 MB.
COPY tests/setup.sh tests/
RUN bash -euc '. tests/setup.sh; need_cuda_h; install -D -m 644 "$cuda_include_dir/cuda.h" /opt/cuda/cuda.h'
COPY . .
RUN cmake -S . -B /build -DCUDA_INCLUDE_DIR=/opt/cuda -DVPMM_BUILD_TESTS=OFF -DCMAKE_INSTALL_PREFIX=/usr/local \
 && cmake --build /build --parallel "$(nproc)" \
 && DESTDIR=/out cmake --install /build --strip

# What both images have: the exporter's libraries, and a user without a name, rights or files.
FROM ${BASE_IMAGE} AS runtime
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends libmicrohttpd12 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt/* /var/log/dpkg.log
COPY --from=build /out/usr/local/share/vpmm /usr/local/share/vpmm
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
STOPSIGNAL SIGTERM
# Asks the port and the address that the program was told to serve metrics on: 503 from /-/ready is a driver that has
# failed for good, or a pool whose thread is stuck. Told of no port, or to choose one, the program is well as long as it
# runs.
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s --retries=3 CMD ["bash", "-c", "\
port=$(sed -zEn 's/^--metrics(-port)?=//p; /^--metrics(-port)?$/{n;p}' /proc/1/cmdline | tr -d '\\0'); \
[ \"${port:-0}\" != 0 ] || exit 0; \
address=$(sed -zEn 's/^--metrics-address=//p; /^--metrics-address$/{n;p}' /proc/1/cmdline | tr -d '\\0'); \
case $address in ''|0.0.0.0|::) address=127.0.0.1;; esac; \
exec 3<>\"/dev/tcp/$address/$port\" && printf 'GET /-/ready HTTP/1.0\\r\\n\\r\\n' >&3 && grep -q '^HTTP/1.* 200 ' <&3"]
ARG BASE_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"

FROM runtime AS server
COPY --from=build /out/usr/local/bin/vpmm-server /usr/local/bin/
LABEL org.opencontainers.image.title="vpmm-server" \
      org.opencontainers.image.description="A multi-threaded inference server in small, on vpmm"
ENTRYPOINT ["/usr/local/bin/vpmm-server"]
CMD ["--driver", "sim"]

FROM runtime AS stress
COPY --from=build /out/usr/local/bin/vpmm-stress /usr/local/bin/
LABEL org.opencontainers.image.title="vpmm-stress" \
      org.opencontainers.image.description="Tests a GPU's memory management through vpmm"
ENTRYPOINT ["/usr/local/bin/vpmm-stress"]
CMD ["--driver", "cuda", "--device", "all", "--metrics", "9400", "--metrics-address", "0.0.0.0"]
