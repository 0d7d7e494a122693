"""Reads a column of text from parquet and Arrow files, by pyarrow, as blocks of prepare_data.py.

A column's buffers go to the workers as they are: no text becomes a string of Python's.
"""

import functools
import os

from mistakes import Mistake
from text_sources import BLOCK_BYTES, TEXTS_32, TEXTS_64, Block

OPEN_FILES = 16  # row groups are read in any order


def arrow(path):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise Mistake(f"{path}: parquet and Arrow files need the Python package 'pyarrow': pip install pyarrow") from None
    return pyarrow


def damaged(path, error):
    return Mistake(f"{path}: {str(error).strip().splitlines()[0].rstrip('.')}; the file is cut off or damaged")


def open_parquet(path):
    status = os.stat(path)
    return open_parquet_as(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(OPEN_FILES)
def open_parquet_as(path, *stamp):
    # pre_buffer would hold a row group's compressed columns; a file may be one row group.
    return arrow(path).parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)


def field_type(schema, field):
    """Returns the type of a column, or of a struct's field, which dots lead to; None: there is none."""
    if field in schema.names:
        return schema.field(field).type
    name, dot, rest = field.partition(".")
    if not dot or name not in schema.names:
        return None
    kind = schema.field(name).type
    while dot:
        name, dot, rest = rest.partition(".")
        index = kind.get_field_index(name) if hasattr(kind, "get_field_index") else -1
        if index < 0:
            return None
        kind = kind.field(index).type
    return kind


def is_text(pa, kind):
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any(str(kind) == name for name in ("string", "large_string", "binary", "large_binary", "string_view", "binary_view"))


def check_field(path, schema, field):
    pa = arrow(path)
    kind = field_type(schema, field)
    if kind is None or not is_text(pa, kind):
        having = ", ".join(f"'{name}'" for name in schema.names if is_text(pa, schema.field(name).type)) or "none"
        what = f"has no column '{field}'" if kind is None else f"its column '{field}' is {kind} and no text"
        raise Mistake(f"{path}: {what}; columns with text: {having}; name one by --text-field")


def column(batch, field):
    """Returns a batch's column, or what dots lead to in it."""
    if field in batch.schema.names:
        return batch.column(field)
    name, _, rest = field.partition(".")
    values = batch.column(name)
    for name in rest.split("."):
        values = values.flatten()[values.type.get_field_index(name)]
    return values


def row_groups(path, field):
    """Returns (number, bytes in the file) of each row group."""
    pa = arrow(path)
    try:
        file = open_parquet(path)
        check_field(path, file.schema_arrow, field)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        return [(i, sum(group.column(j).total_compressed_size for j in range(group.num_columns))) for i, group in enumerate(groups)]
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, error) from None


def blocks_of(path, index, values, first_row, raw_bytes):
    """Yields a column's rows as blocks of about BLOCK_BYTES."""
    pa = arrow(path)
    if not (pa.types.is_string(values.type) or pa.types.is_binary(values.type) or pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)):
        values = values.cast(pa.large_string())
    if values.null_count:
        row = values.is_null().index(True).as_py()
        raise Mistake(f"{path}, row {first_row + row + 1}: has no text: it is null; leave such rows out first")
    rows = max(1, min(len(values), int(len(values) * BLOCK_BYTES / max(values.nbytes, 1))))
    for begin in range(0, len(values), rows):
        part = values.slice(begin, rows)
        wide = pa.types.is_large_string(part.type) or pa.types.is_large_binary(part.type)
        width = 8 if wide else 4
        _, offsets, data = part.buffers()
        borders = memoryview(offsets)[width * part.offset : width * (part.offset + len(part) + 1)].cast("B")
        ends = borders.cast("Q" if wide else "I")
        content = memoryview(data)[ends[0] : ends[-1]] if data is not None else b""
        where = lambda number, first=first_row + begin: f"{path}, row {first + number + 1}"  # noqa: E731
        yield Block(index, TEXTS_64 if wide else TEXTS_32, content, where, raw_bytes, borders, len(part))
        raw_bytes = 0


def read_row_group(source, group, raw_bytes, field):
    index, path = source
    pa = arrow(path)
    try:
        file = open_parquet(path)
        metadata = file.metadata.row_group(group)
        columns = [metadata.column(j) for j in range(metadata.num_columns)]
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == field) or metadata.total_byte_size
        rows = max(16, min(8192, int(metadata.num_rows * BLOCK_BYTES / max(size, 1))))
        first = sum(file.metadata.row_group(i).num_rows for i in range(group))
        for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=[field], use_threads=False):
            yield from blocks_of(path, index, column(batch, field), first, raw_bytes)
            first += len(batch)
            raw_bytes = 0
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, error) from None


def read_arrow(source, field):
    """Yields the blocks of an Arrow file (feather, too) or stream, as datasets.save_to_disk writes."""
    index, path = source
    pa = arrow(path)
    try:
        with pa.memory_map(path) as file:
            in_place = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = pa.ipc.open_file(file) if in_place else pa.ipc.open_stream(file)
            check_field(path, reader.schema, field)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if in_place else reader
            row = 0
            for batch in batches:
                yield from blocks_of(path, index, column(batch, field), row, batch.nbytes)
                row += len(batch)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise damaged(path, error) from None
