"""Logins: clients' logins through a session, and the proxy's login, step by step."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fencepost_proxy.cluster.sasl import LoginFailed, log_in
from fencepost_proxy.config import ControlSasl
from fencepost_proxy.errors import ClientProtocolError, ConfigError
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.wire.apis import SASL_AUTHENTICATE, SASL_HANDSHAKE
from fencepost_proxy.wire.control import decode_request, encode_response_frame, parse_request_header
from fencepost_proxy.wire.produce import PartitionResult
from fencepost_proxy.wire.schema import Message
from tests.support.sequencer_calls import Call
from tests.unit.test_session import HEARTBEAT, Talk, expecting, produce, produced, read, request, response

HANDSHAKE = request(SASL_HANDSHAKE, 1, 7, b"\0\5PLAIN")
AUTHENTICATE = request(SASL_AUTHENTICATE, 1, 8, b"\0\0\0\x04\0a\0b")

# --- clients' ---------------------------------------------------------------------------------------------------------


class Waiting(Talk):
    """Keeps ReadClient apart: a request that waits repeats it at each try."""

    reads = True

    def call(self, function: Callable[..., list[m.Command]], *arguments: Any) -> None:
        super().call(function, *arguments)
        for each in self.commands:
            if isinstance(each, m.ReadClient):
                self.reads = each.on
        self.commands = [each for each in self.commands if not isinstance(each, m.ReadClient)]


def relays(talk: Talk, query: bytes, answer: bytes) -> None:
    talk.client(query)
    assert talk.upstream() == query
    talk.kafka(answer)
    assert talk.answer() == answer


def logs_in(talk: Talk, answer: bytes, version: int = 2) -> None:
    relays(talk, request(SASL_AUTHENTICATE, version, 8, b"\0\0\0\0\0"), answer)


@pytest.fixture
def talk() -> Waiting:
    return Waiting()


def test_login_waits_for_possible_resends(talk: Waiting) -> None:
    # Given: an append whose fence Kafka may refuse, and a login right after it.
    pending = talk.sends()
    talk.client(HANDSHAKE)
    talk.silent()
    assert not talk.reads

    # When: Kafka refuses it, and it is admitted again.
    talk.kafka(produced(("checked-a", 0, 45, -1)))
    talk.next(Call)
    talk.admit(pending)
    talk.sent(pending)

    # Then: it is sent, and nothing of the login.
    assert HANDSHAKE not in talk.upstream()
    talk.kafka(produced(("checked-a", 0, 0, 5)))
    assert talk.next(Call).name == "answered"
    talk.silent()

    # And: the login is sent once the append is answered.
    talk.complete(pending, PartitionResult(0, 0, 5, -1, 0))
    assert {type(each) for each in talk.commands} == {m.ToUpstream, m.ToClient}
    talk.commands.sort(key=lambda each: isinstance(each, m.ToClient))
    assert talk.upstream() == HANDSHAKE
    assert read(talk.answer()) == {("checked-a", 0): (0, 5, None)}
    assert talk.reads


def test_login_waits_for_relayed_requests_but_delays_none(talk: Waiting) -> None:
    query, after = request(HEARTBEAT, 4, 1), request(HEARTBEAT, 4, 9)
    taken, out = talk.session.fast_path.take_up(memoryview(query + HANDSHAKE), talk.now)
    assert taken == len(query)
    assert b"".join(out) == query
    talk.client(HANDSHAKE)
    talk.silent()
    assert not talk.reads

    talk.kafka(response(1))
    talk.commands.sort(key=lambda each: isinstance(each, m.ToClient))
    assert talk.upstream() == HANDSHAKE
    assert talk.answer() == response(1)
    assert talk.reads
    talk.client(after)
    assert talk.upstream() == after


def logged_in(lifetime_ms: int, version: int = 2) -> bytes:
    stated = Message(error_code=0, error_message=None, auth_bytes=b"", session_lifetime_ms=lifetime_ms)
    return encode_response_frame(SASL_AUTHENTICATE, version, 8, stated)


@pytest.mark.parametrize("version", [1, 2])
def test_appends_end_when_the_login_expires(version: int, talk: Waiting) -> None:
    # Given: a login of three seconds, and an append after two seconds, which is in flight.
    logs_in(talk, logged_in(3000, version), version)
    talk.now += 2.0
    pending = talk.sends()

    # When: another append follows after its end.
    talk.now += 1.0
    talk.client(produce(("checked-a", 0, expecting(6, b"y"))))

    # Then: that is not sent. Kafka would close the connection, and its outcome would be unknown.
    talk.silent()
    talk.kafka(produced(("checked-a", 0, 0, 5)))
    assert talk.next(Call).name == "answered"
    talk.silent()

    # And: the one before it is answered, and then the connection ends.
    talk.complete(pending, PartitionResult(0, 0, 5, -1, 0))
    assert read(talk.answer()) == {("checked-a", 0): (0, 5, None)}
    closed = talk.next(m.CloseClient)
    assert (closed.hang_up, closed.fault) == (True, None)
    assert "login expired" in closed.reason
    talk.silent()


def test_new_login_restarts_its_lifetime(talk: Waiting) -> None:
    for lifetime_ms in (3000, 10_000):
        logs_in(talk, logged_in(lifetime_ms))
        talk.now += 2.9
    talk.now += 6.0
    talk.sends()


@pytest.mark.parametrize("answer", [logged_in(0), response(8, b"what is this")])
def test_login_without_lifetime_does_not_expire(answer: bytes, talk: Waiting) -> None:
    logs_in(talk, answer)
    talk.now += 1e6
    talk.sends()


# --- clients' of SaslHandshake v0 -------------------------------------------------------------------------------------


def handshake(mechanism: str, version: int = 0) -> bytes:
    return request(SASL_HANDSHAKE, version, 7, len(mechanism).to_bytes(2, "big") + mechanism.encode())


def handshaken(error_code: int = 0) -> bytes:
    stated = Message(error_code=error_code, mechanisms=["PLAIN", "SCRAM-SHA-256"])
    return encode_response_frame(SASL_HANDSHAKE, 1, 7, stated)


def bare(token: bytes) -> bytes:
    return len(token).to_bytes(4, "big") + token


def authenticated(number: int, token: bytes = b"", error_code: int = 0, lifetime_ms: int = 0) -> bytes:
    stated = Message(
        error_code=error_code,
        error_message="Authentication failed: Invalid username or password" if error_code else None,
        auth_bytes=token,
        session_lifetime_ms=lifetime_ms,
    )
    return encode_response_frame(SASL_AUTHENTICATE, 1, number, stated)


def reported(frame: bytes) -> tuple[int, int, bytes]:
    """Of a SaslAuthenticate request: version, correlation id, token."""
    header = parse_request_header(memoryview(frame[4:]))
    assert header.api_key == SASL_AUTHENTICATE
    message = decode_request(SASL_AUTHENTICATE, header.api_version, frame[4 + header.body_offset :])
    return header.api_version, header.correlation_id, bytes(message.auth_bytes)


def begins(talk: Talk, mechanism: str, answer: bytes, version: int = 0) -> None:
    """A handshake. A client of version 0 gets version 1 of Kafka."""
    talk.client(handshake(mechanism, version))
    assert talk.upstream() == handshake(mechanism, 1)
    talk.kafka(answer)


def begun(mechanism: str, version: int = 0) -> Waiting:
    """Kafka supports the mechanism, and the client is to send its first token."""
    talk = Waiting()
    begins(talk, mechanism, handshaken(), version)
    assert talk.answer() == handshaken()
    return talk


FIRST, FINAL = b"n,,n=a=3Dlice,r=nonce", b"c=biws,r=nonce,p=proof"
LONG = b"x" * 40_000


@pytest.mark.parametrize(
    ("mechanism", "steps"),
    [
        ("PLAIN", [(b"\0alice\0pencil", b"")]),
        ("SCRAM-SHA-256", [(FIRST, b"r=nonce1,s=c2FsdA==,i=4096"), (FINAL, b"v=signature")]),
        ("OAUTHBEARER", [(LONG, b"")]),
        ("GSSAPI", [(LONG, b"token"), (b"", b"layers")]),
    ],
)
@pytest.mark.parametrize("cut", [1, 3, 1 << 20])
def test_bare_tokens_are_relayed_as_requests(mechanism: str, steps: list[tuple[bytes, bytes]], cut: int) -> None:
    talk = begun(mechanism)
    for number, (token, answer) in enumerate(steps):
        frame = bare(token)
        for at in range(0, len(frame), cut):
            taken, out = talk.session.fast_path.take_up(memoryview(frame[at : at + cut]), talk.now)
            assert (taken, out) == (0, [])
            talk.client(frame[at : at + cut])
        assert reported(talk.upstream()) == (1, number, token)
        reply = authenticated(number, answer)
        for at in range(0, len(reply), cut):
            talk.kafka(reply[at : at + cut])
        assert talk.answer() == bare(answer)
    talk.silent()
    if mechanism == "GSSAPI":  # a last token without an answer, and a request after it
        talk.client(bare(b"chosen layer") + request(HEARTBEAT, 4, 9))
        assert reported(talk.upstream()) == (1, len(steps), b"chosen layer")
        talk.silent()
        talk.kafka(authenticated(len(steps)))
    else:
        talk.client(request(HEARTBEAT, 4, 9))

    assert talk.upstream() == request(HEARTBEAT, 4, 9)
    talk.kafka(response(9))
    assert talk.answer() == response(9)
    assert talk.services.free_bytes == 1 << 20


def test_request_like_bare_token_stays_a_token() -> None:
    talk = begun("PLAIN")
    whole = request(HEARTBEAT, 4, 9)
    assert talk.session.fast_path.take_up(memoryview(whole), talk.now) == (0, [])
    talk.client(whole)
    assert reported(talk.upstream()) == (1, 0, whole[4:])


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(
    ("mechanism", "tokens", "principal"),
    [
        ("PLAIN", [b"\0alice\0pencil"], "alice"),
        ("PLAIN", [b"pencil"], ""),
        ("SCRAM-SHA-512", [FIRST, FINAL], "a=lice"),
        ("OAUTHBEARER", [b"n,,\x01auth=Bearer pencil\x01\x01", b"\x01"], ""),
    ],
)
def test_failed_login_names_its_principal(version: int, mechanism: str, tokens: list[bytes], principal: str) -> None:
    # Given: tokens that Kafka refuses at the last one.
    talk = begun(mechanism, version)

    for number, token in enumerate(tokens):
        as_request = request(SASL_AUTHENTICATE, 1, number, bare(token))
        talk.client(as_request if version else bare(token))
        assert reported(talk.upstream()) == (1, number, token)
        last = number == len(tokens) - 1
        talk.kafka(authenticated(number, b"" if last else b"more", 58 if last else 0))
        if not last:
            talk.answer()

    # Then: there is something to log, and no secret in it; a client of v0 has no answer, as at Kafka.
    failed = talk.next(m.LoginFailed)
    assert (failed.mechanism, failed.principal) == (mechanism, principal)
    assert failed.reason == "Authentication failed: Invalid username or password"
    if version:
        assert talk.answer() == authenticated(len(tokens) - 1, b"", 58)
    else:
        assert "login" in talk.next(m.CloseClient).reason
    talk.silent()


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(
    ("mechanism", "tokens", "principal"),
    [
        ("PLAIN", [b"\0alice\0pencil"], "alice"),
        ("SCRAM-SHA-512", [FIRST, FINAL], "a=lice"),
        ("OAUTHBEARER", [b"n,,\x01auth=Bearer pencil\x01\x01"], None),
    ],
)
def test_complete_login_names_its_principal(
    version: int, mechanism: str, tokens: list[bytes], principal: str | None
) -> None:
    talk = begun(mechanism, version)
    for number, token in enumerate(tokens):
        assert talk.session.state.principal is None, "a name is claimed, and not yet proven"
        talk.client(request(SASL_AUTHENTICATE, 1, number, bare(token)) if version else bare(token))
        talk.upstream()
        talk.kafka(authenticated(number, b"" if number == len(tokens) - 1 else b"more"))
        talk.answer()
    assert talk.session.state.principal == principal


@pytest.mark.parametrize("version", [0, 1])
def test_mechanism_that_kafka_refuses_begins_no_tokens(version: int, talk: Waiting) -> None:
    begins(talk, "AWS_MSK_IAM", handshaken(33), version)
    assert talk.next(m.LoginFailed).reason == "UNSUPPORTED_SASL_MECHANISM: this listener takes PLAIN, SCRAM-SHA-256"
    assert talk.answer() == handshaken(33)
    relays(talk, request(HEARTBEAT, 4, 9), response(9))


@pytest.mark.parametrize("length", [-1, 1 << 21])
def test_bare_token_of_impossible_length_is_refused(length: int) -> None:
    talk = begun("PLAIN")
    talk.client(length.to_bytes(4, "big", signed=True))
    assert "a login token of" in talk.next(m.CloseClient).reason


def test_bare_tokens_of_an_unknown_mechanism_are_refused(talk: Waiting) -> None:
    begins(talk, "CUSTOM", handshaken())
    assert "use a client that supports SaslHandshake v1" in talk.next(m.CloseClient).reason


def test_bare_token_waits_for_the_previous_answer(talk: Waiting) -> None:
    talk.client(handshake("SCRAM-SHA-256") + bare(b"1") + bare(b"2"))
    assert talk.upstream() == handshake("SCRAM-SHA-256", 1)
    for number, answer in enumerate((handshaken(), authenticated(0, b"more"))):
        talk.silent()
        assert not talk.reads
        talk.kafka(answer)
        talk.commands.sort(key=lambda each: isinstance(each, m.ToClient))
        assert reported(talk.upstream()) == (1, number, str(number + 1).encode())
        talk.answer()


def test_login_by_bare_tokens_ends_too() -> None:
    talk = begun("PLAIN")
    talk.client(bare(b"\0alice\0pencil"))
    talk.upstream()
    talk.kafka(authenticated(0, lifetime_ms=3000))
    assert talk.answer() == bare(b"")
    talk.now += 3.0
    talk.client(produce(("checked-a", 0, expecting(6, b"y"))))
    assert "login expired" in talk.next(m.CloseClient).reason


@pytest.mark.parametrize("queried", [False, True])
def test_process_that_ends_does_not_wait_for_tokens(queried: bool) -> None:
    talk = begun("SCRAM-SHA-256")
    if queried:
        talk.client(bare(FIRST))
        talk.upstream()
    talk.report(m.Drain(talk.now + 30.0))
    if queried:
        talk.silent()
        talk.kafka(authenticated(0, b"more"))
        talk.answer()
    talk.now += 1.0

    talk.report(m.Drain(talk.now + 29.0))
    assert talk.next(m.CloseClient).hang_up


def test_client_lost_during_login_frees_memory() -> None:
    talk = begun("OAUTHBEARER")
    talk.client(bare(LONG)[:-1])
    assert talk.services.free_bytes == (1 << 20) - len(LONG)
    talk.report(m.ClientLost())
    talk.next(m.CloseUpstream)
    assert talk.services.free_bytes == 1 << 20


def test_tls_on_plaintext_listener_is_named_as_reason() -> None:
    talk = Talk()
    talk.client(bytes.fromhex("16030100f1010000ed0303") + bytes(64))
    closed = talk.next(m.CloseClient)
    assert closed.fault is ClientProtocolError
    assert "the client uses TLS, this listener does not" in closed.reason


# --- the proxy's ------------------------------------------------------------------------------------------------------


class Broker:
    """Accepts one user with one password; `steps` are its answers."""

    def __init__(self, *steps: Callable[[bytes], Message], mechanisms: tuple[str, ...] = ()) -> None:
        self.mechanisms = mechanisms
        self.steps = list(steps)
        self.reported: list[bytes] = []

    async def query(self, api_key: int, version: int, message: Message) -> Message:
        if api_key == SASL_HANDSHAKE:
            known = message.mechanism in self.mechanisms
            return Message(error_code=0 if known else 33, mechanisms=list(self.mechanisms))
        assert (api_key, version) == (SASL_AUTHENTICATE, 1)
        self.reported.append(bytes(message.auth_bytes))
        return self.steps.pop(0)(self.reported[-1])


def accepts(auth_bytes: bytes = b"", *, lifetime_ms: int = 0) -> Callable[[bytes], Message]:
    return lambda _: Message(error_code=0, error_message=None, auth_bytes=auth_bytes, session_lifetime_ms=lifetime_ms)


@pytest.fixture
def password(tmp_path: Path) -> Path:
    (file := tmp_path / "password").write_text("pencil\nwhat else is in the file\n")
    return file


def test_plain(password: Path) -> None:
    broker = Broker(accepts(lifetime_ms=90_000), mechanisms=("PLAIN",))
    assert asyncio.run(log_in(broker.query, ControlSasl("PLAIN", "user", password))) == 90.0
    assert broker.reported[0].split(b"\0")[1:] == [b"user", b"pencil"]


def test_token_is_reread_at_each_login(tmp_path: Path) -> None:
    file = tmp_path / "token"
    sasl = ControlSasl("OAUTHBEARER", token_file=file)
    for token in ("first", "second"):
        file.write_text(token + "\n")
        broker = Broker(accepts(), mechanisms=("OAUTHBEARER",))
        assert asyncio.run(log_in(broker.query, sasl)) == 0.0
        assert broker.reported == [f"n,,\x01auth=Bearer {token}\x01\x01".encode()]


def scram(name: str, secret: bytes, *, iterations: int = 4096, honest: bool = True) -> Broker:
    """A broker's side of RFC 5802, for one user."""
    stated: list[bytes] = []
    salt, digest = b"salt", getattr(hashlib, name)

    def keyed(key: bytes, text: bytes) -> bytes:
        return hmac.new(key, text, digest).digest()

    def first(auth_bytes: bytes) -> Message:
        bare = auth_bytes.removeprefix(b"n,,")
        nonce = bare.partition(b"r=")[2] + b"server"
        answer = b"r=%s,s=%s,i=%d" % (nonce, base64.b64encode(salt), iterations)
        stated.extend((bare, answer))
        return accepts(answer)(auth_bytes)

    def last(auth_bytes: bytes) -> Message:
        without_proof, _, proof = auth_bytes.partition(b",p=")
        text = b",".join((*stated, without_proof))
        salted = hashlib.pbkdf2_hmac(name, secret, salt, iterations)
        key = keyed(salted, b"Client Key")
        signature = keyed(digest(key).digest(), text)
        if bytes(a ^ b for a, b in zip(base64.b64decode(proof), signature, strict=True)) != key:
            return Message(error_code=58, error_message="Authentication failed", auth_bytes=b"", session_lifetime_ms=0)
        server = keyed(keyed(salted, b"Server Key"), text) if honest else bytes(32)
        return accepts(b"v=" + base64.b64encode(server))(auth_bytes)

    return Broker(first, last, mechanisms=("SCRAM-SHA-256", "SCRAM-SHA-512"))


@pytest.mark.parametrize(("mechanism", "name"), [("SCRAM-SHA-256", "sha256"), ("SCRAM-SHA-512", "sha512")])
def test_scram(password: Path, mechanism: str, name: str) -> None:
    broker = scram(name, b"pencil")
    asyncio.run(log_in(broker.query, ControlSasl(mechanism, "a=b,c", password)))  # type: ignore[arg-type]
    assert broker.reported[0].startswith(b"n,,n=a=3Db=2Cc,r=")
    assert b"pencil" not in b"".join(broker.reported)


@pytest.mark.parametrize(
    ("broker", "stated"),
    [
        (scram("sha256", b"other"), "SASL SCRAM-SHA-256 as user: Authentication failed"),
        (scram("sha256", b"pencil", honest=False), "invalid message from the broker: Server sent wrong signature"),
        (scram("sha256", b"pencil", iterations=10_000_000), "invalid message from the broker: .*too large"),
        (Broker(accepts(b"nonsense"), mechanisms=("SCRAM-SHA-256",)), "invalid message from the broker"),
        (Broker(mechanisms=("PLAIN", "GSSAPI")), r"this listener takes PLAIN, GSSAPI \(control_sasl.mechanism\)"),
    ],
)
def test_why_a_login_fails(password: Path, broker: Broker, stated: str) -> None:
    with pytest.raises(LoginFailed, match=stated) as failed:
        asyncio.run(log_in(broker.query, ControlSasl("SCRAM-SHA-256", "user", password)))
    assert "pencil" not in str(failed.value)


def test_secrets_that_cannot_be_read(tmp_path: Path) -> None:
    broker = Broker(mechanisms=("PLAIN",))
    (empty := tmp_path / "empty").write_text("\n")
    (binary := tmp_path / "binary").write_bytes(b"\xff\xfe")
    for file, stated in (
        (tmp_path / "absent", "control_sasl.password_file: .*absent cannot be read: No such file or directory"),
        (empty, "control_sasl.password_file: the first line of .*empty is empty"),
        (binary, "control_sasl.password_file: .*binary is not UTF-8 text"),
    ):
        with pytest.raises(ConfigError, match=stated):
            asyncio.run(log_in(broker.query, ControlSasl("PLAIN", "user", file)))
