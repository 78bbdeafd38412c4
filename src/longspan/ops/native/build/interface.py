"""Declarations of the C functions of the kernels for ctypes; the .cpp files document the arguments."""

import ctypes

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float

Functions = dict[str, tuple[type | None, tuple[type, ...]]]  # name: (type of the result, types of the arguments)

# family: part: functions. A family has its sources in the folder of its name, one for each part. Each part is a unit
# such as "linear/forward", which is compiled into a separate library, since most calls need only one.
FAMILIES: dict[str, dict[str, Functions]] = {
    "linear": {
        "forward": {
            "longspan_linear_forward": (INT, (*[POINTER] * 10, *[LONG] * 5, INT, INT, FLOAT, INT)),
        },
        "backward": {
            "longspan_linear_backward": (INT, (*[POINTER] * 15, *[LONG] * 5, INT, INT, FLOAT, INT)),
        },
        "step": {
            "longspan_linear_step": (INT, (*[POINTER] * 5, *[LONG] * 3, INT, FLOAT, INT, INT)),
        },
        "products": {
            "longspan_products_read": (INT, (*[POINTER] * 6, INT)),
            "longspan_products_write": (INT, (*[POINTER] * 6, INT)),
            "longspan_products_slopes": (INT, (*[POINTER] * 7, INT)),
            "longspan_products_step": (INT, (*[POINTER] * 9, INT)),
        },
    },
    "gated": {
        "forward": {
            "longspan_gated_forward": (INT, (*[POINTER] * 14, INT, INT, FLOAT, INT)),
            "longspan_gated_span": (LONG, ()),
        },
        "backward": {
            "longspan_gated_backward": (INT, (*[POINTER] * 18, INT, INT, INT, FLOAT, INT)),
        },
        "step": {
            "longspan_gated_step": (INT, (*[POINTER] * 7, *[LONG] * 4, INT, INT, INT, FLOAT, INT)),
        },
    },
    "general": {
        "forward": {
            "longspan_general_forward": (INT, (*[POINTER] * 15, INT, INT, FLOAT, INT)),
            "longspan_general_span": (LONG, ()),
        },
        "backward": {
            "longspan_general_backward": (INT, (*[POINTER] * 20, INT, INT, INT, FLOAT, INT)),
        },
        "step": {
            "longspan_general_step": (INT, (*[POINTER] * 8, *[LONG] * 4, INT, INT, INT, FLOAT, INT)),
        },
    },
    "convolution": {
        "forward": {
            "longspan_convolution_forward": (INT, (*[POINTER] * 10, INT, INT, INT)),
        },
        "backward": {
            "longspan_convolution_backward": (INT, (*[POINTER] * 13, INT, INT, INT)),
            "longspan_convolution_part": (LONG, ()),
        },
        "step": {
            "longspan_convolution_step": (INT, (*[POINTER] * 7, INT, INT, INT, INT)),
        },
    },
    "scan": {
        "diagonal": {
            "longspan_scan_tile": (LONG, ()),
            "longspan_diagonal_forward": (INT, (*[POINTER] * 12, INT)),
            "longspan_diagonal_backward": (INT, (*[POINTER] * 14, INT)),
            "longspan_diagonal_step": (None, (*[POINTER] * 7, INT)),
        },
        "selective": {
            "longspan_scan_tile": (LONG, ()),
            "longspan_selective_forward": (INT, (*[POINTER] * 18, INT, INT)),
            "longspan_selective_backward": (INT, (*[POINTER] * 27, INT, INT)),
            "longspan_selective_step": (INT, (*[POINTER] * 13, INT, INT)),
        },
    },
    "pattern": {
        "forward": {
            "longspan_pattern_forward": (INT, (*[POINTER] * 13, INT, FLOAT, FLOAT, INT)),
        },
        "backward": {
            "longspan_pattern_backward": (INT, (*[POINTER] * 18, INT, FLOAT, FLOAT, INT)),
        },
        "chosen": {
            "longspan_chosen_forward": (INT, (*[POINTER] * 6, INT, FLOAT, INT)),
            "longspan_chosen_backward": (INT, (*[POINTER] * 6, INT, FLOAT, INT)),
        },
        "picked": {
            "longspan_picked_forward": (INT, (*[POINTER] * 6, INT, FLOAT, INT)),
            "longspan_picked_backward": (INT, (*[POINTER] * 6, INT, FLOAT, INT)),
            "longspan_picked_choose": (INT, (*[POINTER] * 6, INT)),
            "longspan_picked_largest": (INT, (*[POINTER] * 2, *[LONG] * 3, INT)),
        },
        "stick": {
            "longspan_stick_forward": (INT, (*[POINTER] * 6, INT, FLOAT, INT)),
            "longspan_stick_backward": (INT, (*[POINTER] * 10, INT, FLOAT, INT)),
        },
        "moved": {
            "longspan_moved_forward": (INT, (*[POINTER] * 8, INT)),
            "longspan_moved_backward": (INT, (*[POINTER] * 17, INT)),
        },
        "seen": {
            "longspan_buckets_seen": (None, (*[POINTER] * 5, INT)),
        },
    },
    "quantized": {
        "forward": {
            "longspan_quantized_forward": (INT, (*[POINTER] * 7, INT)),
            "longspan_quantized_rows": (INT, (*[POINTER] * 5, INT)),
        },
        "entropy": {
            "longspan_quantized_entropy": (INT, (*[POINTER] * 10, FLOAT, INT, INT)),
            "longspan_quantized_halves": (INT, ()),
        },
    },
    "decode": {
        "step": {
            "longspan_packed_size": (LONG, (LONG, LONG)),
            "longspan_pack": (None, (POINTER, LONG, LONG, INT, POINTER)),
            "longspan_pack_taps": (None, (POINTER, POINTER, LONG, LONG, POINTER)),
            "longspan_decode": (INT, (*[POINTER] * 5, LONG, LONG, POINTER, POINTER, LONG, POINTER, INT)),
        },
    },
}
UNITS = tuple(f"{family}/{part}" for family, parts in FAMILIES.items() for part in parts)


def units(family: str) -> tuple[str, ...]:
    """Return the units of a family, or the unit itself."""
    return (family,) if "/" in family else tuple(f"{family}/{part}" for part in FAMILIES[family])


def functions(name: str) -> Functions:
    """Return the functions of a unit, or of all units of a family."""
    found: Functions = {}
    for unit in units(name):
        family, _, part = unit.partition("/")
        found |= FAMILIES[family][part]
    return found


def declare(library: ctypes.CDLL, *names: str) -> ctypes.CDLL:
    """Set the types of the functions of units or families, by default all. Raises AttributeError if one is missing."""
    for name in names or FAMILIES:
        for function_name, (result, arguments) in functions(name).items():
            function = getattr(library, function_name)
            function.restype, function.argtypes = result, arguments
    return library
