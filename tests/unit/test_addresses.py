"""Responses name the proxy's listeners, never the address of a broker."""

from __future__ import annotations

import pytest

from fencepost_proxy.addresses import AddressBook, learn_brokers, rewrite_response
from fencepost_proxy.errors import ConfigError, Error
from fencepost_proxy.types import Address, NodeId
from fencepost_proxy.wire.apis import APIS, DESCRIBE_CLUSTER, DESCRIBE_QUORUM, FIND_COORDINATOR, METADATA
from fencepost_proxy.wire.control import decode_response, encode_response
from fencepost_proxy.wire.schema import Message

SECRET = "kafka-1.internal"
HERE = "198.51.100.7"


def through(api_key: int, version: int, response: Message, book: AddressBook) -> tuple[Message, bytes, tuple[int, ...]]:
    """A broker's response as a client gets it: decoded, its bytes, and the brokers that were new."""
    message = decode_response(api_key, version, encode_response(api_key, version, response))
    new = learn_brokers(api_key, message, book)
    rewrite_response(api_key, message, book, HERE)
    body = encode_response(api_key, version, message)
    return decode_response(api_key, version, body), body, new


def broker(**more: object) -> Message:
    return Message(host=SECRET, port=9092, **more)


# --- the book ---------------------------------------------------------------------------------------------------------


def test_listener_of_a_broker_follows_the_bootstrap_port_or_the_configuration() -> None:
    assert AddressBook(19092).advertised(NodeId(0), HERE) == Address(HERE, 19093)
    book = AddressBook(19092, advertised_host="kafka.example.com", ports={NodeId(1001): 9100})
    assert book.advertised(NodeId(1001), HERE) == Address("kafka.example.com", 9100)
    assert book.advertised(NodeId(1), HERE) == Address("kafka.example.com", 19094)
    assert AddressBook(65000).listener_port(NodeId(534)) == 65535
    with pytest.raises(ConfigError, match=r"broker 535 .* 65536.*\[broker_ports\] 535 = "):
        AddressBook(65000).listener_port(NodeId(535))


def test_ephemeral_port_is_advertised_once_listener_is_open() -> None:
    book = AddressBook(0)
    assert book.listener_port(NodeId(1)) == 0
    with pytest.raises(LookupError, match="broker 1 has no listener"):
        book.advertised(NodeId(1), HERE)
    book.listens_on(NodeId(1), 40123)
    assert book.advertised(NodeId(1), HERE) == Address(HERE, 40123)


def test_broker_is_new_once_and_after_moving() -> None:
    book = AddressBook(19092)
    first, second = Address(SECRET, 9092), Address(SECRET, 9093)
    assert book.upstream_of(NodeId(1)) is None
    assert book.learn(NodeId(1), first) is True
    assert book.learn(NodeId(1), first) is False
    assert book.learn(NodeId(1), second) is True
    assert book.upstream_of(NodeId(1)) == second
    assert book.nodes == {1: second}


# --- responses --------------------------------------------------------------------------------------------------------

CASES = [
    *((METADATA, v, Message(brokers=[broker(node_id=1), broker(node_id=2)])) for v in range(14)),
    *((FIND_COORDINATOR, v, broker(node_id=1)) for v in range(4)),
    *(
        (FIND_COORDINATOR, v, Message(coordinators=[broker(key="a", node_id=1), broker(key="b", node_id=2)]))
        for v in range(4, 7)
    ),
    *((DESCRIBE_CLUSTER, v, Message(brokers=[broker(broker_id=1), broker(broker_id=2)])) for v in range(3)),
]


@pytest.mark.parametrize(("api_key", "version", "response"), CASES)
def test_every_address_becomes_its_brokers_listener(api_key: int, version: int, response: Message) -> None:
    book = AddressBook(19092)
    message, body, new = through(api_key, version, response, book)
    assert SECRET.encode() not in body
    holders = getattr(message, "coordinators", None) or getattr(message, "brokers", None) or [message]
    assert [(each.host, each.port) for each in holders] == [(HERE, 19094), (HERE, 19095)][: len(holders)]
    assert list(new) == [1, 2][: len(holders)]
    assert book.upstream_of(NodeId(1)) == Address(SECRET, 9092)


def test_the_cases_are_all_versions_that_are_served() -> None:
    for api_key in (METADATA, FIND_COORDINATOR, DESCRIBE_CLUSTER):
        api = APIS[api_key]
        assert [v for key, v, _ in CASES if key == api_key] == list(range(api.min_version, api.max_version + 1))


def test_fields_other_than_addresses_stay_unchanged() -> None:
    rack = Message(node_id=1, host=SECRET, port=9092, rack="r1", unknown_tags=((5, b"later"),))
    response = Message(brokers=[rack], cluster_id="c", controller_id=1)
    message, _, _ = through(METADATA, 12, response, AddressBook(19092))
    assert (message.brokers[0].node_id, message.brokers[0].rack) == (1, "r1")
    assert message.brokers[0].unknown_tags == ((5, b"later"),)
    assert (message.cluster_id, message.controller_id) == ("c", 1)


@pytest.mark.parametrize("version", [0, 3, 4, 6])
def test_unavailable_coordinator_gets_no_address(version: int) -> None:
    error = {"node_id": -1, "host": "", "port": -1, "error_code": Error.COORDINATOR_NOT_AVAILABLE}
    response = Message(**error) if version < 4 else Message(coordinators=[Message(key="g", **error)])
    book = AddressBook(19092)
    _, body, new = through(FIND_COORDINATOR, version, response, book)
    assert body == encode_response(FIND_COORDINATOR, version, response)
    assert (new, book.nodes) == ((), {})


def test_an_address_without_a_broker_is_blanked() -> None:
    message, body, new = through(FIND_COORDINATOR, 2, broker(node_id=-1), AddressBook(19092))
    assert SECRET.encode() not in body
    assert (message.host, message.port, new) == ("", -1, ())


def test_the_addresses_of_controllers_are_refused() -> None:
    response = Message(endpoint_type=2, controller_id=3, brokers=[broker(broker_id=3)], cluster_id="c")
    book = AddressBook(19092)
    message, body, new = through(DESCRIBE_CLUSTER, 1, response, book)
    assert SECRET.encode() not in body
    assert (message.error_code, message.brokers, message.controller_id) == (115, [], -1)
    assert "not available through this proxy" in message.error_message
    assert new == ()
    assert not book.nodes


def test_quorum_names_broker_listeners_and_hides_controllers() -> None:
    def controller(node_id: int) -> Message:
        listeners = [
            Message(name=name, host=SECRET, port=port) for name, port in (("CONTROLLER", 9093), ("OTHER", 60000))
        ]
        return Message(node_id=node_id, listeners=listeners, unknown_tags=((5, b"later"),))

    book = AddressBook(19092)
    book.learn(NodeId(1), Address(SECRET, 9092))
    message, body, new = through(DESCRIBE_QUORUM, 2, Message(nodes=[controller(1), controller(3000)]), book)

    assert SECRET.encode() not in body
    broker_too, alone = message.nodes
    assert [(each.name, each.host, each.port) for each in broker_too.listeners] == [
        ("CONTROLLER", HERE, 19094),
        ("OTHER", HERE, 19094),
    ]
    assert (alone.node_id, alone.listeners, alone.unknown_tags) == (3000, [], ((5, b"later"),))
    assert new == (), "a controller's address is no broker's"
    assert book.nodes == {1: Address(SECRET, 9092)}


QUORUM = Message(topics=[Message(topic_name="__cluster_metadata", partitions=[Message(leader_id=3000)])])
REFUSAL = Message(endpoint_type=2, error_code=114, error_message="wrong endpoint type")


@pytest.mark.parametrize(
    ("api_key", "version", "response"),
    [(DESCRIBE_QUORUM, 0, QUORUM), (DESCRIBE_QUORUM, 1, QUORUM), (DESCRIBE_CLUSTER, 1, REFUSAL)],
)
def test_responses_without_addresses_stay_unchanged(api_key: int, version: int, response: Message) -> None:
    _, body, _ = through(api_key, version, response, AddressBook(19092))
    assert body == encode_response(api_key, version, response)
