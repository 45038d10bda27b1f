"""The proxy's own SASL login at a broker: SaslHandshake and SaslAuthenticate, sent with a given `query` function.

kafka-python implements the mechanisms; its classes only map bytes to bytes. Client logins are relayed and do not use
this module.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from fencepost_proxy.cluster import hints
from fencepost_proxy.config import ControlSasl
from fencepost_proxy.config.secrets import secret
from fencepost_proxy.errors import Error, error_name
from fencepost_proxy.wire.apis import SASL_AUTHENTICATE, SASL_HANDSHAKE
from fencepost_proxy.wire.schema import Message

#: A login takes one or two steps; this bounds a faulty broker.
_STEPS_MAX: Final = 8
_STATED_MAX: Final = 200
#: Handshake v1 is followed by SaslAuthenticate requests, not bare tokens. SaslAuthenticate v1 has the session lifetime.
HANDSHAKE_VERSION: Final = 1
AUTHENTICATE_VERSION: Final = 1


class LoginFailed(Exception):
    """`error_code`: Kafka's error code, if any."""

    def __init__(self, reason: str, error_code: int | None = None, hint: str = hints.CREDENTIALS) -> None:
        super().__init__(reason)
        self.error_code = error_code
        self.hint = hint


class _Mechanism(Protocol):
    def auth_bytes(self) -> bytes: ...
    def receive(self, auth_bytes: bytes) -> object: ...
    def is_done(self) -> bool: ...
    def is_authenticated(self) -> bool: ...


def _mechanism(sasl: ControlSasl) -> _Mechanism:
    """Raises `ConfigError` if the secret's file is not readable."""
    # Imported on the first login: these modules import much.
    from kafka.net.sasl.oauth import AbstractTokenProvider, SaslMechanismOAuth  # noqa: PLC0415
    from kafka.net.sasl.plain import SaslMechanismPlain  # noqa: PLC0415
    from kafka.net.sasl.scram import SaslMechanismScram  # noqa: PLC0415

    if sasl.mechanism == "OAUTHBEARER":
        assert sasl.token_file is not None
        bearer = secret("control_sasl.token_file", sasl.token_file)

        class Token(AbstractTokenProvider):  # type: ignore[misc]
            def token(self) -> str:
                return bearer

        oauth: _Mechanism = SaslMechanismOAuth(sasl_oauth_token_provider=Token())
        return oauth
    assert sasl.username is not None
    assert sasl.password_file is not None
    name, made = sasl.username, SaslMechanismPlain
    if sasl.mechanism != "PLAIN":
        # RFC 5802: "=" and "," must be escaped in names.
        name, made = name.replace("=", "=3D").replace(",", "=2C"), SaslMechanismScram
    password = secret("control_sasl.password_file", sasl.password_file)
    mechanism: _Mechanism = made(sasl_mechanism=sasl.mechanism, sasl_plain_username=name, sasl_plain_password=password)
    return mechanism


def _short(text: str) -> str:
    """Clip broker texts for logs and pages."""
    return text if len(text) <= _STATED_MAX else f"{text[:_STATED_MAX]}…"


#: (API key, version, message) -> response.
Query = Callable[[int, int, Message], Awaitable[Message]]


async def log_in(query: Query, sasl: ControlSasl) -> float:
    """Log in; return the session lifetime in seconds, 0 if unlimited.

    Raises `LoginFailed`, `ConfigError`, and errors of `query`.
    """
    answer = await query(SASL_HANDSHAKE, HANDSHAKE_VERSION, Message(mechanism=sasl.mechanism))
    login = f"SASL {sasl.mechanism}" + (f" as {sasl.username}" if sasl.username else "")
    if answer.error_code:
        enabled = _short(", ".join(answer.mechanisms)) or "nothing"
        why = f"this listener takes {enabled}"
        if answer.error_code == Error.ILLEGAL_SASL_STATE:
            why = "this listener takes no logins; use another one in upstream, or omit control_sasl"
        elif answer.error_code != Error.UNSUPPORTED_SASL_MECHANISM:
            why = f"SaslHandshake returned {error_name(answer.error_code)}"
        raise LoginFailed(f"{login}: {why} (control_sasl.mechanism)", answer.error_code, hints.MECHANISM)
    mechanism = _mechanism(sasl)
    for _ in range(_STEPS_MAX):
        answer = await query(
            SASL_AUTHENTICATE, AUTHENTICATE_VERSION, Message(auth_bytes=_stated(login, mechanism.auth_bytes))
        )
        if answer.error_code:
            raise LoginFailed(
                f"{login}: {_short(answer.error_message or error_name(answer.error_code))}", answer.error_code
            )
        reported = bytes(answer.auth_bytes)
        _stated(login, lambda reported=reported: mechanism.receive(reported))  # type: ignore[misc]
        if mechanism.is_done():
            if not mechanism.is_authenticated():
                raise LoginFailed(f"{login}: Kafka ended the login without authenticating itself")
            lifetime_ms: int = answer.session_lifetime_ms
            return lifetime_ms / 1000
    raise LoginFailed(f"{login}: not finished after {_STEPS_MAX} steps")


def _stated(login: str, what: Callable[[], Any]) -> Any:
    """Call `what`; an error means that the broker's proof or message is invalid."""
    try:
        return what()
    except (ValueError, KeyError, IndexError) as error:
        raise LoginFailed(f"{login}: invalid message from the broker: {_short(str(error))}") from error
