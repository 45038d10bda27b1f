"""What it costs to read and write Produce messages and record batches: CPU time of one call, in nanoseconds.

    python -m benchmarks.scan                      the code as it lies there
    python -m benchmarks.scan --beside HEAD~3      beside the code of another commit, taking turns: one run, one machine
    python -m benchmarks.scan --only scan          the cases whose name has this in it

No socket, no Kafka. Batches are kafka-python's and aiokafka's. A turn is one process that goes through all cases; the
table shows each case's median over the turns, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOW_MS = 1_700_000_000_000
_UNPACKED_BYTES_MAX = 64 << 20
_CASE_SECONDS = 0.06

Case = tuple[str, int, Callable[[], object]]  # name, payload bytes (0: does not matter), what to call


def _value(size: int, seed: int) -> bytes:
    """JSON-like text: of letters that header names have, too, and that compresses as records do."""
    text = b'{"flight":%d,"carrier":"UA","origin":"EWR","destination":"IAH","delay":%d}' % (seed * 7919, seed % 60)
    return (text * (size // len(text) + 1))[:size]


def _batch(count: int, size: int, headers: Callable[[int], list[tuple[str, bytes]]], codec: int = 0) -> memoryview:
    import aiokafka.record.default_records as records  # noqa: PLC0415  each turn has its own interpreter

    builder = records.DefaultRecordBatchBuilder(2, codec, 0, -1, -1, -1, 1 << 26)
    for i in range(count):
        assert builder.append(i, NOW_MS + i // 30, None, _value(size, i), headers(i))
    return memoryview(bytes(builder.build()))


def _expecting(i: int) -> list[tuple[str, bytes]]:
    return [("expected-offset", b"%d" % (1_234_567 + i))]


def _first(i: int) -> list[tuple[str, bytes]]:
    return [] if i else _expecting(i)


def _named(i: int) -> list[tuple[str, bytes]]:
    return [] if i else [*_expecting(i), ("write-id", b"load-7/4711/3")]


def _everything(i: int) -> list[tuple[str, bytes]]:
    return [*_expecting(i), ("partition-count", b"6"), ("write-id", b"load-7/4711/3")]


def _others(i: int) -> list[tuple[str, bytes]]:
    return [("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")]


def _nothing(i: int) -> list[tuple[str, bytes]]:
    return []


def _batch_cases() -> Iterator[Case]:
    from fencepost_proxy.wire import batch as b  # noqa: PLC0415

    names = b.HeaderNames()

    def scan(batch: memoryview) -> Callable[[], object]:
        return lambda: b.scan_batch(batch, names, carrier_base=False, decompressed_bytes_max=_UNPACKED_BYTES_MAX)

    shapes: list[tuple[str, int, int]] = [
        ("1 of 100 B", 1, 100),
        ("150 of 100 B", 150, 100),
        ("9,000 of 100 B", 9000, 100),
        ("16 of 1 KB", 16, 1000),
        ("1 of 100 KB", 1, 100_000),
    ]
    for shape, count, size in shapes:
        yield f"scan {shape}, no header", count * size, scan(_batch(count, size, _nothing))
        yield f"scan {shape}, expectation first", count * size, scan(_batch(count, size, _first))
    for shape, count, size in (shapes[1], shapes[3]):
        yield f"scan {shape}, expectation and write-id first", count * size, scan(_batch(count, size, _named))
        yield f"scan {shape}, expectation on each", count * size, scan(_batch(count, size, _expecting))
        yield f"scan {shape}, all three on each", count * size, scan(_batch(count, size, _everything))
        yield f"scan {shape}, a tracing header on each", count * size, scan(_batch(count, size, _others))
    for codec, code in {"gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}.items():
        yield f"scan 150 of 100 B {codec}, expectation first", 15_000, scan(_batch(150, 100, _first, code))
        yield f"scan 150 of 100 B {codec}, expectation on each", 15_000, scan(_batch(150, 100, _expecting, code))
    small, large = _batch(1, 100, _first), _batch(150, 100, _first)
    for size, batch in ((100, small), (15_000, large)):
        yield f"require_single_batch, {size} B", 0, lambda batch=batch: b.require_single_batch(batch)  # type: ignore[misc]
        yield f"verify_crc, {size} B", size, lambda batch=batch: b.verify_crc(batch)  # type: ignore[misc]
        yield (
            f"stamp_batch, {size} B",
            size,
            lambda batch=batch: b.stamp_batch(batch, producer_id=5, producer_epoch=0, base_sequence=1, tag=9),  # type: ignore[misc]
        )


def _produce_cases() -> Iterator[Case]:
    from uuid import UUID  # noqa: PLC0415

    from fencepost_proxy.wire import produce as p  # noqa: PLC0415

    topic_id = UUID("01234567-89ab-cdef-0123-456789abcdef")
    records = _batch(1, 1000, _first)
    for version in (3, 9, 13):
        for partitions in (1, 10):
            name: Any = ("", topic_id) if version == 13 else ("orders", None)
            data = tuple(p.PartitionData(i, records) for i in range(partitions))
            request = p.ProduceRequest(
                version, 77, "producer-1", b"", None, -1, 30_000, (p.TopicData(name[0], name[1], data),)
            )
            frame = memoryview(b"".join(p.encode_produce_request(request))[4:])
            results = tuple(p.PartitionResult(i, 0, 1_234_567, -1, 0) for i in range(partitions))
            response = p.ProduceResponse(77, (p.TopicResult(name[0], name[1], results),), 0)
            answer = memoryview(p.encode_produce_response(response, version))[4:]
            of = f"v{version}, {partitions} partition{'s' if partitions > 1 else ''}"
            if partitions == 1:
                yield f"peek_produce {of}", 0, lambda f=frame: p.peek_produce(f, len(f))  # type: ignore[misc]
            yield f"parse_produce_request {of}", 0, lambda f=frame: p.parse_produce_request(f)  # type: ignore[misc]
            yield f"encode_produce_request {of}", 0, lambda r=request: p.encode_produce_request(r)  # type: ignore[misc]
            yield (
                f"parse_produce_response {of}",
                0,
                lambda a=answer, v=version: p.parse_produce_response(a, v),  # type: ignore[misc]
            )
            yield (
                f"encode_produce_response {of}",
                0,
                lambda r=response, v=version: p.encode_produce_response(r, v),  # type: ignore[misc]
            )


def _turn(only: str) -> dict[str, tuple[int, float]]:
    """CPU nanoseconds of a call, for each case."""
    told = {}
    for name, payload_bytes, call in (*_batch_cases(), *_produce_cases()):
        if only not in name:
            continue
        call()
        started = time.process_time_ns()
        call()
        calls = max(1, int(_CASE_SECONDS * 1e9 / 5 / max(1000, time.process_time_ns() - started)))
        best = float("inf")
        for _ in range(5):
            started = time.process_time_ns()
            for _ in range(calls):
                call()
            best = min(best, (time.process_time_ns() - started) / calls)
        told[name] = payload_bytes, best
    return told


def _child(code: Path, only: str) -> dict[str, tuple[int, float]]:
    path = os.pathsep.join(str(code / each) for each in ("proxy", "policies"))
    told = subprocess.run(
        [sys.executable, "-c", _CHILD, only],
        env={**os.environ, "PYTHONPATH": path + os.pathsep + str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
    )
    answer: dict[str, tuple[int, float]] = json.loads(told.stdout)
    return answer


_CHILD = "import json, sys; from benchmarks import scan; print(json.dumps(scan._turn(sys.argv[1])))"


def _code_of(commit: str, into: Path) -> Path:
    packed = subprocess.run(
        ["git", "archive", commit, "proxy", "policies"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as tar:
        tar.extractall(into, filter="data")
    return into


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--beside", metavar="COMMIT", help="measure the code of this commit, too, turn by turn")
    parser.add_argument("--only", default="", help="the cases whose name has this in it")
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        codes = {"now": ROOT}
        if asked.beside:
            codes = {asked.beside: _code_of(asked.beside, Path(directory)), **codes}
        turns: dict[str, list[dict[str, tuple[int, float]]]] = {name: [] for name in codes}
        for turn in range(asked.turns):
            order = list(codes.items())
            for name, code in order if turn % 2 == 0 else reversed(order):
                turns[name].append(_child(code, asked.only))
    print(f"Python {sys.version.split()[0]}, CPU ns per call, median of {asked.turns} turns (lowest–highest)")
    for case, (payload_bytes, _) in turns["now"][0].items():
        row = f"{case:58}"
        medians = []
        for told in turns.values():
            each = sorted(one[case][1] for one in told)
            medians.append(statistics.median(each))
            row += f"{medians[-1]:12,.0f} ({each[0]:,.0f}–{each[-1]:,.0f})".ljust(36)
        if len(medians) == 2:
            row += f"{medians[0] / medians[1]:5.1f}×"
        if payload_bytes:
            row += f"  {medians[-1] / payload_bytes:6.2f} s/GB"
        print(row.rstrip())


if __name__ == "__main__":
    main()
