"""A client's login: its principal, its expiry (KIP-368), and tokens without a Kafka header.

SASL tokens are relayed between client and Kafka; none is stored. After SaslHandshake v1 each token is a
SaslAuthenticate request. After v0 it is *bare*: a length and the token, and so is the answer. Upstream both are
SaslAuthenticate requests, because only their responses contain why a login failed and how long it lasts. They do not
show whether a login is complete, and so whether a client of v0 sends a token or a request next: that follows from the
mechanism (`_is_complete`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fencepost_proxy.errors import ClientProtocolError, ProtocolError, UpstreamProtocolError, error_name
from fencepost_proxy.session.connection.proofs import Proofs
from fencepost_proxy.session.connection.read_holds import ReadHolds
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.cutter import INT32, REQUEST_PREFIX, CutterState
from fencepost_proxy.session.frames.messages import LoginFailed
from fencepost_proxy.session.frames.pending_responses import Answer, PendingResponse
from fencepost_proxy.wire.apis import SASL_AUTHENTICATE, SASL_HANDSHAKE
from fencepost_proxy.wire.control import (
    decode_request,
    decode_response,
    encode_request_frame,
    parse_request_header,
    parse_response_header,
)
from fencepost_proxy.wire.schema import Message

#: Upstream versions: handshake v1 is followed by requests, whose v1 contains the lifetime of a login (Kafka 2.2).
_HANDSHAKE, _AUTHENTICATE = 1, 1
_FOR_EVER = float("inf")
#: A login is treated as expired this part of its lifetime, and at most this many seconds, before Kafka ends it, because
#: requests take time to arrive. Clients log in again earlier: Java's at 95 % of the time at the latest.
_EARLIER = 0.03
_EARLIER_SECONDS_MAX = 1.0
_SCRAM: Final = frozenset({"SCRAM-SHA-256", "SCRAM-SHA-512"})
#: Mechanisms whose completion the proxy recognizes.
_TAKEN_BARE: Final = _SCRAM | {"PLAIN", "OAUTHBEARER", "GSSAPI"}
_ERROR_CHARACTERS_MAX: Final = 200
#: Limit for one frame of a login. Kafka's own limit is 512 KiB (`sasl.server.max.receive.size`).
LOGIN_BYTES_MAX: Final = 1 << 20


@dataclass(slots=True)
class Login:
    """One login of a client, from its SaslHandshake on. `answers` – how many tokens Kafka has answered."""

    mechanism: str
    client_id: str | None
    principal: str = ""
    answers: int = 0


@dataclass(slots=True, eq=False)
class Logins:
    _state: ConnectionState
    _holds: ReadHolds
    _queue: ResponseQueue
    _proofs: Proofs
    login: Login | None = None
    tokens: Login | None = None

    def request(self, api_key: int, version: int, correlation_id: int, frame: memoryview) -> None:
        """SaslHandshake or SaslAuthenticate, while nothing else is in progress."""
        client_id, message = _read(api_key, version, frame)
        pending_response = PendingResponse(api_key, version, correlation_id, Answer.MADE_FROM_RESPONSE)
        request = bytes(frame)
        if api_key == SASL_HANDSHAKE:
            login = Login(message.mechanism, client_id)
            pending_response.on_response = lambda answer: self._handshaken(pending_response, login, answer)
            request = REQUEST_PREFIX.pack(api_key, _HANDSHAKE, correlation_id) + request[REQUEST_PREFIX.size :]
            if version < _HANDSHAKE:
                self._expect_tokens(login)
        else:
            login = self.login or Login("", client_id)
            _record_principal(login, bytes(message.auth_bytes))
            queried_at = self._state.now
            pending_response.on_response = lambda answer: self._authenticated(
                pending_response, login, answer, queried_at
            )
        self._send_login(pending_response, INT32.pack(len(request)) + request)

    def _expect_tokens(self, login: Login) -> None:
        """Read the next token only after Kafka has answered (`ReadHolds.waits_for`): it may be a request again."""
        self.tokens, self._holds.waits_for = login, "Kafka's answer to a login token"
        self._state.client.state = CutterState.TOKEN

    def token(self, login: Login, token: memoryview) -> None:
        auth_bytes = bytes(token)
        _record_principal(login, auth_bytes)
        pending_response = PendingResponse(SASL_AUTHENTICATE, _AUTHENTICATE, login.answers, Answer.MADE_FROM_RESPONSE)
        queried_at = self._state.now
        pending_response.on_response = lambda answer: self._authenticated_bare(
            pending_response, login, answer, queried_at
        )
        self._expect_tokens(login)
        message = Message(auth_bytes=auth_bytes)
        self._send_login(
            pending_response,
            encode_request_frame(
                SASL_AUTHENTICATE, _AUTHENTICATE, pending_response.correlation_id, login.client_id, message
            ),
        )

    def _send_login(self, pending_response: PendingResponse, request: bytes) -> None:
        self._proofs.forget()
        self._queue.expect(pending_response)
        self._queue.forward(pending_response, request)

    def _handshaken(self, pending_response: PendingResponse, login: Login, frame: memoryview) -> None:
        self.login = login
        answer = _decoded(SASL_HANDSHAKE, _HANDSHAKE, frame)
        bare = self.tokens is login
        if bare:
            self._holds.waits_for = ""
        if answer is not None and answer.error_code:
            enabled = ", ".join(answer.mechanisms) or "no logins"
            self._login_failed(login, f"{error_name(answer.error_code)}: this listener takes {enabled}")
        if bare and (answer is None or answer.error_code):
            self._expect_requests()
        elif bare and login.mechanism not in _TAKEN_BARE:
            raise ClientProtocolError(
                f"SaslHandshake v0 with {login.mechanism}: the proxy cannot detect when such a login is complete; "
                "use a client that supports SaslHandshake v1"
            )
        self._queue.end(pending_response, [INT32.pack(len(frame)), frame])

    def _expect_requests(self) -> None:
        self.tokens, self._holds.waits_for = None, ""
        self._state.client.state = CutterState.START

    def _authenticated(
        self, pending_response: PendingResponse, login: Login, frame: memoryview, queried_at: float
    ) -> None:
        self._record_answer(login, _decoded(SASL_AUTHENTICATE, pending_response.version, frame), queried_at)
        self._queue.end(pending_response, [INT32.pack(len(frame)), frame])

    def _authenticated_bare(
        self, pending_response: PendingResponse, login: Login, frame: memoryview, queried_at: float
    ) -> None:
        answer = _decoded(SASL_AUTHENTICATE, pending_response.version, frame)
        if answer is None:
            raise UpstreamProtocolError("unreadable response to SaslAuthenticate")
        self._record_answer(login, answer, queried_at)
        if answer.error_code:
            self._queue.close("Kafka refused the client's login")  # after v0, Kafka closes without a response
            return
        self._holds.waits_for = ""
        token = bytes(answer.auth_bytes)
        if _is_complete(login, token):
            self._expect_requests()
        silent = login.mechanism == "GSSAPI" and not token  # the client expects no answer to its last token
        self._queue.end(pending_response, [] if silent else [INT32.pack(len(token)), token])

    def _record_answer(self, login: Login, answer: Message | None, queried_at: float) -> None:
        login.answers += 1
        if answer is None or not answer.error_code:
            self._state.login_ends = queried_at + _lasts_seconds(answer)
            if answer is not None and _is_complete(login, bytes(answer.auth_bytes)):
                self._state.principal = login.principal or None
            return
        self._login_failed(login, answer.error_message or error_name(answer.error_code))

    def _login_failed(self, login: Login, reason: str) -> None:
        self._state.commands.append(LoginFailed(login.mechanism, login.principal, reason[:_ERROR_CHARACTERS_MAX]))


def _read(api_key: int, version: int, frame: memoryview) -> tuple[str | None, Message]:
    """The client's id and its request. Kafka refuses unreadable ones."""
    try:
        header = parse_request_header(frame)
        return header.client_id, decode_request(api_key, version, frame[header.body_offset :])
    except ProtocolError:
        return None, Message(mechanism="", auth_bytes=b"")


def _decoded(api_key: int, version: int, frame: memoryview) -> Message | None:
    try:
        start = parse_response_header(frame, api_key, version).body_offset
        return decode_response(api_key, version, frame[start:])
    except ProtocolError:
        return None


def _is_complete(login: Login, token: bytes) -> bool:
    """Whether Kafka's answer without an error, with this token, is the last one."""
    if login.mechanism in _SCRAM:
        return login.answers == 2
    return login.mechanism == "PLAIN" or not token


def _record_principal(login: Login, token: bytes) -> None:
    """Record the user name in a login's first token. With other mechanisms all of it is secret."""
    if login.answers:
        return
    if login.mechanism == "PLAIN":  # RFC 4616: authorization identity, NUL, user, NUL, password
        parts = token.split(b"\0")
        login.principal = parts[1].decode(errors="replace") if len(parts) == 3 else ""
    elif login.mechanism in _SCRAM:  # RFC 5802: two fields about the channel, user, nonce
        named = [each for each in token.split(b",")[2:] if each.startswith(b"n=")]
        name = named[0][2:].decode(errors="replace") if named else ""
        login.principal = name.replace("=2C", ",").replace("=3D", "=")


def _lasts_seconds(answer: Message | None) -> float:
    """A little less than Kafka's lifetime, from the time of the request. An unreadable response sets no expiry."""
    lifetime_ms: int = getattr(answer, "session_lifetime_ms", 0)
    if lifetime_ms <= 0:
        return _FOR_EVER
    seconds = lifetime_ms / 1000
    return seconds - min(seconds * _EARLIER, _EARLIER_SECONDS_MAX)
