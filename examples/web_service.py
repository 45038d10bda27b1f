"""A web service whose state is a Kafka topic: carts that hold at most five items, served by two processes at once.

Each process reads the topic's partitions into memory, one `SharedLog` for each, which all of its requests share. A
request

1. waits in the queue of its cart's partition, with the other requests of its process;
2. decides on the state at the log end, after the requests ahead of it in the queue: the cart takes the item or is full;
3. is appended in one batch with those requests;
4. decides again if the other process was first.

The program starts two servers, and sends them 80 requests at once, for a few carts. Then it reads the topic: no cart
may hold more than five items, each accepted item must be there once, and both servers must show what the topic holds.
It needs fastapi and uvicorn.

    .venv/bin/fencepost dev                        # in one terminal: Kafka and the proxy
    .venv/bin/python examples/web_service.py       # in another
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from kafka import KafkaAdminClient
from kafka.admin import NewTopic

from fencepost import FencepostError, LogRecord, Record
from fencepost.aiokafka import LogWriter, SharedLog
from fencepost.kafka_python import LogReader

BOOTSTRAP_SERVER = os.environ.get("FENCEPOST_BOOTSTRAP_SERVER", "127.0.0.1:19092")
TOPIC = os.environ.get("CARTS_TOPIC", "carts")
PARTITIONS = 2
LIMIT = 5

Carts = Mapping[str, tuple[str, ...]]
logs: dict[int, SharedLog[Carts]] = {}


def partition_of(cart: str) -> int:
    return zlib.crc32(cart.encode()) % PARTITIONS


def apply(carts: Carts, record: LogRecord) -> Carts:
    """The carts after an event. `carts` stays unchanged: it is still the state if the event is refused."""
    event = json.loads(record.value or b"")
    return {**carts, event["cart"]: (*carts.get(event["cart"], ()), event["item"])}


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for partition in range(PARTITIONS):
            writer = LogWriter(TOPIC, partition, bootstrap_servers=BOOTSTRAP_SERVER)
            logs[partition] = await stack.enter_async_context(SharedLog(writer, {}, apply))
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/carts/{cart}/{item}")
async def add(cart: str, item: str) -> tuple[str, ...]:
    def decide(carts: Carts) -> list[Record]:
        if len(carts.get(cart, ())) >= LIMIT:
            raise HTTPException(409, "the cart is full")
        return [Record(json.dumps({"cart": cart, "item": item}).encode(), cart.encode())]

    change = await logs[partition_of(cart)].change(decide)
    return change.state[cart]


@app.get("/carts/{cart}")
async def show(cart: str) -> tuple[str, ...]:
    change = await logs[partition_of(cart)].change(lambda carts: ())  # reads to the log end
    return change.state.get(cart, ())


@app.exception_handler(FencepostError)
async def not_done(_: Request, error: FencepostError) -> JSONResponse:
    """`outcome`: "unknown" if the item may be in the cart."""
    return JSONResponse({"error": str(error), "outcome": error.outcome}, 503)


# The rest starts two servers, and checks them.


@contextmanager
def server(bootstrap: str, topic: str) -> Iterator[str]:
    """The URL of a server process."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    command = ["-m", "uvicorn", "--port", str(port), "--log-level", "warning", "web_service:app"]
    environment = {**os.environ, "FENCEPOST_BOOTSTRAP_SERVER": bootstrap, "CARTS_TOPIC": topic}
    process = subprocess.Popen([sys.executable, *command], cwd=Path(__file__).parent, env=environment)
    try:
        give_up = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > give_up:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def request(method: str, url: str) -> tuple[int, list[str]]:
    """Status and items."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, []


def main() -> int:
    parser = argparse.ArgumentParser(description="carts in two web servers, with one topic as their state")
    parser.add_argument(
        "--bootstrap-server", default=BOOTSTRAP_SERVER, help="address of the proxy (default: %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=80, help="requests at once (default: %(default)s)")
    options = parser.parse_args()
    topic = f"carts-{random.getrandbits(32):08x}"
    checked = {"fencepost.check.expected.offsets": "required"}
    with KafkaAdminClient(bootstrap_servers=options.bootstrap_server) as admin:
        admin.create_topics([NewTopic(topic, PARTITIONS, 1, topic_configs=checked)])

    with server(options.bootstrap_server, topic) as one, server(options.bootstrap_server, topic) as two:
        carts = [f"cart-{number % 10}" for number in range(options.requests)]

        def send(number: int) -> int:
            return request("POST", f"{(one, two)[number % 2]}/carts/{carts[number]}/item-{number}")[0]

        began = time.monotonic()
        with ThreadPoolExecutor(options.requests) as pool:
            statuses = list(pool.map(send, range(options.requests)))
        seconds = time.monotonic() - began
        shown = [{cart: request("GET", f"{url}/carts/{cart}")[1] for cart in set(carts)} for url in (one, two)]

    in_topic: dict[str, list[str]] = {cart: [] for cart in carts}
    with LogReader([(topic, p) for p in range(PARTITIONS)], bootstrap_servers=options.bootstrap_server) as log:
        for _, record in log:
            event = json.loads(record.value or b"")
            in_topic[event["cart"]].append(event["item"])
    answered = ", ".join(f"{count} x {status}" for status, count in sorted(Counter(statuses).items()))
    print(f"{options.requests} requests in {seconds:.2f} s ({options.requests / seconds:.0f}/s): {answered}")
    accepted = sorted(f"item-{number}" for number, status in enumerate(statuses) if status == 200)
    right = (
        all(len(items) <= LIMIT for items in in_topic.values())
        and sorted(item for items in in_topic.values() for item in items) == accepted
        and set(statuses) == {200, 409}
        and shown == [in_topic, in_topic]
    )
    if right:
        print("RIGHT: no cart holds more than 5 items, and both servers show what the topic holds.")
    else:
        print(f"WRONG: the topic holds {in_topic}, the servers show {shown}, accepted were {accepted}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
