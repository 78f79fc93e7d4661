"""Bytes of Parquet files, written and found by hand."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """An integer from 0 on, seven bits a byte."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def zigzag(value: int) -> bytes:
    """An integer of a Thrift struct, from -(2^63) to 2^63 - 1."""
    return varint((value << 1) ^ (value >> 63))


def footer_start(data: bytes) -> int:
    """Where the footer of a file begins; it ends eight bytes before the end."""
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")
