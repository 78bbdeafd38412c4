"""Records calls of native kernels, for tests/native/replay.cpp to repeat on another processor."""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.ops.native.build import interface
from longspan.ops.native.build.interface import FLOAT, INT, LONG, POINTER

FUNCTIONS = [(name, *types) for family in interface.FAMILIES for name, types in interface.functions(family).items()]
INDEX = {name: i for i, (name, *_) in enumerate(FUNCTIONS)}
C_TYPES = {POINTER: "void*", LONG: "long", INT: "int", FLOAT: "float", None: "void"}


def header(names):
    """The code of calls.h, which replay.cpp includes, for these functions."""
    lines = []
    used = [(i, function) for i, function in enumerate(FUNCTIONS) if function[0] in names]
    for _, (name, result, arguments) in used:
        lines.append(f'extern "C" {C_TYPES[result]} {name}({", ".join(C_TYPES[one] for one in arguments)});')
    lines += ["inline std::int64_t call(std::int64_t index, const Argument* a) {", "    switch (index) {"]
    for i, (name, result, arguments) in used:
        called = f"{name}({', '.join(f'a[{j}]' for j in range(len(arguments)))})"
        lines.append(f"        case {i}: " + (f"return {called};" if result else f"{called}; return 0;"))
    return "\n".join([*lines, "    }", "    (void)a;", "    std::exit(6);", "}", ""])


@dataclass
class Call:
    """One call of a function of the kernels."""

    name: str
    content: bytes  # as replay.cpp reads it
    dtypes: list[torch.dtype]  # of its buffers
    result: int
    after: list[bytes]  # the content of its buffers afterwards


class Recorder:
    """Records calls of libraries; it must see every tensor's ``data_ptr``."""

    def __init__(self, monkeypatch):
        self.calls, self.seen = [], {}
        original = Tensor.data_ptr

        def data_ptr(tensor):
            address = original(tensor)
            # Kept, so that no other tensor gets its address.
            self.seen[address] = tensor
            return address

        monkeypatch.setattr(Tensor, "data_ptr", data_ptr)

    def of(self, library):
        """A library of kernels whose calls are recorded."""
        return Recorded(library, self)

    def run(self, function, name, given):
        stores, arguments = {}, []
        for kind, value in zip(function.argtypes, given, strict=True):
            if kind is not POINTER:
                bits = struct.unpack("q", struct.pack("d", value))[0] if kind is FLOAT else int(value)
                arguments.append((-1, bits))
            elif value is None:
                arguments.append((-1, 0))
            elif isinstance(value, int):
                store = self.seen[value].untyped_storage()
                stores.setdefault(store.data_ptr(), self.seen[value])
                arguments.append((store.data_ptr(), value - store.data_ptr()))
            else:
                # An array of C, which is only read.
                stores[id(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
                arguments.append((id(value), 0))
        places, tensors = list(stores), list(stores.values())
        content = struct.pack("2q", INDEX[name], len(tensors))
        for raw in map(stored, tensors):
            content += struct.pack("q", len(raw)) + raw
        content += struct.pack("q", len(arguments))
        for place, number in arguments:
            content += struct.pack("2q", -1 if place == -1 else places.index(place), number)
        result = function(*given)
        after = [stored(t) for t in tensors]
        self.calls.append(Call(name, content, [t.dtype for t in tensors], result or 0, after))
        return result


class Recorded:
    def __init__(self, library, recorder):
        self._library, self._recorder = library, recorder

    def __getattr__(self, name):
        function = getattr(self._library, name)
        if not function.argtypes:
            return function
        return lambda *given: self._recorder.run(function, name, given)


def stored(tensor):
    """The bytes of the storage of a tensor, whole."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()


def results(calls, content):
    """For each of ``calls``: what it returned and the tensors of its buffers, as replay.cpp has written them."""
    at, found = 0, []
    for call in calls:
        (result,) = struct.unpack_from("q", content, at)
        at += 8
        tensors = []
        for raw, dtype in zip(call.after, call.dtypes, strict=True):
            tensors.append(tensor(content[at : at + len(raw)], dtype))
            at += len(raw)
        found.append((result, tensors))
    assert at == len(content)
    return found


def tensor(raw, dtype):
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.zeros(0, dtype=dtype)
