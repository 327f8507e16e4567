# vpmm-server on the simulated GPU:  docker build -t vpmm . && docker run --rm vpmm
# libvpmm.a and its headers are in /usr/local too.
FROM debian:bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends \
    build-essential cmake pkg-config libck-dev libmicrohttpd-dev libgnutls28-dev zlib1g-dev libcrypt-dev
WORKDIR /src
COPY tests/setup.sh tests/setup.sh
RUN bash -ec '. tests/setup.sh; need_cuda_h; cp "$cuda_include_dir/cuda.h" /opt/'
COPY . .
RUN cmake -S . -B /build -DCUDA_INCLUDE_DIR=/opt -DVPMM_BUILD_TESTS=OFF \
    -DVPMM_REQUESTS_CSV=/usr/local/share/vpmm/requests.csv \
 && cmake --build /build --parallel "$(nproc)" && DESTDIR=/out cmake --install /build --strip

FROM debian:bookworm
RUN apt-get update && apt-get install -y --no-install-recommends libmicrohttpd12 && rm -rf /var/lib/apt/lists/*
COPY --from=build /out/usr/local /usr/local
USER nobody
ENTRYPOINT ["vpmm-server"]
CMD ["--driver", "sim"]
