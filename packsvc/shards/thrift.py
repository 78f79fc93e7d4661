"""Thrift's compact protocol, as far as Parquet's footers need it: structs of numbers, bytes, lists and structs."""

from __future__ import annotations

from typing import Any

from packsvc.compiled import native

Bytes = bytes | memoryview
_TRUE, _FALSE, _INTEGERS, _BINARY, _LIST, _STRUCT = 1, 2, (4, 5, 6), 8, 9, 12
_DEEPEST = 16


class Unfamiliar(Exception):
    """Not a form that is read here; pyarrow may know it."""


def read_struct(data: bytes, levels: int = _DEEPEST) -> dict[int, Any]:
    """The fields of a struct that the bytes are the whole of: integers, bytes, bools, lists and dicts by their numbers.

    Args:
        data: The struct.
        levels: How deep structs are read, from 1 on; those below are left as their bytes, for another call.

    Raises:
        Unfamiliar: They are something else, or have values of another kind.
    """
    if native is not None:
        found: dict[int, Any] | None = native.read_struct(data, levels)
        if found is None:
            raise Unfamiliar("a struct")
        return found
    fields, end = _struct(data, 0, _DEEPEST, levels - 1)
    if end != len(data):
        raise Unfamiliar("a struct")
    return fields


def _struct(data: bytes, place: int, depth: int, levels: int) -> tuple[dict[int, Any], int]:
    fields: dict[int, Any] = {}
    name = 0
    while place < len(data):
        head = data[place]
        place += 1
        if not head:
            return fields, place
        if head >> 4:
            name += head >> 4
        else:
            number, place = _varint(data, place)
            name = _zigzag(number)
        fields[name], place = _value(data, place, head & 0x0F, depth, levels)
    raise Unfamiliar("a struct")


def _value(data: bytes, place: int, kind: int, depth: int, levels: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, place
    if kind in _INTEGERS:
        number, place = _varint(data, place)
        return _zigzag(number), place
    if kind == _BINARY:
        size, place = _varint(data, place)
        if size > len(data) - place:
            raise Unfamiliar("a struct")
        return data[place : place + size], place + size
    if not depth or kind not in (_LIST, _STRUCT):
        raise Unfamiliar("a struct")
    if kind == _LIST:
        return _list(data, place, depth, levels)
    fields, end = _struct(data, place, depth - 1, levels - 1)
    return (fields if levels > 0 else data[place:end]), end


def _list(data: bytes, place: int, depth: int, levels: int) -> tuple[list[Any], int]:
    if place == len(data):
        raise Unfamiliar("a list")
    size, kind = data[place] >> 4, data[place] & 0x0F
    place += 1
    if size == 15:
        size, place = _varint(data, place)
    if size > len(data) - place:
        raise Unfamiliar("a list")
    if kind in (_TRUE, _FALSE):
        return [byte == _TRUE for byte in data[place : place + size]], place + size
    items = []
    for _ in range(size):
        item, place = _value(data, place, kind, depth - 1, levels)
        items.append(item)
    return items, place


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 63, 7):
        if place == len(data):
            break
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise Unfamiliar("an integer")


def _zigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)
