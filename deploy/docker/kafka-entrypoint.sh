#!/usr/bin/env bash
# Starts Kafka in KRaft mode, configured like the official image: KAFKA_A_B=c is a.b=c in server.properties (__ is _,
# ___ is -), CLUSTER_ID names the cluster, KAFKA_HEAP_OPTS and KAFKA_OPTS are for the JVM. There are no defaults: Kafka
# reports a missing setting.
set -euo pipefail

properties=/tmp/server.properties
while IFS= read -r -d '' variable; do
    name=${variable%%=*}
    case $name in
        KAFKA_HEAP_OPTS | KAFKA_OPTS) ;;
        KAFKA_*)
            key=${name#KAFKA_}
            key=${key,,}
            key=${key//___/-}
            key=${key//__/$'\1'}
            key=${key//_/.}
            printf '%s=%s\n' "${key//$'\1'/_}" "${variable#*=}"
            ;;
    esac
done < <(env -0) > "$properties"

# Unquoted where they are used: several options in one variable.
# shellcheck disable=SC2206
java=(java ${KAFKA_HEAP_OPTS:--Xms256m -Xmx1g} ${KAFKA_OPTS:-} -cp '/opt/kafka/libs/*'
    -Dlog4j2.configurationFile=/opt/kafka/log4j2.properties -Dlog4j.configuration=file:/opt/kafka/log4j.properties
    -Dfencepost.log.target=SYSTEM_OUT -Dfencepost.log.stream=System.out)

"${java[@]}" -Dfencepost.log.level=WARN kafka.tools.StorageTool format --ignore-formatted \
    --config="$properties" --cluster-id="${CLUSTER_ID:?any 22 characters of base64url, the same for as long as the data lives}"
exec "${java[@]}" -Dfencepost.log.level=INFO -server -XX:+UseG1GC -XX:MaxGCPauseMillis=20 kafka.Kafka "$properties"
