"""However a stream is split, its frames are the same, and relayed bytes are unchanged."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost_proxy.errors import ClientProtocolError, LimitError
from fencepost_proxy.session.frames.cutter import CutterState, FrameCutter

SHORTEST, LONGEST = 8, 300

bodies = st.lists(st.tuples(st.booleans(), st.binary(min_size=SHORTEST, max_size=LONGEST)), max_size=12)


def cut(chunks: list[bytes], collect: list[bool]) -> tuple[list[bytes], list[tuple[int, bytes]]]:
    """Frames as they came out, in order (a passed one with its length prefix), and the head shown of each."""
    cutter = FrameCutter(SHORTEST, LONGEST, ClientProtocolError)
    frames: list[bytes | memoryview] = []
    heads: list[tuple[int, bytes]] = []
    passing = b""
    receive_buffer = bytearray(4096)
    for chunk in chunks:
        # As the connection does it: one buffer, overwritten by the next read.
        receive_buffer[: len(chunk)] = chunk
        cutter.feed(memoryview(receive_buffer)[: len(chunk)])
        while True:
            if cutter.state is CutterState.PASSING:
                view = cutter.take()
                if not view:
                    break
                passing += view
                if cutter.state is CutterState.START:
                    frames.append(passing)
                    passing = b""
            elif cutter.state is CutterState.COLLECTING:
                frame = cutter.collected()
                if frame is None:
                    break
                frames.append(frame)
            else:
                head = cutter.head()
                if head is None:
                    break
                length, observed = head
                heads.append((length, bytes(observed)))
                (cutter.collect_frame if collect[len(heads) - 1] else cutter.pass_frame)(length)
        cutter.save()
        assert cutter.buffered_bytes <= LONGEST + 4
    assert cutter.between_frames
    # Only now: what was collected must not be a view into the buffer.
    return [bytes(frame) for frame in frames], heads


@given(bodies, st.data())
def test_any_stream_split_gives_the_same_frames(frames: list[tuple[bool, bytes]], data: st.DataObject) -> None:
    stream = b"".join(struct.pack(">i", len(body)) + body for _, body in frames)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=40).map(sorted))
    edges = [0, *cuts, len(stream)]
    chunks = [stream[start:end] for start, end in pairwise(edges)]

    found, heads = cut(chunks, [collect for collect, _ in frames])

    assert found == [body if collect else struct.pack(">i", len(body)) + body for collect, body in frames]
    for (length, observed), (_, body) in zip(heads, frames, strict=True):
        assert length == len(body)
        assert len(observed) >= SHORTEST
        assert body.startswith(observed)


def test_byte_by_byte_input_gives_the_same_frames() -> None:
    frames = [(index % 2 == 0, bytes(range(index, index + 30))) for index in range(6)]
    stream = b"".join(struct.pack(">i", len(body)) + body for _, body in frames)

    found, _ = cut([bytes([byte]) for byte in stream], [collect for collect, _ in frames])

    assert b"".join(f if len(f) == 34 else struct.pack(">i", len(f)) + f for f in found) == stream


@pytest.mark.parametrize("length", [0, 3, SHORTEST - 1, -1, -(2**31)])
def test_an_impossible_length_is_the_peers_fault(length: int) -> None:
    cutter = FrameCutter(SHORTEST, LONGEST, ClientProtocolError)
    cutter.feed(memoryview(struct.pack(">i", length)))
    with pytest.raises(ClientProtocolError, match=f"a frame of {length} bytes"):
        cutter.head()


@pytest.mark.parametrize("length", [LONGEST + 1, 2**31 - 1])
def test_length_above_limit_is_refused_before_buffering(length: int) -> None:
    cutter = FrameCutter(SHORTEST, LONGEST, ClientProtocolError)
    cutter.feed(memoryview(struct.pack(">i", length)))
    with pytest.raises(LimitError, match="frame_bytes_max=300"):
        cutter.head()
    assert cutter.buffered_bytes == 0


def test_announced_length_buffers_only_received_bytes() -> None:
    cutter = FrameCutter(SHORTEST, 2**31 - 1, ClientProtocolError)
    cutter.feed(memoryview(struct.pack(">i", 2**31 - 1) + b"12345678"))
    head = cutter.head()
    assert head is not None
    cutter.collect_frame(head[0])
    assert cutter.collected() is None
    cutter.save()
    assert cutter.buffered_bytes == 8
