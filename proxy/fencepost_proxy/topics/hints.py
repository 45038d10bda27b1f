"""What an operator can do if the state topic is unusable or out of reach."""

from __future__ import annotations

from typing import Final

_DECIDE: Final = (
    "Decide which topics need checks: a proxy that still runs lists the current ones (fencepost topics). Then"
)
RESTART: Final = f"{_DECIDE} restart every proxy, and switch the checks on again (kafka-configs)."
RECREATE: Final = (
    f"{_DECIDE} stop every proxy, delete the state topic directly in Kafka, start the proxies, and switch the checks "
    "on again (kafka-configs)."
)
UNREADABLE: Final = (
    f"Another client wrote to it or changed that config: restore the config, and deny WRITE to others. {RECREATE}"
)
COPIED: Final = (
    "Check that upstream is the right cluster. If MirrorMaker copied the topic: exclude it there (topics.exclude), "
    "delete the copy while no proxy runs here, then start the proxies."
)
NEWER_VERSION: Final = (
    "Update this proxy to the newest version in use for this cluster, or delete the config of that topic with "
    "kafka-configs through a proxy of that version."
)
UNKNOWN_CONFIGS: Final = (
    "Update this proxy to the newest version in use for this cluster. After a rollback, delete the configs: "
    "kafka-configs --alter --topic TOPIC --delete-config NAME, through any proxy."
)
NOT_OURS: Final = (
    "Check which client created that topic. If nothing uses it, delete it directly in Kafka. The proxy recovers "
    "automatically."
)
CLEANUP_POLICY: Final = (
    "Run kafka-configs.sh --bootstrap-server KAFKA:9092 --alter --entity-type topics --entity-name TOPIC "
    "--add-config cleanup.policy=compact (state_topic names the topic). The proxy recovers automatically."
)
PROXY: Final = "Upstream seems to be a proxy: set it to Kafka's own brokers."
RELEASE: Final = "Use a Kafka release that this version is tested with. Nothing was lost."
CRASHED: Final = "Restart this process, and report the stack trace in the log. Meanwhile clients use another proxy."
NEW: Final = (
    "Wait a minute: a busy broker reports a new topic late. If it persists: are all brokers up, and may the proxy's "
    "user CREATE and DESCRIBE it? Run fencepost check."
)
NOT_STORED: Final = (
    "Are at least min.insync.replicas replicas of the state topic in sync? Start the missing brokers. The proxy "
    "recovers automatically."
)
NOT_READ: Final = (
    "Does the state topic have a leader, can this machine reach it, and may the proxy's user READ it? Run fencepost "
    "check."
)
UNCONFIRMED: Final = (
    "Enough replicas must respond to confirm the leader. Start the missing brokers, or let this machine reach them. "
    "The proxy recovers automatically."
)
