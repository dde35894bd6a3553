# The program alone. The release workflow unpacks its binaries beside this file and builds for both machines:
#   docker run --rm -v limits:/data ghcr.io/zeroae/zae-limiter acquire key-1 gpt-4 -c rpm:1
FROM alpine:3 AS binaries
ARG VERSION
ARG TARGETARCH
COPY zae-limiter-${VERSION}-x86_64-unknown-linux-gnu/zae-limiter /amd64/zae-limiter
COPY zae-limiter-${VERSION}-aarch64-unknown-linux-gnu/zae-limiter /arm64/zae-limiter
RUN cp "/${TARGETARCH}/zae-limiter" /zae-limiter && mkdir /data

FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=binaries /zae-limiter /usr/local/bin/zae-limiter
COPY --from=binaries --chown=nonroot:nonroot /data /data
ENV ZAEL_STORE=sqlite:/data/limits.db
VOLUME /data
ENTRYPOINT ["zae-limiter"]
CMD ["--help"]
