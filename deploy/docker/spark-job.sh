#!/usr/bin/env bash
# Runs bulk_load, stream or verify of spark_jobs/ with the proxy's address, or any other command unchanged.
set -euo pipefail

case ${1:-} in
    bulk_load | stream | verify)
        exec spark-submit --master "${SPARK_MASTER:-local[*]}" --conf spark.log.level=WARN \
            "/opt/fencepost/jobs/$1.py" --bootstrap "${FENCEPOST_BOOTSTRAP:?the address of the proxy}" "${@:2}"
        ;;
    "")
        echo "no job given: bulk_load ARGUMENTS, stream ARGUMENTS, verify ARGUMENTS (--help lists them), or any command" >&2
        exit 2
        ;;
    *)
        exec "$@"
        ;;
esac
