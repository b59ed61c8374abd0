"""The compiled loops of the CPU backend. No torch here; layout [tokens, kv_heads, head_dim], one layer, K or V.

float32 arrays are what they seem; uint16 arrays hold bfloat16 and int16 arrays hold float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

Array = NDArray[np.generic]
Floats = NDArray[np.float32]

_FLOAT, _HALF, _INT16, _INT32 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32)


def _compiled(function: Callable[..., Any]) -> Any:
    """Compiled at first use for the dtypes at hand, kept on disk where the machine lets us."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's directory nor a home directory is writable
        return njit(**options)(function)


def _widening(_context: Any, value: Any) -> Any:
    """One stored value as float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        (bits,) = arguments
        if value == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(bits, _INT32), ir.Constant(_INT32, 16)), _FLOAT)
        if value == types.int16:
            return builder.fpext(builder.bitcast(bits, _HALF), _FLOAT)
        return bits

    return types.float32(value), generate


def _narrowing(_context: Any, value: Any, like: Any) -> Any:
    """A float32 in the storage type of `like`, to nearest, ties to even."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        number = arguments[0]
        if like == types.uint16:
            bits = builder.bitcast(number, _INT32)
            odd = builder.and_(builder.lshr(bits, ir.Constant(_INT32, 16)), ir.Constant(_INT32, 1))
            rounded = builder.add(bits, builder.add(odd, ir.Constant(_INT32, 0x7FFF)))
            nan = builder.fcmp_unordered("uno", number, number)
            chosen = builder.select(nan, ir.Constant(_INT32, 0x7FC00000), rounded)
            return builder.trunc(builder.lshr(chosen, ir.Constant(_INT32, 16)), _INT16)
        if like == types.int16:
            return builder.bitcast(builder.fptrunc(number, _HALF), _INT16)
        return number

    return like(types.float32, like), generate


_widen: Any = intrinsic(_widening)
_narrow: Any = intrinsic(_narrowing)


@_compiled
def largest(bits: NDArray[np.unsignedinteger[Any]], mask: int) -> Any:
    """The largest value of `bits & mask` in a flat array; 0 for an empty one."""
    found = bits.dtype.type(0)
    for i in range(len(bits)):
        found = max(found, bits[i] & bits.dtype.type(mask))
    return found


@_compiled
def add(out: Array, values: Array, places: Floats) -> None:
    """out = values + places, where token t takes row min(t, last) of `places`."""
    last = len(places) - 1
    for token in range(values.shape[0]):
        place = places[min(token, last)]
        for head in range(values.shape[1]):
            for i in range(values.shape[2]):
                out[token, head, i] = _narrow(_widen(values[token, head, i]) + place[head, i], out[token, head, i])


@_compiled
def add_and_rotate(out: Array, keys: Array, places: Floats, cos: Floats, sin: Floats, interleaved: bool) -> None:
    """out = R (keys + places), token t by row t of cos and sin [tokens, pairs]. Dimensions beyond the pairs do not turn."""
    last, pairs, heads, dim = len(places) - 1, cos.shape[1], keys.shape[1], keys.shape[2]
    for token in range(keys.shape[0]):
        place = places[min(token, last)]
        for head in range(heads):
            if interleaved:
                for i in range(pairs):
                    a = _widen(keys[token, head, 2 * i]) + place[head, 2 * i]
                    b = _widen(keys[token, head, 2 * i + 1]) + place[head, 2 * i + 1]
                    c, s = cos[token, i], sin[token, i]
                    out[token, head, 2 * i] = _narrow(a * c - b * s, out[token, head, 2 * i])
                    out[token, head, 2 * i + 1] = _narrow(b * c + a * s, out[token, head, 2 * i + 1])
            else:
                for i in range(pairs):
                    a = _widen(keys[token, head, i]) + place[head, i]
                    b = _widen(keys[token, head, i + pairs]) + place[head, i + pairs]
                    c, s = cos[token, i], sin[token, i]
                    out[token, head, i] = _narrow(a * c - b * s, out[token, head, i])
                    out[token, head, i + pairs] = _narrow(b * c + a * s, out[token, head, i + pairs])
            for i in range(2 * pairs, dim):
                out[token, head, i] = _narrow(_widen(keys[token, head, i]) + place[head, i], out[token, head, i])


@_compiled
def move(
    out_keys: Array,
    keys: Array,
    out_values: Array,
    values: Array,
    nothing: Floats,
    cos: Floats,
    sin: Floats,
    interleaved: bool,
) -> None:
    """K of one layer turned, V as it is. nothing: zeros [1, kv_heads, head_dim]."""
    add_and_rotate(out_keys, keys, nothing, cos, sin, interleaved)
    add(out_values, values, nothing)
