#!/usr/bin/env bash
# Builds all images without a registry, and without a network inside the builds. Needs .venv (any make target that runs
# the project makes it) and a local image to start from, see deploy/docker/README.md.
#
#     FENCEPOST_BASE_IMAGE=fencepost-base:local deploy/docker/build-local.sh
#
# FENCEPOST_BASE_IMAGE: an image with the Python of .venv (same minor version), venv, Java 17+ and bash.
# FENCEPOST_KAFKA: a Kafka release with a lock file; default: that of docker-compose.yml.
# FENCEPOST_NATIVE=off: without the native module, which is built on this machine and needs Rust.
# Writes the images' names into .env, where docker-compose reads them.
set -euo pipefail
cd "$(dirname "$0")/../.."

base=${FENCEPOST_BASE_IMAGE:?name the local image to build from, see deploy/docker/README.md}
python=${PYTHON:-.venv/bin/python}
fetched=build/docker
kafka=${FENCEPOST_KAFKA:-$(sed -n 's|.*apache/kafka:\([0-9.]*\)}.*|\1|p' docker-compose.yml)}

fail() {
    echo "build-local: $1" >&2
    exit 1
}

[ -x "$python" ] || fail "$python is missing; 'make .venv/.installed-run' makes it"
minor='import sys; print("%d.%d" % sys.version_info[:2])'
# pip downloads compiled packages for the Python version that runs it.
inside=$(docker run --rm --network none --entrypoint python3 "$base" -c "$minor") \
    || fail "no python3 in image $base, or no such image"
outside=$("$python" -c "$minor")
[ "$inside" = "$outside" ] || fail "$base has Python $inside, but $python is $outside; name another PYTHON or base"
docker run --rm --network none --entrypoint java "$base" -version 2>/dev/null || fail "no java in image $base"

for image in proxy spark; do
    # Contains the hash of the lock file: a second run with the same lock fetches nothing.
    fetched_lock=$fetched/$image/fetched
    lock=$(sha256sum < locks/$image.txt)
    if [ "$(cat $fetched_lock 2>/dev/null)" != "$lock" ]; then
        echo "build-local: fetching what locks/$image.txt pins"
        rm -rf "${fetched:?}/$image"
        mkdir -p $fetched/$image
        "$python" -m pip download --disable-pip-version-check --require-hashes -r locks/$image.txt -d $fetched/$image
        echo "$lock" > $fetched_lock
    fi
done

native=$fetched/native
rm -rf $native
mkdir -p $native
if [ "${FENCEPOST_NATIVE:-on}" != off ]; then
    echo "build-local: building the native module"
    # Links for an older C library than this machine's: that of the base image may be older.
    "$python" -m pip install -q --disable-pip-version-check --require-hashes -r locks/dist.txt
    "$python" hatch_build.py --required --to $native/fencepost_native.abi3.so \
        || fail "without the native module the images would be slower; FENCEPOST_NATIVE=off builds them in pure Python"
    # The builds compare it with theirs.
    (cd native && find Cargo.lock Cargo.toml src -type f | LC_ALL=C sort | xargs sha256sum | sha256sum) > $native/sources
fi

echo "build-local: fetching the jars of Kafka $kafka and Spark"
"$python" - "$fetched" "$kafka" <<'PYTHON'
import shutil, sys
from pathlib import Path

from fencepost_dev.jars import SPARK_LOCK, fetch, release

fetched = Path(sys.argv[1])
kafka, connector = fetched / "kafka", fetched / "spark" / "jars"
for directory in (kafka, connector):
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
for jar in fetch(release(sys.argv[2]).broker_lock):
    shutil.copyfile(jar, kafka / jar.name)  # not its mode: a cache is private, an image's user is another
for jar in fetch(SPARK_LOCK):
    shutil.copytree(jar.parent, connector / jar.parent.name)  # the cache's own layout
PYTHON

build() {
    echo "build-local: building $2"
    docker build --network none --build-arg BASE="$base" "${@:3}" -f "deploy/docker/$1" -t "$2" .
}
native_arguments=(--build-arg RUST="$base" --build-arg FENCEPOST_NATIVE="${FENCEPOST_NATIVE:-on}")
build Dockerfile fencepost:local "${native_arguments[@]}"
build Dockerfile.kafka fencepost-kafka:local
build Dockerfile.spark fencepost-spark:local "${native_arguments[@]}"

settings="FENCEPOST_BASE_IMAGE=$base
FENCEPOST_RUST_IMAGE=$base
FENCEPOST_KAFKA_IMAGE=fencepost-kafka:local"
others=$(grep -vE '^FENCEPOST_(BASE|RUST|KAFKA)_IMAGE=' .env 2>/dev/null || true)
echo "${others:+$others
}$settings" > .env
echo "build-local: done, .env names the images. Now: docker-compose up -d"
