"""Tensor types and reduce operations. To add one, add an entry to a table."""

from __future__ import annotations

from dataclasses import dataclass

REDUCE_OPS = ("sum", "avg", "prod", "min", "max")


@dataclass(frozen=True)
class DType:
    """A tensor type.

    nbytes     bytes per element
    exact      largest integer up to which all integers are exact
    doublings  how often 1 can be doubled without overflow
    """

    nbytes: int
    exact: int
    doublings: int
    floating: bool = True


# Few backends support float8: ddpbench tries the call.
DTYPES: dict[str, DType] = {
    "float32": DType(4, 2**24, 126),
    "float64": DType(8, 2**53, 1022),
    "float16": DType(2, 2**11, 14),
    "bfloat16": DType(2, 2**8, 126),
    "float8_e4m3fn": DType(1, 2**4, 6),
    "float8_e5m2": DType(1, 2**3, 14),
    "int8": DType(1, 2**7 - 1, 6, floating=False),
    "int32": DType(4, 2**31 - 1, 30, floating=False),
    "int64": DType(8, 2**53, 62, floating=False),
    "uint8": DType(1, 2**8 - 1, 7, floating=False),
}
