"""The compiled loops of the CPU backend: each writes a range of layers of a segment, without the interpreter's lock.

No torch here. numba knows no float of 16 or 8 bits: arrays of uint16 hold bfloat16, arrays of int16 float16, arrays of uint8
fp8 (e4m3); float32 and int8 are what they seem.
cos and sin are float32 [tokens, pairs]; dimensions beyond the pairs do not turn. One file, since numba's cache on disk
looks at the file of the outermost function alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

Array = NDArray[np.generic]
Floats = NDArray[np.float32]

_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
_INT16, _INT32 = ir.IntType(16), ir.IntType(32)
# Sums of a matrix product that stay in registers: 6 rows of 16 fill those of AVX2 and leave some free in AVX-512 and NEON.
_ROWS, _COLUMNS = 6, 16
_LANES = ir.VectorType(_FLOAT, _COLUMNS)
_SAME, _UNSET = ir.Constant(ir.VectorType(_INT32, _COLUMNS), [0] * _COLUMNS), ir.Constant(_LANES, ir.Undefined)
_TILE = 8 * _ROWS  # tokens that a matrix product takes: with the matrices they stay in the second-level cache

_SHORT_TILE = 8  # tokens whose sums stay in the first-level cache


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


class Scales(NamedTuple):
    """What the numbers of coded KV are multiplied by. None stands for KV that is not coded, in every loop."""

    keys: Floats  # [layers, kv_heads, head_dim]
    values: Floats  # [layers, tokens, kv_heads]


class Sums(NamedTuple):
    """Several KV of one kind, each contiguous, to be added up with weights. One is enough: the compiler sees their types in it.

    Compiled code takes no list of arrays; it finds them by where they lie. Whoever calls keeps them alive.
    """

    first: Planes
    scales: Scales | None
    places: NDArray[np.int64]  # [n, 3]: addresses of the numbers, of the scales of K and of V
    tokens: NDArray[np.int64]  # [n]
    weights: Floats  # [n]


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
    if kind == types.uint8:
        return _wide_fp8(builder, bits)
    if kind == types.int8:
        return builder.sitofp(bits, _FLOAT)
    return bits


def _wide_fp8(builder: Any, bits: Any) -> Any:
    """e4m3 has a float16's layout with one exponent bit less, whose bias is 8 smaller; no code is NaN."""
    extended = builder.sext(bits, _INT16)  # s eeee mmm -> s at the top of 16 bits
    moved = builder.and_(builder.shl(extended, ir.Constant(_INT16, 7)), ir.Constant(_INT16, 0xBFFF))
    return builder.fmul(builder.fpext(builder.bitcast(moved, _HALF), _FLOAT), ir.Constant(_FLOAT, 256.0))


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


@_intrinsic
def _pointer(_context: Any, address: Any, like: Any) -> Any:
    """A pointer to numbers such as those of the array `like`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), generate


@_compiled
def _scaled(bits: Any, scale: Any, head: int, i: int) -> Any:
    """A stored value: as it is where no scale [kv_heads, dim] is given, else as float32."""
    if scale is None:
        return bits
    return _widen(bits) * scale[head, i]


@_compiled
def _key_scale(scales: Any, layer: int) -> Any:
    if scales is None:
        return None
    return scales.keys[layer]


@_compiled
def _value_scale(scales: Any, layer: int, token: int, head: int) -> Any:
    if scales is None:
        return np.float32(1.0)
    return scales.values[layer, token, head]


@_compiled
def _turn(out: Array, keys: Array, scale: Any, cos: Floats, sin: Floats, interleaved: bool) -> None:
    """out = R keys, [tokens, kv_heads, dim], token t by row t of cos and sin. scale [kv_heads, dim] or None."""
    pairs, dim = cos.shape[1], out.shape[2]
    for token in range(out.shape[0]):
        for head in range(out.shape[1]):
            if interleaved:
                for i in range(pairs):
                    a = _widen(_scaled(keys[token, head, 2 * i], scale, head, 2 * i))
                    b = _widen(_scaled(keys[token, head, 2 * i + 1], scale, head, 2 * i + 1))
                    c, s = cos[token, i], sin[token, i]
                    out[token, head, 2 * i] = _convert(a * c - b * s, out[token, head, 2 * i])
                    out[token, head, 2 * i + 1] = _convert(b * c + a * s, out[token, head, 2 * i + 1])
            else:
                for i in range(pairs):
                    a = _widen(_scaled(keys[token, head, i], scale, head, i))
                    b = _widen(_scaled(keys[token, head, i + pairs], scale, head, i + pairs))
                    c, s = cos[token, i], sin[token, i]
                    out[token, head, i] = _convert(a * c - b * s, out[token, head, i])
                    out[token, head, i + pairs] = _convert(b * c + a * s, out[token, head, i + pairs])
            for i in range(2 * pairs, dim):
                out[token, head, i] = _convert(_scaled(keys[token, head, i], scale, head, i), out[token, head, i])


@_compiled
def _copy(out: Array, values: Array, scales: Any, layer: int) -> None:
    """out = values, [tokens, kv_heads, dim]."""
    if scales is None:
        copied, bits = out.reshape(-1), values.reshape(-1)
        for i in range(len(bits)):
            copied[i] = _convert(bits[i], copied[i])
    else:
        for token in range(out.shape[0]):
            for head in range(out.shape[1]):
                scale = scales.values[layer, token, head]
                for i in range(out.shape[2]):
                    out[token, head, i] = _convert(_widen(values[token, head, i]) * scale, out[token, head, i])


@_compiled
def move(out: Planes, kv: Planes, scales: Any, cos: Floats, sin: Floats, interleaved: bool, first: int, last: int) -> None:
    """K turned, V as it is, for layers [first, last). scales: of kv, which is a plain copy of its blob then, or None."""
    for layer in range(first, last):
        _turn(_plane(out, layer, 0), _plane(kv, layer, 0), _key_scale(scales, layer), cos, sin, interleaved)
        _copy(_plane(out, layer, 1), _plane(kv, layer, 1), scales, layer)


@_compiled
def _accumulate(sums: Floats, kv: Array, scales: Any, layer: int, part: int, first: int, weight: np.float32) -> None:
    """sums += weight · kv, [tokens, kv_heads, dim] each. first: the token that kv begins with, in its scales."""
    for token in range(kv.shape[0]):
        if part == 1:
            for head in range(kv.shape[1]):
                factor = weight * _value_scale(scales, layer, first + token, head)
                for i in range(kv.shape[2]):
                    sums[token, head, i] += factor * _widen(kv[token, head, i])
        else:
            scale = _key_scale(scales, layer)
            for head in range(kv.shape[1]):
                for i in range(kv.shape[2]):
                    sums[token, head, i] += weight * _widen(_scaled(kv[token, head, i], scale, head, i))


@_compiled
def _scales_of(scales: Any, places: Any, layers: int, tokens: int, heads: int, dim: int) -> Any:
    if scales is None:
        return None
    keys = carray(_pointer(places[1], scales.keys), (layers, heads, dim))
    return Scales(keys, carray(_pointer(places[2], scales.values), (layers, tokens, heads)))


@_compiled
def blend(
    out: Planes,
    base: Planes,
    scales: Any,
    offsets: Sums,
    layers: int,
    cos: Floats,
    sin: Floats,
    interleaved: bool,
    first: int,
    last: int,
) -> None:
    """R (base + Σ w·offset), for layers [first, last) of `layers`. scales: of base, or None.

    Offsets have as many tokens as base, or more.
    """
    heads, dim = base.heads, base.dim
    sums = np.empty((_SHORT_TILE, heads, dim), np.float32)
    for layer in range(first, last):
        for part in range(2):
            target, source = _plane(out, layer, part), _plane(base, layer, part)
            for start in range(0, base.tokens, _SHORT_TILE):
                end = min(start + _SHORT_TILE, base.tokens)
                tile = sums[: end - start]
                tile[:] = np.float32(0.0)
                _accumulate(tile, source[start:end], scales, layer, part, start, np.float32(1.0))
                for n in range(len(offsets.weights)):
                    tokens = offsets.tokens[n]
                    numbers = carray(_pointer(offsets.places[n, 0], offsets.first.flat), (layers, 2, tokens, heads, dim))
                    own = _scales_of(offsets.scales, offsets.places[n], layers, tokens, heads, dim)
                    _accumulate(tile, numbers[layer, part, start:end], own, layer, part, start, offsets.weights[n])
                if part:
                    _narrow_rows(target[start:end], tile)
                else:
                    _turn(target[start:end], tile, None, cos[start:end], sin[start:end], interleaved)


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
def _gather(rows: Floats, sums: Floats, source: Array, places: Floats, scales: Any, layer: int, part: int, first: int) -> None:
    """A tile of tokens as rows [kv_heads, tokens.., dim], and its sums [tokens.., kv_heads, dim..] at what their places add.

    first: the token that the tile begins with, in its scales.
    """
    for token in range(source.shape[0]):
        place = min(token, len(places) - 1)
        for head in range(source.shape[1]):
            for i in range(places.shape[2]):
                sums[token, head, i] = places[place, head, i]
            if part == 1:
                factor = _value_scale(scales, layer, first + token, head)
                for i in range(source.shape[2]):
                    rows[head, token, i] = factor * _widen(source[token, head, i])
            else:
                scale = _key_scale(scales, layer)
                for i in range(source.shape[2]):
                    rows[head, token, i] = _widen(_scaled(source[token, head, i], scale, head, i))


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
    scales: Any,
    weight: Array,
    bias: Array,
    lead: Array,
    cos: Floats,
    sin: Floats,
    interleaved: bool,
    first: int,
    last: int,
) -> None:
    """R (base + base·W + bias of the token's place), for layers [first, last). scales: of base, or None.

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
                later = places[min(start, len(places) - 1) :]
                _gather(rows, sums, source[start:end], later, scales, layer, part, start)
                _add_product(sums, rows, matrices, end - start)
                if part:
                    _narrow_rows(target[start:end], sums)
                else:
                    _turn(target[start:end], sums, None, cos[start:end], sin[start:end], interleaved)
