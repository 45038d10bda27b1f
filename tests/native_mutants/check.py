"""`python -m tests.native_mutants.check FOLDER`: compare the native module of that folder with Python.

Exits with 1 at the first difference, and prints it.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import fencepost_native

from tests.fuzz.dialogue import SHARED
from tests.support import examples  # noqa: F401
from tests.support.executors import NATIVE
from tests.unit import test_native as side_by_side
from tests.unit.spark_sink import test_native as of_the_sink
from tests.unit.test_fast_path import _GeneralRemembers, _GeneralRun, _Remembers, _Run, _run_both, _Steady
from tests.unit.test_native import _CIRCUMSTANCES, _HEADERS
from tests.unit.test_session import HEARTBEAT, METADATA

_SEEDS = 60


def _checks() -> Iterator[tuple[str, Callable[[], object]]]:
    yield "fields of answers", side_by_side.test_each_field_of_an_answer_counts
    yield "usual batches", lambda: side_by_side.test_usual_batches_are_for_native_code(13)
    for version in side_by_side.VERSIONS:
        of_version = side_by_side.test_appends_of_every_version_are_for_native_code
        yield f"version {version}", lambda version=version, of_version=of_version: of_version(version, "client")  # type: ignore[misc]
    yield "remembered producer", side_by_side.test_producer_is_remembered_while_others_append
    yield "addresses after records", side_by_side.test_addresses_after_records_are_rewritten_in_the_same_way
    for name in _CIRCUMSTANCES:
        for in_flight in (0, 1):
            yield (
                name,
                lambda name=name, in_flight=in_flight: side_by_side.test_circumstances_count_for_both(  # type: ignore[misc]
                    name, in_flight
                ),
            )
    for appended, headers in _HEADERS:
        yield (
            f"{headers}",
            lambda appended=appended, headers=headers: side_by_side.test_headers_mean_the_same(appended, headers),  # type: ignore[misc]
        )
    for size in (1, 40_000):
        yield "CRC", lambda size=size: side_by_side.test_wrong_crc_is_noticed(17, size)  # type: ignore[misc]
    for expects in (False, True):
        yield "connections", lambda expects=expects: side_by_side.test_other_connections_count_for_both(expects)  # type: ignore[misc]
    for name in sorted(_CIRCUMSTANCES.keys() - {"no memory"}):
        reported = side_by_side.test_reported_changes_count_where_native_code_remembers
        yield f"{name}, reported", lambda name=name, reported=reported: reported(name)  # type: ignore[misc]
    for api_key in (HEARTBEAT, METADATA):
        waits = side_by_side.test_append_waits_for_requests_of_other_apis
        yield "other APIs", lambda api_key=api_key, waits=waits: waits(api_key)  # type: ignore[misc]
    yield "time", side_by_side.test_what_time_ends_is_not_reported
    yield "memory", side_by_side.test_memory_is_shared_with_python
    for at in (0, 2):
        watched = side_by_side.test_producer_ids_of_relayed_requests_are_read_wherever_they_are_cut
        yield "producer ids", lambda at=at, watched=watched: watched(12, SHARED, at)  # type: ignore[misc]
    for version in (12, 13):
        by_id = side_by_side.test_topic_id_is_the_clients_for_both
        yield "topic ids", lambda version=version, by_id=by_id: by_id(version)  # type: ignore[misc]
    yield "addresses", side_by_side.test_addresses_after_records_are_rewritten_in_the_same_way
    malformed = side_by_side.test_malformed_response_that_arrives_in_pieces_closes_the_connection
    yield "malformed response", lambda: malformed(33, b"\xff" * 5)
    yield "batches", side_by_side.test_any_batch_is_read_as_python_reads_it
    yield "rows", of_the_sink.test_any_rows_are_encoded_as_by_numpy
    yield "fullest batch", of_the_sink.test_fullest_batches_are_encoded_as_by_numpy
    yield "partitions", of_the_sink.test_java_partitions_are_those_of_the_client
    yield "hashes", of_the_sink.test_hashes_are_those_of_numpy
    yield "overflow", of_the_sink.test_numbers_that_overflow_are_errors
    for seed in range(_SEEDS):
        kinds: tuple[type, type] = (_GeneralRun, _Run)
        if seed % 2:
            kinds = (_GeneralRemembers, _Remembers)
        program = _Steady().program(seed)
        yield f"seed {seed}", lambda program=program, kinds=kinds: _run_both(program, NATIVE, kinds)  # type: ignore[misc]


def main(folder: str) -> int:
    if Path(fencepost_native.__file__).parent != Path(folder).resolve():
        print(f"{fencepost_native.__file__} is not in {folder}", file=sys.stderr)
        return 2
    for name, check in _checks():
        try:
            with redirect_stdout(io.StringIO()):
                check()
        except Exception as difference:
            print(f"{name}: {type(difference).__name__} {str(difference)[:200]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
