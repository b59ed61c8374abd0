"""The compiled loops of the CPU backend: each writes a range of layers of a segment, without the interpreter's lock.

No torch here. numba knows no 16-bit float: arrays of uint16 hold bfloat16 and arrays of int16 float16; float32 is what it seems.
cos and sin are float32 [tokens, pairs]; dimensions beyond the pairs do not turn. One file, since numba's cache on disk
looks at the file of the outermost function alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

Array = NDArray[np.generic]
Floats = NDArray[np.float32]

_FLOAT, _HALF, _INT16, _INT32 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32)
# Sums of a matrix product that stay in registers: 6 rows of 16 fill those of AVX2 and leave some free in AVX-512 and NEON.
_ROWS, _COLUMNS = 6, 16
_LANES = ir.VectorType(_FLOAT, _COLUMNS)
_SAME, _UNSET = ir.Constant(ir.VectorType(_INT32, _COLUMNS), [0] * _COLUMNS), ir.Constant(_LANES, ir.Undefined)
_TILE = 8 * _ROWS  # tokens that a matrix product takes: with the matrices they stay in the second-level cache


class Planes(NamedTuple):
    """KV [layers, 2 (K, V), tokens, kv_heads, head_dim], perhaps a column range of a buffer.

    Each plane [tokens, kv_heads, head_dim] is contiguous, and the compiler must know it: with strides the loops are up to
    ten times slower. So all of it is one flat array, from the first element to the last.
    """

    flat: Array
    layer_step: int  # elements from one layer to the next
    part_step: int  # elements from K to V
    tokens: int
    heads: int
    dim: int


def _compiled(function: Callable[..., Any]) -> Any:
    """Compiled at first use for the dtypes at hand, kept on disk where the machine lets us."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's directory nor a home directory is writable
        return njit(**options)(function)


def _intrinsic(generator: Callable[..., Any]) -> Any:
    return intrinsic(generator)


def _wide(builder: Any, kind: Any, bits: Any) -> Any:
    if kind == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(bits, _INT32), ir.Constant(_INT32, 16)), _FLOAT)
    if kind == types.int16:
        return builder.fpext(builder.bitcast(bits, _HALF), _FLOAT)
    return bits


def _narrow(builder: Any, kind: Any, number: Any) -> Any:
    if kind == types.uint16:
        bits = builder.bitcast(number, _INT32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_INT32, 16)), ir.Constant(_INT32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(_INT32, 0x7FFF)))
        nan = builder.fcmp_unordered("uno", number, number)
        chosen = builder.select(nan, ir.Constant(_INT32, 0x7FC00000), rounded)
        return builder.trunc(builder.lshr(chosen, ir.Constant(_INT32, 16)), _INT16)
    if kind == types.int16:
        return builder.bitcast(builder.fptrunc(number, _HALF), _INT16)
    return number


@_intrinsic
def _widen(_context: Any, value: Any) -> Any:
    """One stored value as float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _wide(builder, value, arguments[0])

    return types.float32(value), generate


@_intrinsic
def _convert(_context: Any, value: Any, like: Any) -> Any:
    """A stored value in the type of `like`, rounded to nearest, ties to even; the same bits if it is of that type already."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bits = arguments[0]
        return bits if value == like else _narrow(builder, like, _wide(builder, value, bits))

    return like(value, like), generate


@_compiled
def _plane(kv: Planes, layer: int, part: int) -> Any:
    start = layer * kv.layer_step + part * kv.part_step
    return kv.flat[start : start + kv.tokens * kv.heads * kv.dim].reshape((kv.tokens, kv.heads, kv.dim))


@_compiled
def largest(bits: NDArray[np.unsignedinteger[Any]], mask: int) -> Any:
    """The largest value of `bits & mask` in a flat array; 0 for an empty one."""
    found = bits.dtype.type(0)
    for i in range(len(bits)):
        found = max(found, bits[i] & bits.dtype.type(mask))
    return found


@_compiled
def _turn(out: Array, keys: Array, cos: Floats, sin: Floats, interleaved: bool) -> None:
    """out = R keys, [tokens, kv_heads, dim], token t by row t of cos and sin."""
    pairs, dim = cos.shape[1], out.shape[2]
    for token in range(out.shape[0]):
        for head in range(out.shape[1]):
            if interleaved:
                for i in range(pairs):
                    a, b = _widen(keys[token, head, 2 * i]), _widen(keys[token, head, 2 * i + 1])
                    c, s = cos[token, i], sin[token, i]
                    out[token, head, 2 * i] = _convert(a * c - b * s, out[token, head, 2 * i])
                    out[token, head, 2 * i + 1] = _convert(b * c + a * s, out[token, head, 2 * i + 1])
            else:
                for i in range(pairs):
                    a, b = _widen(keys[token, head, i]), _widen(keys[token, head, i + pairs])
                    c, s = cos[token, i], sin[token, i]
                    out[token, head, i] = _convert(a * c - b * s, out[token, head, i])
                    out[token, head, i + pairs] = _convert(b * c + a * s, out[token, head, i + pairs])
            for i in range(2 * pairs, dim):
                out[token, head, i] = _convert(keys[token, head, i], out[token, head, i])


@_compiled
def move(out: Planes, kv: Planes, cos: Floats, sin: Floats, interleaved: bool, first: int, last: int) -> None:
    """K turned, V as it is, for layers [first, last)."""
    for layer in range(first, last):
        _turn(_plane(out, layer, 0), _plane(kv, layer, 0), cos, sin, interleaved)
        copied, values = _plane(out, layer, 1).reshape(-1), _plane(kv, layer, 1).reshape(-1)
        for i in range(len(values)):
            copied[i] = _convert(values[i], copied[i])


@_intrinsic
def _add_block(_context: Any, out: Any, left: Any, right: Any, head: Any, row: Any, column: Any) -> Any:
    """_add_product for one head, _ROWS rows from `row` and _COLUMNS columns from `column`; nothing is checked."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out, left, right = (
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(signature.args[:3], arguments[:3], strict=True)
        )
        head, row, column = arguments[3:]
        index = head.type

        def at(array: Any, *indices: Any) -> Any:
            place = index(0)
            for axis, one in enumerate(indices):
                place = builder.add(builder.mul(place, builder.extract_value(array.shape, axis)), one)
            return builder.gep(array.data, [place])

        def lanes(pointer: Any) -> Any:
            return builder.bitcast(pointer, _LANES.as_pointer())

        rows = [builder.add(row, index(i)) for i in range(_ROWS)]
        places = [lanes(at(out, one, head, column)) for one in rows]
        before = [builder.load(place, align=4) for place in places]
        factors = [at(left, head, one, index(0)) for one in rows]
        shared = builder.extract_value(left.shape, 2)
        entry, loop, done = builder.block, builder.append_basic_block("shared"), builder.append_basic_block("done")
        builder.branch(loop)

        builder.position_at_end(loop)
        step, sums, after = builder.phi(index), [builder.phi(_LANES) for _ in rows], []
        vector = builder.load(lanes(at(right, head, step, column)), align=4)
        for total, factor in zip(sums, factors, strict=True):
            one = builder.insert_element(_UNSET, builder.load(builder.gep(factor, [step])), ir.IntType(32)(0))
            product = builder.fmul(builder.shuffle_vector(one, _UNSET, _SAME), vector, flags=("contract",))
            after.append(builder.fadd(total, product, flags=("contract",)))
        following = builder.add(step, index(1))
        builder.cbranch(builder.icmp_signed("<", following, shared), loop, done)
        for phi, start, end in zip([step, *sums], [index(0), *before], [following, *after], strict=True):
            phi.add_incoming(start, entry)
            phi.add_incoming(end, loop)

        builder.position_at_end(done)
        for place, total in zip(places, after, strict=True):
            builder.store(total, place, align=4)
        return context.get_dummy_value()

    return types.none(out, left, right, head, row, column), generate


@_compiled
def _add_product(out: Any, left: Any, right: Any, rows: int) -> None:
    """out += left @ right for every head, for the first `rows` rows and for what fills the last block up.

    float32, contiguous: out [a, heads, b], left [heads, a, c], right [heads, c, b]; a multiple of _ROWS, b of _COLUMNS, c not 0.
    """
    for head in range(len(left)):
        for row in range(0, rows, _ROWS):
            for column in range(0, right.shape[2], _COLUMNS):
                _add_block(out, left, right, head, row, column)


@_compiled
def _unpack(matrices: Floats, places: Floats, weight: Array, bias: Array, lead: Array) -> None:
    """I + W [kv_heads, dim, dim..], and what a token's place adds: one row for each leading token, one for all others."""
    for head in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            for j in range(weight.shape[1]):
                matrices[head, i, j] = _widen(weight[head, i, j])
            matrices[head, i, i] += np.float32(1.0)
        for place in range(len(places)):
            for i in range(weight.shape[1]):
                places[place, head, i] = _widen(bias[head, i])
        for place in range(len(lead)):
            for i in range(weight.shape[1]):
                places[place, head, i] += _widen(lead[place, head, i])


@_compiled
def _gather(rows: Floats, sums: Floats, source: Array, places: Floats) -> None:
    """A tile of tokens as rows [kv_heads, tokens.., dim], and its sums [tokens.., kv_heads, dim..] at what their places add."""
    for token in range(source.shape[0]):
        place = min(token, len(places) - 1)
        for head in range(source.shape[1]):
            for i in range(places.shape[2]):
                sums[token, head, i] = places[place, head, i]
            for i in range(source.shape[2]):
                rows[head, token, i] = _widen(source[token, head, i])


@_compiled
def _narrow_rows(out: Array, sums: Floats) -> None:
    for token in range(out.shape[0]):
        for head in range(out.shape[1]):
            for i in range(out.shape[2]):
                out[token, head, i] = _convert(sums[token, head, i], out[token, head, i])


@_compiled
def correct(
    out: Planes,
    base: Planes,
    weight: Array,
    bias: Array,
    lead: Array,
    cos: Floats,
    sin: Floats,
    interleaved: bool,
    first: int,
    last: int,
) -> None:
    """R (base + base·W + bias of the token's place), for layers [first, last).

    weight [layers, 2, kv_heads, dim, dim]; bias [layers, 2, kv_heads, dim]; lead [layers, 2, lead_tokens, kv_heads, dim]
    """
    heads, dim, width = base.heads, base.dim, -(-base.dim // _COLUMNS) * _COLUMNS
    matrices, places = np.zeros((heads, dim, width), np.float32), np.zeros((lead.shape[2] + 1, heads, width), np.float32)
    rows, sums = np.zeros((heads, _TILE, dim), np.float32), np.zeros((_TILE, heads, width), np.float32)
    for layer in range(first, last):
        for part in range(2):
            target, source = _plane(out, layer, part), _plane(base, layer, part)
            _unpack(matrices, places, weight[layer, part], bias[layer, part], lead[layer, part])
            for start in range(0, base.tokens, _TILE):
                end = min(start + _TILE, base.tokens)
                _gather(rows, sums, source[start:end], places[min(start, len(places) - 1) :])
                _add_product(sums, rows, matrices, end - start)
                if part:
                    _narrow_rows(target[start:end], sums)
                else:
                    _turn(target[start:end], sums, cos[start:end], sin[start:end], interleaved)
