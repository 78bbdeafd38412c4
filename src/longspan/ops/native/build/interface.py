"""Declarations of the C functions of the kernels for ctypes; the .cpp files document the arguments."""

import ctypes

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float

# family: name: (type of the result, types of the arguments). A family has its sources in the folder of its name; each
# family is compiled into a separate library.
FAMILIES: dict[str, dict[str, tuple[type | None, tuple[type, ...]]]] = {
    "linear": {
        "longspan_linear_step": (INT, (*[POINTER] * 5, *[LONG] * 3, INT, FLOAT, INT, INT)),
        "longspan_linear_forward": (INT, (*[POINTER] * 10, *[LONG] * 5, INT, INT, FLOAT, INT)),
        "longspan_linear_backward": (INT, (*[POINTER] * 15, *[LONG] * 5, INT, INT, FLOAT, INT)),
    },
    "gated": {
        "longspan_gated_forward": (INT, (*[POINTER] * 14, INT, INT, FLOAT, INT)),
        "longspan_gated_backward": (INT, (*[POINTER] * 18, INT, INT, INT, FLOAT, INT)),
        "longspan_gated_step": (INT, (*[POINTER] * 7, *[LONG] * 4, INT, INT, INT, FLOAT, INT)),
        "longspan_gated_span": (LONG, ()),
    },
    "general": {
        "longspan_general_forward": (INT, (*[POINTER] * 15, INT, INT, FLOAT, INT)),
        "longspan_general_backward": (INT, (*[POINTER] * 20, INT, INT, INT, FLOAT, INT)),
        "longspan_general_step": (INT, (*[POINTER] * 8, *[LONG] * 4, INT, INT, INT, FLOAT, INT)),
        "longspan_general_span": (LONG, ()),
    },
    "convolution": {
        "longspan_convolution_forward": (INT, (*[POINTER] * 10, INT, INT, INT)),
        "longspan_convolution_backward": (INT, (*[POINTER] * 13, INT, INT, INT)),
        "longspan_convolution_part": (LONG, ()),
        "longspan_convolution_step": (INT, (*[POINTER] * 7, INT, INT, INT, INT)),
    },
    "scan": {
        "longspan_scan_tile": (LONG, ()),
        "longspan_diagonal_forward": (INT, (*[POINTER] * 12, INT)),
        "longspan_diagonal_backward": (INT, (*[POINTER] * 14, INT)),
        "longspan_diagonal_step": (None, (*[POINTER] * 7, INT)),
        "longspan_selective_forward": (INT, (*[POINTER] * 18, INT, INT)),
        "longspan_selective_backward": (INT, (*[POINTER] * 27, INT, INT)),
        "longspan_selective_step": (INT, (*[POINTER] * 13, INT, INT)),
    },
    "pattern": {
        "longspan_pattern_forward": (INT, (*[POINTER] * 11, INT, FLOAT, FLOAT, INT)),
        "longspan_pattern_backward": (INT, (*[POINTER] * 15, INT, FLOAT, FLOAT, INT)),
        "longspan_buckets_seen": (None, (*[POINTER] * 5, INT)),
    },
    "decode": {
        "longspan_packed_size": (LONG, (LONG, LONG)),
        "longspan_pack": (None, (POINTER, LONG, LONG, INT, POINTER)),
        "longspan_pack_taps": (None, (POINTER, POINTER, LONG, LONG, POINTER)),
        "longspan_decode": (INT, (*[POINTER] * 5, LONG, POINTER, INT)),
    },
}


def declare(library: ctypes.CDLL, *families: str) -> ctypes.CDLL:
    """Set the types of the functions of ``families``, by default all. Raises AttributeError if one is missing."""
    for family in families or FAMILIES:
        for name, (result, arguments) in FAMILIES[family].items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library
