"""Frames between the server and an engine worker: a header in JSON, followed by the raw bytes of the tensors.

A batch is one frame, written by one system call. Nothing is pickled.
"""

import socket
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import orjson

from laconic.arrays import Array, Arrays

LENGTH = struct.Struct("<I")
"""The bytes of the header, in front of it."""


def send_frame(connection: socket.socket, arrays: Mapping[str, Array], error: str = "") -> None:
    """Send the tensors, or why there are none. Raises OSError where the other side is gone."""
    tensors = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    described = [(name, array.dtype.str, array.shape) for name, array in tensors.items()]
    header = orjson.dumps({"tensors": described, "error": error})
    data = [view_bytes(array) for array in tensors.values()]
    send_all(connection, [memoryview(LENGTH.pack(len(header)) + header), *data])


def receive_frame(connection: socket.socket) -> tuple[Arrays, str]:
    """Receive the tensors of the next frame, in new arrays, and the error. Raises OSError where the other side is
    gone."""
    length = memoryview(bytearray(LENGTH.size))
    receive_into(connection, length)
    header = bytearray(LENGTH.unpack(length)[0])
    receive_into(connection, memoryview(header))
    content = orjson.loads(header)
    arrays = {name: np.empty(shape, dtype) for name, dtype, shape in content["tensors"]}
    for array in arrays.values():
        receive_into(connection, view_bytes(array))
    return arrays, content["error"]


def view_bytes(array: Array) -> memoryview:
    """View the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def send_all(connection: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Send all of the buffers, by one call if the other side takes them at once."""
    sent = connection.sendmsg(buffers)
    for buffer in buffers:
        if sent < len(buffer):
            connection.sendall(buffer[sent:])
        sent = max(0, sent - len(buffer))


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer. Raises ConnectionResetError where the stream ends before."""
    received = 0
    while received < len(buffer):
        count = connection.recv_into(buffer[received:], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError("the other process closed the connection")
        received += count
