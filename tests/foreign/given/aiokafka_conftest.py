"""aiokafka's tests/conftest.py starts Kafka in Docker; this one uses the Kafka that `KAFKA` names."""

import asyncio
import os

import pytest


@pytest.fixture(scope="class")
def loop():
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    loop.close()
    asyncio.set_event_loop(None)


@pytest.fixture(scope="class")
def setup_test_class(request, loop):
    host, _, port = os.environ["KAFKA"].partition(":")
    of = request.cls
    of.loop, of.kafka_host, of.kafka_port, of.hosts = loop, host, int(port), [f"{host}:{port}"]
    of.kafka_version = os.environ["KAFKA_VERSION"]
    of.ssl_folder = of.acl_manager = of.kerberos_utils = of.kafka_config = None
