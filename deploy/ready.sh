#!/bin/bash
# Whether the process of this container takes requests: the health check of the images, status 0 or 1.
#   dynamo-ready [URL]
# Without URL: /ready of a frontend at DYN_HTTP_PORT (8000), or /health of a worker where DYN_SYSTEM_PORT is set.
# Name the URL where a flag sets the port. https:// needs python3 in the image; the certificate is not checked, as the
# connection does not leave the container.
set -u
if [ -n "${DYN_SYSTEM_PORT:-}" ]; then
  default="http://127.0.0.1:$DYN_SYSTEM_PORT/health"
elif [ -n "${DYN_TLS_CERT_PATH:-}" ]; then
  default="https://127.0.0.1:${DYN_HTTP_PORT:-8000}/ready"
else
  default="http://127.0.0.1:${DYN_HTTP_PORT:-8000}/ready"
fi
url=${1:-$default}
if [[ $url == https://* ]]; then
  exec python3 -c '
import ssl, sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=3, context=ssl._create_unverified_context())
except urllib.error.URLError as error:
    sys.exit(f"{sys.argv[1]}: {error}")
' "$url"
fi
if ! [[ $url =~ ^http://([^/:]+):([0-9]+)(/.*)$ ]]; then
  echo "dynamo-ready: $url is not http://HOST:PORT/PATH" >&2
  exit 1
fi
host=${BASH_REMATCH[1]} port=${BASH_REMATCH[2]} path=${BASH_REMATCH[3]}
# No program for HTTP is in the images; bash itself opens the connection.
if ! exec 3<> "/dev/tcp/$host/$port"; then
  echo "dynamo-ready: nothing listens at $host:$port" >&2
  exit 1
fi
printf 'GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n' "$path" "$host:$port" >&3
if ! read -r -t 3 _ status _ <&3; then
  echo "dynamo-ready: $url does not answer" >&2
  exit 1
fi
if [ "$status" != 200 ]; then
  echo "dynamo-ready: $url answers $status" >&2
  exit 1
fi
