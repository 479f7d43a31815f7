"""cuDF's library by pylibcudf: tables joined, grouped and sorted, with strings, in a pool of RMM."""
import numpy
import pylibcudf as plc
import rmm

from job import digest, say, steps

rmm.reinitialize(pool_allocator=True, initial_pool_size=1 << 28)
random = numpy.random.RandomState(9)
whole = plc.DataType(plc.TypeId.INT64)
rows = 100_000


def column(*shape, high):
    return plc.Column.from_array(random.randint(0, high, shape))


def ordered(table):
    count = table.num_columns()
    return plc.sorting.sort(table, [plc.types.Order.ASCENDING] * count, [plc.types.NullOrder.BEFORE] * count)


def on_host(table):
    return [c.to_arrow().to_numpy(zero_copy_only=False) for c in table.columns()]


keys, values = column(rows, high=5000), column(rows, high=1 << 30)
for step in steps(40):
    other = plc.Table([column(20_000, high=5000), column(20_000, high=1000)])
    left, right = plc.join.inner_join(plc.Table([keys]), plc.Table([other.columns()[0]]), plc.types.NullEquality.EQUAL)
    check = plc.copying.OutOfBoundsPolicy.DONT_CHECK
    joined = plc.Table([*plc.copying.gather(plc.Table([keys, values]), left, check).columns(),
                        *plc.copying.gather(other, right, check).columns()[1:]])
    groups, (sums, least) = plc.groupby.GroupBy(plc.Table([joined.columns()[0]])).aggregate([
        plc.groupby.GroupByRequest(joined.columns()[1], [plc.aggregation.sum(), plc.aggregation.count()]),
        plc.groupby.GroupByRequest(joined.columns()[2], [plc.aggregation.min(), plc.aggregation.max()])])
    # Groups come in any order.
    found = ordered(plc.Table([*groups.columns(), *sums.columns(), *least.columns()]))
    words = plc.strings.convert.convert_integers.from_integers(values)
    length = plc.unary.cast(plc.strings.attributes.count_characters(words), whole)
    values = plc.binaryop.binary_operation(
        plc.binaryop.binary_operation(values, length, plc.binaryop.BinaryOperator.MUL, whole),
        plc.Column.from_array(numpy.full(rows, (1 << 30) - 35)), plc.binaryop.BinaryOperator.PMOD, whole)
    if step % 10 == 0:
        say(step, found.num_rows(), digest(*on_host(found), *on_host(plc.Table([values]))))
