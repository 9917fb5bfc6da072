"""Inputs: which files, and their content in batches of bounded size.

A batch carries what a worker process needs to turn it into documents and to name a bad one: the file and the
number of its first line or row. Batches come in one order, whatever reads them.
"""

import dataclasses
import gzip
import pathlib

from packing.errors import PackError

_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 512

_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".txt": "text", ".md": "text"}


@dataclasses.dataclass
class Batch:
    kind: str           # "lines" (raw JSON lines), "rows" (values), "file" (one plain text file)
    path: str
    first: int = 0      # Number of the first line (from 1) or row (from 0).
    items: list = dataclasses.field(default_factory=list)
    input_bytes: int = 0


def format_of(path, forced):
    name = path.name.removesuffix(".gz")
    return forced if forced != "auto" else _FORMATS.get(pathlib.PurePath(name).suffix.lower())


def find_files(inputs, pattern, forced):
    """Files of `inputs` in order; those of a folder sorted by path. Returns [(path, format)]."""
    files = []
    for name in inputs:
        path = pathlib.Path(name)
        if path.is_dir():
            found = sorted(p for p in path.glob(pattern or "**/*") if p.is_file())
            # A pattern says which files are meant; without one, those of a known kind.
            found = [(p, format_of(p, forced) or ("text" if pattern else None)) for p in found]
            found = [(p, kind) for p, kind in found if kind]
            if not found:
                raise PackError(f"{path}: no file there matches {pattern or 'a known kind (' + ', '.join(_FORMATS) + ')'}")
            files += found
        elif path.is_file():
            files.append((path, format_of(path, forced) or "text"))
        else:
            raise PackError(f"{path}: no such file or folder")
    return files


def batches(files, field):
    """Yields the Batches of every file. `field`: the column of Parquet files."""
    for path, kind in files:
        try:
            if kind == "jsonl":
                yield from _lines(path)
            elif kind == "parquet":
                yield from _rows(path, field)
            else:
                yield Batch("file", str(path), input_bytes=path.stat().st_size)
        except OSError as error:
            raise PackError(f"{path}: {error.strerror or error}") from error


def _lines(path):
    compressed = path.name.endswith(".gz")
    with open(path, "rb") as raw, (gzip.open(raw) if compressed else raw) as file:
        batch, size, number, position = Batch("lines", str(path), 1), 0, 0, 0
        try:
            for number, line in enumerate(file, 1):
                batch.items.append(line)
                size += len(line)
                if size >= _BATCH_BYTES:
                    batch.input_bytes, position = raw.tell() - position, raw.tell()
                    yield batch
                    batch, size = Batch("lines", str(path), number + 1), 0
        except (EOFError, gzip.BadGzipFile) as error:
            raise PackError(f"{path}:{number + 1}: {error}") from error
        if batch.items:
            batch.input_bytes = raw.tell() - position
            yield batch


def _rows(path, field):
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise PackError(f"{path}: has no column '{field}'; its columns: {', '.join(file.schema_arrow.names)}")
            row, share = 0, path.stat().st_size / max(1, file.metadata.num_rows)
            for record in file.iter_batches(batch_size=_BATCH_ROWS, columns=[field]):
                values = record.column(0).to_pylist()
                yield Batch("rows", str(path), row, values, round(share * len(values)))
                row += len(values)
    except pyarrow.ArrowException as error:
        raise PackError(f"{path}: {error}") from error
