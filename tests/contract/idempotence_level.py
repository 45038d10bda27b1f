"""44 IDEMPOTENCE_REQUIRED, 31 IDEMPOTENCE_NOT_PERMITTED, and `safe` where Kafka accepts no producer id."""

from tests.contract.rows import (
    CLUSTER_AUTHORIZATION_FAILED,
    INVALID_RECORD,
    INVENTED,
    NO_SESSION,
    OLD_FORMAT,
    ONLY_MODELLED,
    POLICY_VIOLATION,
    appended,
    batch,
    from_kafka,
    mismatch,
    refused,
    row,
    send,
)

_REQUIRED = refused(POLICY_VIOLATION, "IDEMPOTENCE_REQUIRED {where}: ")
_NOT_PERMITTED = refused(CLUSTER_AUTHORIZATION_FAILED, "IDEMPOTENCE_NOT_PERMITTED {where}: ", log_start=-1)
_NAMED, _UNNAMED = batch(b"v", producer="p"), batch(b"v")
_OFF, _SAFE, _LEVEL_REQUIRED = b"\0", b"\1", b"\2"

WITHOUT = NO_SESSION
ROWS = [
    row("not-required", "safe", send(_UNNAMED, appended(0))),
    *(
        row(f"required-in-version-{version}", "idempotent", send(_UNNAMED, _REQUIRED, version=version), length=1)
        for version in (5, 7, 8, 12)
    ),
    *(
        row(f"required-by-the-topic/{topic}", topic, send(_UNNAMED, _REQUIRED), length=1)
        for topic in ("idempotent", "checked-and-idempotent")
    ),
    row(
        "required-and-stated",
        "idempotent",
        send(_NAMED, appended(0)),
        send(batch(b"w", producer="p", sequence=1), appended(1)),
    ),
    row(
        "required-with-an-expectation",
        "checked-and-idempotent",
        send(batch(b"v", expected=1, producer="p"), mismatch(1, 0)),
        send(batch(b"v", expected=0, producer="q"), appended(0)),
    ),
    *(
        row(f"required-by-the-request/{topic}", topic, send(_UNNAMED, _REQUIRED, level=_LEVEL_REQUIRED))
        for topic in ("plain", "safe", "checked")
    ),
    *(
        row(f"request-cannot-weaken-the-topic/{level[0]}", "idempotent", send(_UNNAMED, _REQUIRED, level=level))
        for level in (_OFF, _SAFE)
    ),
    *(
        row(f"level-of-the-request-is-accepted/{level[0]}", "plain", send(_NAMED, appended(0), level=level))
        for level in (_OFF, _SAFE, _LEVEL_REQUIRED)
    ),
    *(
        row(
            f"unreadable-level/{level.hex() or 'empty'}",
            "plain",
            send(_NAMED, refused(INVALID_RECORD, ""), level=level),
        )
        for level in (b"", b"\3", b"\xff", b"\0\0")
    ),
    *(
        row(
            f"invented-producer-id/{topic}",
            topic,
            send(batch(b"v", producer=INVENTED), _NOT_PERMITTED),
            without={} if topic == "required" else NO_SESSION,
        )
        for topic in ("checked", "required", "idempotent", "checked-and-idempotent", "counted")
    ),
    *(
        row(f"invented-producer-id-is-removed/{topic}", topic, send(batch(b"v", producer=INVENTED), appended(0)))
        for topic in ("safe", "checked-and-safe")
    ),
    row(
        "old-format/safe",
        "safe",
        send(_NAMED, appended(0)),
        send(batch(b"w", producer="p", sequence=1), appended(1)),
        old_format=True,
        without=ONLY_MODELLED,
    ),
    row(
        "old-format/required",
        "idempotent",
        send(_NAMED, from_kafka(OLD_FORMAT)),
        old_format=True,
        without=ONLY_MODELLED,
    ),
    *(
        row(
            f"old-format/request-{level[0]}",
            "plain",
            send(_NAMED, reply, level=level),
            old_format=True,
            without=ONLY_MODELLED,
        )
        for level, reply in (
            (_OFF, from_kafka(OLD_FORMAT)),
            (_SAFE, appended(0)),
            (_LEVEL_REQUIRED, from_kafka(OLD_FORMAT)),
        )
    ),
    row(
        "old-format/request-strengthens-safe",
        "safe",
        send(_NAMED, from_kafka(OLD_FORMAT), level=_LEVEL_REQUIRED),
        old_format=True,
        without=ONLY_MODELLED,
    ),
]
