#!/usr/bin/env bash
# bulk_load, stream and verify are the jobs of spark_jobs/, given the proxy's address; anything else is run as it is.
set -euo pipefail

case ${1:-} in
    bulk_load | stream | verify)
        job=$1
        shift
        exec spark-submit --master "${SPARK_MASTER:-local[*]}" --conf spark.log.level=WARN \
            "/opt/fencepost/jobs/$job.py" --bootstrap "${FENCEPOST_BOOTSTRAP:?the address of the proxy}" "$@"
        ;;
    "")
        echo "say which job: bulk_load ARGUMENTS, stream ARGUMENTS, verify ARGUMENTS (--help lists them), or any command" >&2
        exit 2
        ;;
    *)
        exec "$@"
        ;;
esac
