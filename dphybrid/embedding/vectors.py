"""Vectors of a fixed number of lanes for numba, and loads and stores at plain addresses: what compiled row
kernels are made of.

A vector's lanes are part of its type, so a sum over lanes has one order and one result on every processor;
without them LLVM may not reorder a float sum and takes twice as long for a row. Addresses are int64. Kinds:
how values lie in memory (`FLOAT32`, `FLOAT64`, `BFLOAT16`, which is float32 in a vector).
"""

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

FLOAT32, FLOAT64, BFLOAT16 = 0, 1, 2

_I32, _I64 = ir.IntType(32), ir.IntType(64)


class Vector(types.Type):
    """`lanes` values of a kind."""

    def __init__(self, kind: int, lanes: int) -> None:
        self.kind, self.lanes = kind, lanes
        super().__init__(name=f"Vector({kind}, {lanes})")

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(ir.DoubleType() if self.kind == FLOAT64 else ir.FloatType(), self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.llvm)


def _arithmetic(symbol: Any, method: str) -> None:
    class Template(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            fits = len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]
            return signature(args[0], *args) if fits else None

    infer_global(symbol)(Template)

    @lower_builtin(symbol, Vector, Vector)
    def _lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, method)(*args)


for _name in ("add", "sub", "mul", "truediv"):
    _arithmetic(getattr(operator, _name), f"f{_name.removeprefix('true')}")


def _pointer(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _wide(lanes: int, value: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, lanes), [value] * lanes)


@intrinsic(prefer_literal=True)
def load(typing: Any, address: Any, kind: Any, lanes: Any) -> Any:
    """Return the vector of `lanes` values that lie at `address`."""
    stored = kind.literal_value
    out = Vector(FLOAT64 if stored == FLOAT64 else FLOAT32, lanes.literal_value)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if stored != BFLOAT16:
            return builder.load(_pointer(builder, args[0], out.llvm), align=8 if stored == FLOAT64 else 4)
        halves = builder.load(_pointer(builder, args[0], ir.VectorType(ir.IntType(16), out.lanes)), align=2)
        bits = builder.shl(builder.zext(halves, ir.VectorType(_I32, out.lanes)), _wide(out.lanes, 16))
        return builder.bitcast(bits, out.llvm)

    return out(address, kind, lanes), generate


@intrinsic
def store(typing: Any, address: Any, vector: Any) -> Any:
    """Write a vector's values to `address` as they are."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(
            args[1], _pointer(builder, args[0], vector.llvm), align=8 if vector.kind == FLOAT64 else 4
        )
        return context.get_dummy_value()

    return types.void(address, vector), generate


def _hash(builder: Any, low: Any, high: Any, column: Any, lanes: int) -> Any:
    """Return 32 bits for each lane's column that look random, from the 32 or 64 bits of a row."""
    integers = ir.VectorType(_I32, lanes)
    empty, nowhere = ir.Constant(integers, ir.Undefined), ir.Constant(integers, [0] * lanes)

    def spread(value: Any) -> Any:
        return builder.shuffle_vector(builder.insert_element(empty, value, _I32(0)), empty, nowhere)

    places = builder.add(spread(column), ir.Constant(integers, list(range(lanes))))
    noise = builder.add(builder.mul(places, _wide(lanes, 0x9E3779B1)), spread(low))
    for key in (None, high):
        noise = noise if key is None else builder.add(noise, spread(key))
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # the end of MurmurHash3
            shifted = builder.xor(noise, builder.lshr(noise, _wide(lanes, shift)))
            noise = builder.mul(shifted, _wide(lanes, factor))
        if high is None:
            return noise
    return builder.xor(noise, builder.lshr(noise, _wide(lanes, 16)))


@intrinsic(prefer_literal=True)
def uniform(typing: Any, row_noise: Any, column: Any, lanes: Any) -> Any:
    """Return float32 values between -1 and 1, odd multiples of 2**-24, a hash of `row_noise` and the columns
    from `column` on."""
    out = Vector(FLOAT32, lanes.literal_value)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        column32 = builder.trunc(context.cast(builder, args[1], column, types.int64), _I32)
        low, high = builder.trunc(args[0], _I32), builder.trunc(builder.lshr(args[0], _I64(32)), _I32)
        bits = builder.lshr(_hash(builder, low, high, column32, out.lanes), _wide(out.lanes, 7))
        odd = builder.or_(bits, _wide(out.lanes, 1))
        whole = builder.sitofp(builder.sub(odd, _wide(out.lanes, 2**24)), out.llvm)
        return builder.fmul(whole, ir.Constant(out.llvm, [2.0**-24] * out.lanes))

    return out(row_noise, column, lanes), generate


@intrinsic
def exponent(typing: Any, vector: Any) -> Any:
    """Return the powers of two in positive float32 values, as values: 3.0 for what is from 8 to below 16."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], ir.VectorType(_I32, vector.lanes))
        powers = builder.sub(builder.lshr(bits, _wide(vector.lanes, 23)), _wide(vector.lanes, 127))
        return builder.sitofp(powers, vector.llvm)

    return vector(vector), generate


@intrinsic
def fraction(typing: Any, vector: Any) -> Any:
    """Return positive float32 values without their powers of two: from 1 to below 2."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], ir.VectorType(_I32, vector.lanes))
        kept = builder.and_(bits, _wide(vector.lanes, 0x7FFFFF))
        return builder.bitcast(builder.or_(kept, _wide(vector.lanes, 0x3F800000)), vector.llvm)

    return vector(vector), generate


@intrinsic
def where_less(typing: Any, left: Any, right: Any, yes: Any, no: Any) -> Any:
    """Return lane by lane `yes` where left < right, else `no`."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return yes(left, right, yes, no), generate


@intrinsic
def any_less(typing: Any, left: Any, right: Any) -> Any:
    """Is left < right in a lane? The far ends of a distribution are computed for one vector in twenty."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = ir.IntType(left.lanes)
        found = builder.bitcast(builder.fcmp_ordered("<", args[0], args[1]), lanes)
        return builder.icmp_unsigned("!=", found, lanes(0))

    return types.boolean(left, right), generate


@intrinsic(prefer_literal=True)
def store_as(typing: Any, address: Any, vector: Any, kind: Any) -> Any:
    """Write float32 values as values of a kind, bfloat16 rounded to the nearest, of two to the even one."""
    stored = kind.literal_value

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes, value = vector.lanes, args[1]
        if stored == FLOAT64:
            value = builder.fpext(value, ir.VectorType(ir.DoubleType(), lanes))
        if stored == BFLOAT16:
            bits = builder.bitcast(value, ir.VectorType(_I32, lanes))
            even = builder.and_(builder.lshr(bits, _wide(lanes, 16)), _wide(lanes, 1))
            up = builder.add(builder.add(bits, even), _wide(lanes, 0x7FFF))
            value = builder.trunc(builder.lshr(up, _wide(lanes, 16)), ir.VectorType(ir.IntType(16), lanes))
        builder.store(
            value, _pointer(builder, args[0], value.type), align={FLOAT64: 8, BFLOAT16: 2}.get(stored, 4)
        )
        return context.get_dummy_value()

    return types.void(address, vector, kind), generate


@intrinsic(prefer_literal=True)
def store_rounded(typing: Any, address: Any, vector: Any, row_noise: Any, column: Any) -> Any:
    """Write float32 values as bfloat16, up or down by chance: noise below the kept bits, a hash of
    `row_noise` and the column."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes, integers = vector.lanes, ir.VectorType(_I32, vector.lanes)
        column32 = builder.trunc(context.cast(builder, args[3], column, types.int64), _I32)
        noise = _hash(builder, builder.trunc(args[2], _I32), None, column32, lanes)
        noise = builder.lshr(noise, _wide(lanes, 16))
        bits = builder.lshr(builder.add(builder.bitcast(args[1], integers), noise), _wide(lanes, 16))
        halves = ir.VectorType(ir.IntType(16), lanes)
        builder.store(builder.trunc(bits, halves), _pointer(builder, args[0], halves), align=2)
        return context.get_dummy_value()

    return types.void(address, vector, row_noise, column), generate


@intrinsic(prefer_literal=True)
def fill(typing: Any, value: Any, kind: Any, lanes: Any) -> Any:
    """Return a vector with a float64 in all lanes."""
    out = Vector(FLOAT64 if kind.literal_value == FLOAT64 else FLOAT32, lanes.literal_value)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        number = context.cast(
            builder, args[0], value, types.float64 if out.kind == FLOAT64 else types.float32
        )
        return _spread(builder, number, out)

    return out(value, kind, lanes), generate


@intrinsic(prefer_literal=True)
def widen(typing: Any, vector: Any, lanes: Any) -> Any:
    """Return a vector with the only lane of another in all lanes."""
    out = Vector(vector.kind, lanes.literal_value)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _spread(builder, builder.extract_element(args[0], _I32(0)), out)

    return out(vector, lanes), generate


def _spread(builder: Any, number: Any, out: Vector) -> Any:
    empty = ir.Constant(out.llvm, ir.Undefined)
    places = ir.Constant(ir.VectorType(_I32, out.lanes), [0] * out.lanes)
    return builder.shuffle_vector(builder.insert_element(empty, number, _I32(0)), empty, places)


@intrinsic
def total(typing: Any, vector: Any) -> Any:
    """Return the sum of the lanes in one lane: halves are added until one is left."""
    out = Vector(vector.kind, 1)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        values = [builder.extract_element(args[0], _I32(lane)) for lane in range(vector.lanes)]
        while len(values) > 1:
            half = len(values) // 2
            values = [builder.fadd(values[lane], values[lane + half]) for lane in range(half)]
        return _spread(builder, values[0], out)

    return out(vector), generate


@intrinsic
def root(typing: Any, vector: Any) -> Any:
    """Return the square roots."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        name = f"llvm.sqrt.v{vector.lanes}{'f64' if vector.kind == FLOAT64 else 'f32'}"
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector.llvm, [vector.llvm]), name
        )
        return builder.call(function, [args[0]])

    return vector(vector), generate


@intrinsic
def number(typing: Any, vector: Any) -> Any:
    """Return the only lane as float64."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = builder.extract_element(args[0], _I32(0))
        return value if vector.kind == FLOAT64 else builder.fpext(value, ir.DoubleType())

    return types.float64(vector), generate


def _reader(of: types.Type, llvm: ir.Type) -> Any:
    @intrinsic
    def read(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = builder.load(_pointer(builder, args[0], llvm))
            return builder.sext(value, _I64) if llvm == _I32 else value

        return (types.int64 if llvm == _I32 else of)(address), generate

    return read


def _writer(llvm: ir.Type) -> Any:
    @intrinsic
    def write(typing: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            given = builder.trunc(args[1], llvm) if llvm == _I32 else args[1]
            builder.store(given, _pointer(builder, args[0], llvm))
            return context.get_dummy_value()

        return types.void(address, value), generate

    return write


read_int, read_int32 = _reader(types.int64, _I64), _reader(types.int32, _I32)
read_float = _reader(types.float64, ir.DoubleType())
write_int, write_int32, write_float = _writer(_I64), _writer(_I32), _writer(ir.DoubleType())


@intrinsic
def take_next(typing: Any, address: Any) -> Any:
    """Return the int64 at `address` and add one to it; each caller of a team gets another one."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], _I64), _I64(1), "monotonic")

    return types.int64(address), generate


@intrinsic(prefer_literal=True)
def prefetch(typing: Any, address: Any, writing: Any) -> Any:
    """Ask for the cache line of an address, which need not exist. Ahead by occurrence: 1.9 ms where 2.8 are
    needed without."""
    wanted = writing.literal_value

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [place, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(args[0], place), _I32(wanted), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(address, writing), generate


@intrinsic(prefer_literal=True)
def stack(typing: Any, num_bytes: Any) -> Any:
    """Return the address of memory on the stack, aligned to a cache line: a row's summed gradient stays next
    to the core."""
    size = num_bytes.literal_value

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), size))
        place.align = 64
        return builder.ptrtoint(place, _I64)

    return types.int64(num_bytes), generate
