# The runner of Python cells. Package cell describes the protocol. Cells run in IPython's
# InteractiveShell where IPython is installed, and else in the small shell of this file.
#
# Start-up counts: modules that only some contexts need are imported where they are needed.
import __future__
import ast
import base64
import builtins
import fcntl
import gc
import importlib
import linecache
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
import types
from json import dumps, loads  # bound here: programs replace attributes of modules

MAX_DISPLAYS = 100  # per run
MAX_DISPLAY_BYTES = 4 << 20  # of all displays of a run
MAX_VALUE_BYTES = 2 << 20
MAX_ROWS = 10_000
MAX_CHART_BYTES = 1 << 20
MAX_TRACEBACK_LINES = 100
MAX_TRACEBACK_LINE = 2_000
MAX_ERROR_VALUE = 20_000
MAX_FILES = 100
PART = 4000  # bytes, so that a chunk fits in PIPE_BUF and its write is atomic
PRIVATE_FD = 100  # private descriptors start here, out of the way of programs that renumber theirs

# Keys in display data that are not MIME types: the data that frames carry beside it.
CHART = "bullpen/chart"
COLUMNS = "bullpen/columns"
TOO_LARGE = object()  # their value where computing it would only exceed a limit

RUNNER = (lambda: None).__code__.co_filename
HIDDEN = {RUNNER}  # files whose frames tracebacks leave out
BUILTINS = dict(vars(builtins))
__builtins__ = BUILTINS  # a cell may delete builtins; the functions of this file use the copy


def private_fd(fd):
    """Returns a close-on-exec duplicate of fd with a high number."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, PRIVATE_FD)


def to_json(value):
    """Returns value as ASCII JSON without control characters. NaN and infinities become null."""
    try:
        text = dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    except (ValueError, TypeError):
        text = dumps(jsonable(value), separators=(",", ":"), allow_nan=False)
    return text.replace("\x7f", "\\u007f")


def jsonable(value):
    """Returns value, or the closest to it that JSON can express."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        value = float(value)
        return value if -float("inf") < value < float("inf") else None
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(v) for v in value]
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return jsonable(value.tolist()) if value.dtype.kind in "biufSU" else iso(value)
    if type(value).__name__ == "Decimal":
        return jsonable(float(value))
    return iso(value)


def iso(value):
    """Returns a date or time in ISO 8601 and anything else as text."""
    if value != value:  # NaT
        return None
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return str(value)


class Frames:
    """Writes frames between what the program prints."""

    def __init__(self, nonce):
        self.nonce = nonce.encode()
        self.out, self.err = private_fd(1), private_fd(2)
        self.streams = sys.stdout, sys.stderr
        self.lock = threading.Lock()
        self.number = 0

    def flush(self):
        """Writes what the program's streams have buffered.

        A stream that the program put in place of the original runs its code here. That is done
        only while an interrupt can end it.
        """
        streams = self.streams
        if INTERRUPTS.running and not INTERRUPTS.count:
            streams = sys.__dict__.get("stdout"), sys.__dict__.get("stderr"), *streams
        for stream in streams:
            try:
                stream.flush()
            except Exception:
                pass  # the program closed it or put something else there

    def send(self, body):
        """Sends a frame whose JSON is body without the opening brace."""
        self.flush()
        with INTERRUPTS.deferred(), self.lock:
            self.number += 1
            self.write(self.err, '{"sync":%d}' % self.number)
            self.write(self.out, '{"sync":%d,%s' % (self.number, body))

    def write(self, fd, text):
        frame = text.encode("ascii")
        for start in range(0, len(frame), PART):
            more = b"1" if start + PART < len(frame) else b"0"
            chunk = b"\x1b_%s;%s;%s\x1b\\" % (self.nonce, more, frame[start : start + PART])
            while chunk:
                try:
                    chunk = chunk[os.write(fd, chunk) :]
                except BlockingIOError:  # the program shares the open file and its flags
                    poll = select.poll()
                    poll.register(fd, select.POLLOUT)
                    poll.poll()
                except OSError:
                    os._exit(1)  # nobody reads any more, or the program closed the descriptor


class Interrupts:
    """Handles SIGINT: it ends the running cell and is ignored between cells."""

    def __init__(self):
        self.main = threading.get_ident()
        self.running = False
        self.task = None  # of the running cell, if it runs in an event loop
        self.count = 0
        self.depth = 0
        self.pending = False

    def install(self):
        signal.signal(signal.SIGINT, self.handle)

    def handle(self, signum, frame):
        if not self.running:
            return
        self.count += 1
        if self.depth:
            self.pending = True
            return
        if self.task is not None and os.getpid() == RUN.pid:
            import asyncio

            loop = self.task.get_loop()
            if asyncio.current_task(loop) is not self.task:
                # The cell awaits something. The call also wakes the event loop.
                loop.call_soon_threadsafe(self.task.cancel)
                if frame is None or frame.f_globals.get("__name__", "").partition(".")[0] in ("asyncio", "selectors"):
                    return
                # Other code holds up the event loop.
        raise KeyboardInterrupt

    def deferred(self):
        return self

    def __enter__(self):
        if threading.get_ident() == self.main:
            self.depth += 1

    def __exit__(self, *_):
        if threading.get_ident() == self.main:
            self.depth -= 1
            if self.pending and not self.depth:
                self.pending = False
                if self.running:
                    raise KeyboardInterrupt


class Run:
    """The state of the run in progress, or of the last one."""

    def __init__(self, frames):
        self.frames = frames
        self.pid = os.getpid()
        self.memory = Memory()
        self.begin(0)

    def begin(self, number):
        self.number = number
        self.displays = self.bytes = self.dropped = self.errors = 0

    def send(self, kind, body):
        self.frames.send('"type":"%s","run":%s,%s}' % (kind, to_json(self.number), body))

    def display(self, data, metadata=None, result=False):
        """Sends a display frame. Data is a MIME bundle that may also have CHART and COLUMNS."""
        data = dict(data)
        if os.getpid() != self.pid:  # a fork of the context must not speak for it
            print(data.get("text/plain", ""))
            return
        if self.displays >= MAX_DISPLAYS:
            self.dropped += 1
            return
        self.displays += 1
        fields, values, truncated = [], [], []
        for kind in sorted(data, key=lambda k: k != "text/plain"):  # the text first, if space is short
            value = data[kind]
            if value is None:
                continue
            name = {CHART: "chart", COLUMNS: "columns"}.get(kind, str(kind))
            cut = False
            if kind == COLUMNS and value is not TOO_LARGE:
                value, cut = value
            encoded = self.encode(kind, value)
            if cut or encoded is None or encoded[1]:
                truncated.append(name)
            if encoded is None:
                continue
            self.bytes += len(encoded[0])
            if kind in (CHART, COLUMNS):
                fields.append('"%s":%s' % (name, encoded[0]))
            else:
                values.append("%s:%s" % (to_json(name), encoded[0]))
        body = '"data":{%s},"metadata":%s' % (",".join(values), self.encode_metadata(metadata))
        if result:
            body += ',"result":true'
        for field in fields:
            body += "," + field
        if truncated:
            body += ',"truncated":' + to_json(truncated)
        self.send("display", body)

    def encode(self, kind, value):
        """Returns a value's JSON and whether it was cut, or None if it exceeds a limit."""
        if value is TOO_LARGE:
            return None
        left = min(MAX_VALUE_BYTES, MAX_DISPLAY_BYTES - self.bytes)
        if left < PART:  # a cut text would say nothing
            return None
        try:
            if kind == CHART and len(to_json(value["elements"])) > MAX_CHART_BYTES:
                return None
            if isinstance(value, (bytes, bytearray, memoryview)):
                if len(value) > left:
                    return None
                value = base64.b64encode(value).decode()
            elif isinstance(value, str):
                if kind.startswith("text/"):
                    return cut_text(value, left)
                if not kind.endswith(("+xml", "json", "javascript")):
                    value = value.replace("\n", "")  # base64
            elif not kind.endswith("json") and kind not in (CHART, COLUMNS):
                value = str(value)
            encoded = to_json(value)
        except (RecursionError, ValueError):  # circular
            return None
        return (encoded, False) if len(encoded) <= left else None

    def encode_metadata(self, metadata):
        try:
            encoded = to_json(metadata or {})
        except (RecursionError, ValueError):
            return "{}"
        return encoded if len(encoded) <= MAX_ERROR_VALUE else "{}"

    def error(self, name, value, text):
        """Sends an error frame. Text is the traceback."""
        self.errors += 1
        lines = text.rstrip("\n").split("\n")
        text = "\n".join(lines) + "\n"
        if os.getpid() != self.pid:
            print(text, end="", file=sys.stderr)
            return
        truncated = []
        if len(value) > MAX_ERROR_VALUE:
            value = value[:MAX_ERROR_VALUE]
            truncated.append("value")
        if len(lines) > MAX_TRACEBACK_LINES:
            head, tail = MAX_TRACEBACK_LINES // 2, MAX_TRACEBACK_LINES // 2 - 1
            lines[head:-tail] = ["... %d lines left out ..." % (len(lines) - head - tail)]
            truncated.append("traceback")
        if any(len(line) > MAX_TRACEBACK_LINE for line in lines):
            lines = [line[:MAX_TRACEBACK_LINE] for line in lines]
            truncated.append("traceback")
        body = '"name":%s,"value":%s,"traceback":%s' % (to_json(name), to_json(value), to_json(lines))
        if truncated:
            body += ',"truncated":' + to_json(sorted(set(truncated)))
        self.send("error", body)
        if PROGRAM:  # also for clients that read only the output
            print(text, end="", file=sys.stderr)

    def exception(self, error):
        """Sends an error frame for an exception in the standard form of Python."""
        self.error(type(error).__name__, text_of(error), "".join(format_exception(error)))

    def end(self, error, count, files):
        status = "ok"
        if isinstance(error, KeyboardInterrupt):
            status = "interrupted"
        elif error is not None or self.errors:
            status = "error"
        body = '"status":"%s","count":%d' % (status, count)
        if (memory := self.memory.measure()) is not None:
            body += ',"memory":%d' % memory
        body += ',"files":' + to_json(files)
        if self.dropped:
            body += ',"dropped":%d' % self.dropped
        self.send("end", body)


RUN = None  # the context's Run
PROGRAM = None  # the path of the program with --cell
INTERRUPTS = Interrupts()


def cut_text(value, limit):
    """Returns the JSON of value, cut at a character so that it has at most limit bytes, and whether it was cut."""
    kept = value[: max(limit, 0)]
    while True:
        encoded = to_json(kept)
        if len(encoded) <= max(limit, 2):
            return encoded, len(kept) < len(value)
        # Escapes make the JSON longer than the text. Each round removes at least one character.
        kept = kept[: min(len(kept) - 1, len(kept) * limit // len(encoded))]


def text_of(error):
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def format_exception(error):
    """Returns the lines of a traceback without frames of the runner."""

    def strip(summary, seen):
        if summary is None or id(summary) in seen:
            return
        seen.add(id(summary))
        if summary.stack is not None:
            summary.stack[:] = [frame for frame in summary.stack if frame.filename not in HIDDEN]
        for other in (summary.__cause__, summary.__context__, *(getattr(summary, "exceptions", None) or ())):
            strip(other, seen)

    try:
        summary = traceback.TracebackException.from_exception(error)
        strip(summary, set())
        alone = not summary.stack and summary.__cause__ is None and summary.__context__ is None
        if alone and getattr(summary, "exceptions", None) is None:
            return list(summary.format_exception_only())
        return list(summary.format())
    except Exception:  # the exception's own methods fail
        return ["%s: %s" % (type(error).__name__, text_of(error))]


class Memory:
    """Measures the memory that no other process shares.

    Linux visits all pages to compute it, which takes longer than a short cell. A new measurement is
    made after SLACK page faults or when as many pages were freed.
    """

    SLACK = 64

    def __init__(self):
        self.faults = self.resident = self.bytes = None

    def measure(self):
        """Returns the memory in bytes, or None if it is unknown."""
        try:
            import resource

            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            with open("/proc/self/statm", "rb") as f:
                resident = int(f.read().split()[1])
            if self.bytes is None or faults - self.faults > self.SLACK or self.resident - resident > self.SLACK:
                with open("/proc/self/smaps_rollup", "rb") as f:
                    fields = dict(line.split(b":", 1) for line in f.read().splitlines()[1:])
                self.bytes = 1024 * sum(int(fields[name].split()[0]) for name in (b"Private_Clean", b"Private_Dirty"))
                self.faults, self.resident = faults, resident
        except Exception:
            return None
        return self.bytes


def regular_files(directory):
    """Returns the modification times and sizes of the files in a directory by name, without hidden ones."""
    found = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.is_file(follow_symlinks=False):
                    info = entry.stat(follow_symlinks=False)
                    found[entry.name] = info.st_mtime_ns, info.st_size
    except OSError:
        pass  # deleted or not readable
    return found


def working_directory():
    try:
        return os.getcwd()
    except OSError:
        return ""


# Data frames and figures.


def columns_of(value):
    """Returns the columns of a pandas DataFrame and whether rows were cut, or None for any other value.

    The index is a column if it has a name.
    """
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(value, getattr(pandas, "DataFrame", ())):
        return None
    rows = value.iloc[:MAX_ROWS]
    if rows.size > MAX_VALUE_BYTES // 2:  # JSON needs at least two bytes for a value
        return TOO_LARGE
    index = rows.index
    series = [(index.names[i], index.get_level_values(i)) for i in range(index.nlevels) if index.names[i] is not None]
    series += [(name, rows.iloc[:, i]) for i, name in enumerate(rows.columns)]
    columns = {}
    for name, values in series:
        key = unique = ", ".join(map(str, name)) if isinstance(name, tuple) else str(name)
        number = 0
        while unique in columns:
            number += 1
            unique = "%s.%d" % (key, number)
        missing = values.isna()
        columns[unique] = [None if gone else jsonable(v) for v, gone in zip(values.tolist(), missing.tolist())]
    return columns, len(value) > MAX_ROWS


def is_figure(value):
    figure = sys.modules.get("matplotlib.figure")
    return figure is not None and isinstance(value, getattr(figure, "Figure", ()))


def is_blank(figure):
    return not figure.axes and not figure.lines


def extras(value):
    """Returns the data that a frame carries beside the MIME types of value."""
    try:
        if is_figure(value):
            chart = chart_of(value)
            return {CHART: chart} if chart else {}
        columns = columns_of(value)
        return {COLUMNS: columns} if columns else {}
    except Exception:  # a subclass or a library that behaves differently: the picture or table is there
        return {}


def figure_image(figure, kind="png"):
    if is_blank(figure):
        return None
    import io

    image = io.BytesIO()
    colors = {"facecolor": figure.get_facecolor(), "edgecolor": figure.get_edgecolor()}
    figure.savefig(image, format=kind, dpi=figure.dpi, bbox_inches="tight", **colors)
    return image.getvalue()


SCALES = "linear datetime categorical log symlog logit function functionlog asinh".split()


def chart_of(figure):
    """Returns the data of a figure's axes, or None if they are blank."""
    axes = [ax for ax in figure.get_axes() if ax.get_label() != "<colorbar>"]
    if not any(ax.has_data() for ax in axes):
        return None
    points = sum(len(line.get_xdata(orig=False)) for ax in axes for line in ax.lines)
    points += sum(len(collection.get_offsets()) for ax in axes for collection in ax.collections)
    points += sum(len(ax.patches) for ax in axes)
    if points > MAX_CHART_BYTES // 6:  # JSON needs at least six bytes for a point
        return TOO_LARGE
    if len(axes) == 1:
        return axes_chart(axes[0])
    title = figure._suptitle.get_text() if figure._suptitle else None
    return {"type": "superchart", "title": title or None, "elements": [axes_chart(ax) for ax in axes]}


def axes_chart(ax):
    from matplotlib.collections import PathCollection
    from matplotlib.container import BarContainer, ErrorbarContainer
    from matplotlib.lines import Line2D
    from matplotlib.patches import PathPatch, Rectangle, Wedge
    from matplotlib.text import Text

    chart = {"type": "unknown", "title": ax.get_title() or None}
    error_bars = set()
    for container in ax.containers:
        if isinstance(container, ErrorbarContainer):
            error_bars.update(map(id, [*container[1], *container[2]]))
    artists = [a for a in ax._children if not isinstance(a, Text) and id(a) not in error_bars]
    # Reference lines such as axhline's are partly in the coordinates of the axes.
    references = (ax.get_xaxis_transform(), ax.get_yaxis_transform())
    artists = [a for a in artists if not isinstance(a, Line2D) or a.get_transform() not in references]
    lines = [a.get_xydata().tolist() for a in artists if isinstance(a, Line2D)]
    boxes = [box for box in map(box_of, artists) if box and len(whisker_ends(box, lines)) == 2]

    def only(*kinds):
        return all(isinstance(a, kinds) for a in artists)

    if ax.name == "3d":
        return {**chart, "elements": []}
    if boxes and only(PathPatch, Line2D):
        return box_chart(ax, chart, boxes, lines)
    if only(Line2D):
        return point_chart(ax, chart, "line", [(a, a.get_xydata(), a.get_xdata(), a.get_ydata()) for a in artists])
    if only(PathCollection):
        return point_chart(ax, chart, "scatter", [(a, a.get_offsets(), None, None) for a in artists])
    if only(Wedge):
        elements = []
        for wedge in artists:
            label = wedge.get_label()
            # Angles are computed with 32 bits.
            angle = round(abs(float(wedge.theta2) - float(wedge.theta1)), 4)
            elements.append({"label": "" if label.startswith("_") else label, "angle": angle, "radius": wedge.r})
        return {**chart, "type": "pie", "elements": elements}
    bars = [c for c in ax.containers if isinstance(c, BarContainer)]
    if bars and only(Rectangle):
        return bar_chart(ax, chart, bars)
    return {**chart, "elements": []}


def labels(ax, swapped=False):
    """Returns the fields for the labels of the axes. If swapped, x is the vertical axis."""
    x, y = ax.get_xlabel() or None, ax.get_ylabel() or None
    if swapped:
        x, y = y, x
    return {"x_label": x, "y_label": y, "x_unit": unit(x), "y_unit": unit(y)}


def unit(label):
    found = re.search(r"\s\((.*?)\)|\[(.*?)\]", label or "")
    return (found[1] or found[2]) if found else None


def converter_of(axis):
    return axis.get_converter() if hasattr(axis, "get_converter") else axis.converter


def is_date(axis):
    return any("Date" in c.__name__ or "Period" in c.__name__ for c in type(converter_of(axis)).__mro__)


def categories(axis):
    """Returns the names of an axis's categories by position, empty if it has none."""
    if type(converter_of(axis)).__name__ != "StrCategoryConverter" or axis.units is None:
        return {}
    return {position: name for name, position in axis.units._mapping.items()}


def axis_value(axis, number):
    """Returns what a position on an axis means: a date, a category or a number."""
    number = jsonable(number)
    if number is None or isinstance(number, str):
        return number
    if is_date(axis):
        if hasattr(axis, "freq"):  # pandas plots periods at their ordinals
            return sys.modules["pandas"].Period(ordinal=int(number), freq=axis.freq).to_timestamp().isoformat()
        from matplotlib.dates import num2date

        return num2date(number).replace(tzinfo=None).isoformat()
    return categories(axis).get(number, number)


def ticks_of(axis):
    """Returns the positions and the labels of an axis's ticks.

    Matplotlib would compute the labels again, which takes as long as small figures. Those of the rendering are used if they
    are of the same ticks.
    """
    positions = axis.get_ticklocs()
    ticks = axis.majorTicks[: len(positions)]
    if [tick.get_loc() for tick in ticks] == list(positions):
        labels = [tick.label1 for tick in ticks if tick.label1.get_visible()]
        labels += [tick.label2 for tick in ticks if tick.label2.get_visible()]
    else:
        labels = axis.get_ticklabels()
    return positions, [label.get_text() for label in labels]


def axis_fields(axis, letter, scale):
    positions, names = ticks_of(axis)
    ticks = [float(t) for t in positions]
    if is_date(axis):
        scale = "datetime"
        ticks = [axis_value(axis, t) for t in ticks]
    elif categories(axis):
        scale = "categorical"
    elif scale == "linear" and ticks:
        if all(t == i and name != str(i) for i, (t, name) in enumerate(zip(ticks, names))):
            scale = "categorical"
    if scale not in SCALES:
        scale = "unknown"
    return {letter + "_ticks": ticks, letter + "_tick_labels": names, letter + "_scale": scale}


def point_chart(ax, chart, kind, series):
    """Returns the chart of lines or scattered points.

    Series has the artist, the positions, and the original x and y data of each.
    """
    elements = []
    for number, (artist, positions, xs, ys) in enumerate(series):
        label = artist.get_label()
        if label.startswith("_"):
            found = re.fullmatch(r"_child(\d+)", label)
            label = "Line " + (found[1] if found else str(number))
        points = []
        for i, (x, y) in enumerate(positions):
            if str(x) == "--":  # masked
                continue
            points.append([point(ax.xaxis, x, xs, i), point(ax.yaxis, y, ys, i)])
        elements.append({"label": label, "points": points})
    chart = {**chart, "type": kind, **labels(ax)}
    chart |= axis_fields(ax.xaxis, "x", ax.get_xscale()) | axis_fields(ax.yaxis, "y", ax.get_yscale())
    return {**chart, "elements": elements}


def point(axis, number, original, i):
    """Returns a coordinate: a date as the program gave it, or what the position means."""
    if original is not None and len(original) > i and hasattr(original[i], "isoformat"):
        return iso(original[i])
    return axis_value(axis, number)


def position_namer(axis):
    """Returns a function that returns the label of a bar or box between two positions of an axis."""
    from matplotlib.ticker import FixedLocator

    fixed = isinstance(axis.get_major_locator(), FixedLocator)
    ticks = zip(*ticks_of(axis)) if fixed else ()
    names = {position: name for position, name in ticks if name} or categories(axis)

    def name(low, high):
        center = (low + high) / 2
        if names:
            return names[min(names, key=lambda position: abs(position - center))]
        value = axis_value(axis, center)
        return value if isinstance(value, str) else "%.12g" % value

    return name


def bar_chart(ax, chart, containers):
    horizontal = all(c.orientation == "horizontal" for c in containers)
    names = position_namer(ax.xaxis), position_namer(ax.yaxis)
    elements = []
    for i, container in enumerate(containers):
        group = container.get_label()
        if group.startswith("_"):
            group = "Group %d" % i
        for bar in container:
            if container.orientation == "horizontal":
                label = names[1](bar.get_y(), bar.get_y() + bar.get_height())
                value = bar.get_width()
            else:
                label = names[0](bar.get_x(), bar.get_x() + bar.get_width())
                value = bar.get_height()
            elements.append({"label": label, "group": group, "value": jsonable(value)})
    return {**chart, "type": "bar", **labels(ax, swapped=horizontal), "elements": elements}


def box_of(artist):
    """Returns the box of a box plot, or None for another artist.

    Matplotlib draws it from the first quartile on, with a notch or without. It is a dict of its
    position axis p and its value axis v (0 is x), its extent on p, and its quartiles. A notch also
    has the median.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import PathPatch

    if isinstance(artist, PathPatch):
        points = artist.get_path().vertices.tolist()[:-1]  # the last closes the path
    elif isinstance(artist, Line2D):
        points = artist.get_xydata().tolist()
    else:
        return None
    if len(points) not in (5, 11) or points[0] != points[-1] or points[0] == points[1]:
        return None
    v = 1 if points[0][1] == points[1][1] else 0
    p = 1 - v
    if points[0][v] != points[1][v]:
        return None
    low, high = sorted((points[0][p], points[1][p]))
    third, median = (points[5][v], points[3][v]) if len(points) == 11 else (points[2][v], None)
    return {"p": p, "v": v, "low": low, "high": high, "first": points[0][v], "third": third, "median": median}


def whisker_ends(box, lines):
    """Returns the far ends of the two lines that leave a box."""
    p, v, center = box["p"], box["v"], (box["low"] + box["high"]) / 2
    return [
        line[1][v]
        for line in lines
        if len(line) == 2
        and line[0][p] == line[1][p]
        and abs(line[0][p] - center) < 1e-9
        and line[0][v] in (box["first"], box["third"])
    ]


def box_chart(ax, chart, boxes, lines):
    names = position_namer(ax.xaxis), position_namer(ax.yaxis)
    elements = []
    for box in boxes:
        p, v, low, high, first, third = (box[k] for k in ("p", "v", "low", "high", "first", "third"))
        ends = whisker_ends(box, lines)
        least, most, median, outliers = min([first, *ends]), max([third, *ends]), box["median"], []
        for line in lines:
            positions, values = [point[p] for point in line], [point[v] for point in line]
            if median is None and sorted(positions) == [low, high] and values[0] == values[1]:
                median = values[0]
            elif positions and low < min(positions) == max(positions) < high:
                outliers += [value for value in values if not least <= value <= most]
        elements.append({
            "label": names[p](low, high),
            "min": least,
            "first_quartile": first,
            "median": median,
            "third_quartile": third,
            "max": most,
            "outliers": outliers,
        })
    return {**chart, "type": "box_and_whisker", **labels(ax, swapped=boxes[0]["p"] == 1), "elements": elements}


class Figures:
    """Shows the figures of matplotlib.pyplot, as a finder of modules that waits for the import of matplotlib.

    The backend is a module that this finder makes. The variable MPLBACKEND would do as well, but
    the programs that a cell starts inherit it, and they have no such module.
    """

    BACKEND = "bullpen_figures"

    def __init__(self):
        self.drawn = False
        self.show = None  # called with a figure

    def find_spec(self, name, path=None, target=None):
        if name == self.BACKEND:
            from importlib.machinery import ModuleSpec

            return ModuleSpec(name, self)
        if name != "matplotlib":
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module):
                    set_matplotlib_directory()
                    execute(module)
                    self.configure(module)

                spec.loader.exec_module = exec_module
                return spec
        return None

    def configure(self, matplotlib):
        import logging

        # Otherwise it warns on stderr when making its cache takes long.
        logger = logging.getLogger("matplotlib.font_manager")
        logger.addFilter(lambda record: "building the font cache" not in record.getMessage())
        if not os.environ.get("MPLBACKEND"):
            matplotlib.rcParams["backend"] = "module://" + self.BACKEND
            matplotlib.interactive(True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        from matplotlib import is_interactive
        from matplotlib.backend_bases import FigureManagerBase
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        class FigureManager(FigureManagerBase):
            def show(manager):
                self.display(manager.canvas.figure)

        class FigureCanvas(FigureCanvasAgg):
            manager_class = FigureManager

        def draw_if_interactive():
            self.drawn = self.drawn or is_interactive()

        def new_figure_manager_given_figure(num, figure):
            draw_if_interactive()
            return FigureManager(FigureCanvas(figure), num)

        def new_figure_manager(num, *args, FigureClass=None, **kwargs):
            from matplotlib.figure import Figure

            return new_figure_manager_given_figure(num, (FigureClass or Figure)(*args, **kwargs))

        module.FigureCanvas, module.FigureManager = FigureCanvas, FigureManager
        module.new_figure_manager = new_figure_manager
        module.new_figure_manager_given_figure = new_figure_manager_given_figure
        module.draw_if_interactive = draw_if_interactive
        module.show = lambda *args, **kwargs: self.flush()

    def display(self, figure):
        if not is_blank(figure):
            self.show(figure)

    def flush(self):
        """Shows and closes all figures of pyplot."""
        self.drawn = False
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
        try:
            for figure in figures:
                self.display(figure)
        finally:
            pyplot.close("all")
            self.drawn = False
            figures = figure = None
            gc.collect(1)  # figures are reference cycles

    def end_cell(self):
        if self.drawn:
            self.flush()


FIGURES = Figures()


def set_matplotlib_directory():
    """Sets a directory for matplotlib's cache if it would find none, since it warns on stderr then."""
    if os.environ.get("MPLCONFIGDIR"):
        return
    home = os.path.expanduser("~")
    try:
        for variable, default in ("XDG_CONFIG_HOME", ".config"), ("XDG_CACHE_HOME", ".cache"):
            directory = os.path.join(os.environ.get(variable) or os.path.join(home, default), "matplotlib")
            os.makedirs(directory, exist_ok=True)
            if not os.access(directory, os.W_OK):
                raise PermissionError(directory)
    except OSError:
        import tempfile

        try:
            os.environ["MPLCONFIGDIR"] = tempfile.mkdtemp(prefix="matplotlib-")
        except OSError:
            pass  # matplotlib explains what is wrong


# The shells. Both have the attributes count and name, and these methods: warm does before a fork
# what first cells would do, start begins with a module as the user's, and run runs a cell.


class PlainShell:
    """Runs cells with the standard library only."""

    name = "Python"
    REPRS = {
        "text/html": "_repr_html_",
        "text/markdown": "_repr_markdown_",
        "image/svg+xml": "_repr_svg_",
        "image/png": "_repr_png_",
        "image/jpeg": "_repr_jpeg_",
        "application/pdf": "_repr_pdf_",
        "text/latex": "_repr_latex_",
        "application/json": "_repr_json_",
        "application/javascript": "_repr_javascript_",
    }

    def __init__(self):
        self.count = 1
        self.flags = 0
        self.futures = 0
        self.loop = None
        for name in __future__.all_feature_names:
            self.futures |= getattr(__future__, name).compiler_flag
        FIGURES.show = self.display

    def warm(self, values):
        for value in values:
            self.format(value)
        format_exception(ValueError())

    def start(self, module):
        self.namespace = vars(module)
        self.namespace["__builtins__"] = builtins
        self.last = None
        builtins.display = self.display

    def compile(self, code):
        """Returns the code objects of a cell's statements and of its last expression, or None for one it lacks."""
        name = PROGRAM or "<cell %d>" % self.count
        if not PROGRAM:
            linecache.cache[name] = len(code), None, code.splitlines(True), name
        flags = self.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree = compile(code, name, "exec", flags | ast.PyCF_ONLY_AST, True)
        value = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not code.rstrip().endswith(";"):
            value = compile(ast.Expression(tree.body.pop().value), name, "eval", flags, True)
        body = compile(tree, name, "exec", flags, True)
        self.flags |= body.co_flags & self.futures
        if value is not None and self.flags & ~flags:  # from __future__ in this cell
            value = None
            tree = compile(code, name, "exec", self.flags | flags | ast.PyCF_ONLY_AST, True)
            value = compile(ast.Expression(tree.body[-1].value), name, "eval", self.flags | flags, True)
        return body, value

    async def run(self, code):
        """Runs a cell and returns its exception, if any."""
        error = None
        try:
            try:
                for part in self.compile(code):
                    if part is None:
                        continue
                    value = eval(part, self.namespace)
                    if part.co_flags & 0x80:  # CO_COROUTINE: it has a top-level await
                        value = await value if INTERRUPTS.task is not None else self.run_in_loop(value)
                    if value is not None:
                        self.result(value)
            except BaseException as e:
                error = e
            sys.settrace(None)
            sys.setprofile(None)
            restore_interpreter()
            if error is not None:
                self.failed(error)
            FIGURES.end_cell()
        except BaseException as e:  # an interrupt, or a figure that cannot be drawn
            restore_interpreter()
            error = error or e
            self.failed(e)
        self.count += 1
        return error

    def run_in_loop(self, coroutine):
        """Runs a coroutine of a program, which has no event loop before it needs one."""
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
        return self.loop.run_until_complete(coroutine)

    def failed(self, error):
        error = interrupted_error(error)
        if not (isinstance(error, SystemExit) and (PROGRAM or os.getpid() != RUN.pid)):
            RUN.exception(error)

    def result(self, value):
        if "_" not in self.namespace or self.namespace["_"] is self.last:
            self.namespace["_"] = self.last = value
        self.show(value, result=True)

    def display(self, *values, raw=False, metadata=None, display_id=None, **_):
        for value in values:
            extra = {**(metadata or {}), **({"display_id": str(display_id)} if display_id else {})}
            if raw:
                RUN.display(value, extra)
            else:
                self.show(value, extra)

    def show(self, value, metadata=None, result=False):
        if hasattr(type(value), "_ipython_display_"):
            value._ipython_display_()
            return
        data, more = self.format(value)
        RUN.display(data, {**more, **(metadata or {})}, result)

    def format(self, value):
        """Returns the MIME bundle of a value and its metadata."""
        kind, data, metadata = type(value), {}, {}
        if hasattr(kind, "_repr_mimebundle_"):
            data, metadata = with_metadata(value._repr_mimebundle_())
        for mime, name in self.REPRS.items():
            if mime not in data and hasattr(kind, name) and not isinstance(value, type):
                data[mime], more = with_metadata(getattr(value, name)())
                if more:
                    metadata[mime] = more
        if is_figure(value):
            data["image/png"] = figure_image(value)
        if "text/plain" not in data:
            data["text/plain"] = repr(value)
        return {**data, **extras(value)}, metadata


def with_metadata(value):
    data, metadata = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    return dict(data) if isinstance(data, dict) else data, dict(metadata or {})


def restore_interpreter():
    """Restores what the runner needs after a cell's code.

    Callers end tracing and profiling themselves before: this call would be traced.
    """
    for name in BUILTINS.keys() - vars(builtins).keys():
        setattr(builtins, name, BUILTINS[name])
    for name in ("stdin", "stdout", "stderr"):
        if not hasattr(sys, name):
            setattr(sys, name, getattr(sys, "__%s__" % name, None))
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000))


def interrupted_error(error):
    """Returns KeyboardInterrupt for an error that an interrupt caused, and else the error."""
    if INTERRUPTS.count:
        asyncio, subprocess = sys.modules.get("asyncio"), sys.modules.get("subprocess")
        cancelled = asyncio and isinstance(error, asyncio.CancelledError)
        killed = subprocess and isinstance(error, subprocess.CalledProcessError) and error.returncode == -signal.SIGINT
        if cancelled or killed:
            return KeyboardInterrupt().with_traceback(error.__traceback__)
    return error


def ipython_shell():
    """Returns a shell that runs cells in IPython's InteractiveShell."""
    import IPython
    from IPython.core.error import UsageError
    from IPython.core import compilerop, displayhook, displaypub, formatters, interactiveshell, profiledir, pylabtools
    from traitlets import Dict, Set, Type, Unicode, observe
    from traitlets.config import Config, Configurable

    class DisplayFormatter(formatters.DisplayFormatter):
        def format(self, obj, include=None, exclude=None):
            data, metadata = super().format(obj, include=include, exclude=exclude)
            if data:
                data = {**data, **extras(obj)}
            return data, metadata

    class DisplayHook(displayhook.DisplayHook):
        def write_output_prompt(self):
            pass

        def write_format_data(self, format_dict, md_dict=None):
            RUN.display(format_dict, md_dict, result=True)

        def log_output(self, format_dict):
            pass  # would keep every output for the life of the context

        def finish_displayhook(self):
            self._is_active = False

    class DisplayPublisher(displaypub.DisplayPublisher):
        def publish(self, data, metadata=None, *_, transient=None, update=False, **__):
            metadata = dict(metadata or {})
            if transient and "display_id" in transient:
                metadata["display_id"] = transient["display_id"]
            if update:
                metadata["update"] = True
            RUN.display(data, metadata)

        def clear_output(self, wait=False):
            pass  # what was sent stays sent

    class CachingCompiler(compilerop.CachingCompiler):
        def get_code_name(self, raw_code, transformed_code, number):
            return PROGRAM or super().get_code_name(raw_code, transformed_code, number)

        def format_code_name(self, name):
            return None if PROGRAM else super().format_code_name(name)

    class Profile(profiledir.ProfileDir):
        """A profile without a directory."""

        @observe("location")
        def _location_changed(self, change):
            pass

    class InlineBackend(Configurable):
        """The part of matplotlib-inline's settings that concern pictures, for %config."""

        figure_formats = Set({"png"}, config=True)
        figure_format = Unicode(config=True)
        print_figure_kwargs = Dict({"bbox_inches": "tight"}, config=True)
        rc = Dict(config=True)

        @observe("figure_format")
        def _figure_format_changed(self, change):
            self.figure_formats = {change["new"]}

        @observe("figure_formats", "print_figure_kwargs")
        def _figure_formats_changed(self, change):
            pylabtools.select_figure_formats(self.parent, self.figure_formats, **self.print_figure_kwargs)

        @observe("rc")
        def _rc_changed(self, change):
            import matplotlib

            matplotlib.rcParams.update(change["new"])

    class Shell(interactiveshell.InteractiveShell):
        displayhook_class = Type(DisplayHook)
        display_pub_class = Type(DisplayPublisher)
        compiler_class = Type(CachingCompiler)
        ptys = None

        def init_ipython_dir(self, ipython_dir):
            self.ipython_dir = os.path.expanduser("~/.ipython")

        @observe("ipython_dir")
        def _ipython_dir_changed(self, change):
            pass  # nothing is stored there

        def init_profile_dir(self, profile_dir):
            # IPython's database is created in it.
            self.profile_dir = Profile(location=os.path.join(os.environ.get("TMPDIR") or "/tmp", ".ipython"))

        def init_virtualenv(self):
            pass  # the interpreter is the one that was chosen

        def init_display_formatter(self):
            self.display_formatter = DisplayFormatter(parent=self)
            self.configurables.append(self.display_formatter)
            png = self.display_formatter.formatters["image/png"]
            png.for_type_by_name("matplotlib.figure", "Figure", figure_image)
            self.configurables.append(InlineBackend(parent=self))

        def _format_exception_for_storage(self, *_, **__):
            pass  # nothing reads it

        def _tee(self, channel):  # would keep all output for the life of the context
            import contextlib

            return contextlib.nullcontext()

        def enable_gui(self, gui=None):
            pass

        def enable_matplotlib(self, gui=None):
            import matplotlib.pyplot

            matplotlib.pyplot.switch_backend("module://" + FIGURES.BACKEND)
            matplotlib.interactive(True)
            return "inline", matplotlib.get_backend()

        async def run_ast_nodes(self, *args, **kwargs):
            try:
                return await super().run_ast_nodes(*args, **kwargs)
            finally:
                sys.settrace(None)
                sys.setprofile(None)
                restore_interpreter()

        def ask_exit(self):
            raise SystemExit

        def system_piped(self, cmd):
            interrupts = INTERRUPTS.count
            if self.has_ptys():
                super().system_piped(cmd)
            else:
                self.system_raw(cmd)
            if INTERRUPTS.count != interrupts:  # both swallow the interrupt
                raise KeyboardInterrupt

        system = system_piped

        def getoutput(self, cmd, split=True, depth=0):
            interrupts = INTERRUPTS.count
            if self.has_ptys():
                output = super().getoutput(cmd, split, depth=depth + 1)
            else:
                import subprocess
                from IPython.utils.text import LSString, SList

                command = self.var_expand(cmd, depth=depth + 1)
                pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
                text = subprocess.run(command, shell=True, encoding="utf-8", errors="replace", **pipe).stdout
                output = SList(text.splitlines()) if split else LSString(text)
            if INTERRUPTS.count != interrupts:
                raise KeyboardInterrupt
            return output

        def has_ptys(self):
            if self.ptys is None:
                try:
                    for fd in os.openpty():
                        os.close(fd)
                    self.ptys = True
                except OSError:
                    self.ptys = False
            return self.ptys

        def _get_exc_info(self, exc_tuple=None):
            kind, error, tb = super()._get_exc_info(exc_tuple)
            error = interrupted_error(error)
            while tb is not None and (following := tb.tb_next) is not None:
                if following.tb_frame.f_code.co_filename == RUNNER:
                    tb.tb_next = following.tb_next
                    continue
                tb = following
            return type(error), error, error.__traceback__

        def showtraceback(self, *args, **kwargs):
            error = sys.exc_info()[1]
            if isinstance(error, SystemExit) and (PROGRAM or os.getpid() != RUN.pid):
                raise error
            try:
                super().showtraceback(*args, **kwargs)
            except Exception:  # for example because str(error) fails
                RUN.exception(error)

        def _showtraceback(self, etype, evalue, stb):
            RUN.error(etype.__name__, text_of(evalue), "\n".join(map(str, stb)))

    class IPythonShell:
        name = "IPython " + IPython.__version__

        def __init__(self):
            config = Config()
            config.HistoryManager.enabled = False
            config.InteractiveShell.colors = "NoColor" if IPython.version_info[0] < 9 else "nocolor"
            config.InteractiveShell.history_length = 0
            HIDDEN.add(interactiveshell.__file__)
            # A subclass's instance is also InteractiveShell.instance(), which get_ipython() returns.
            module = types.ModuleType("__main__")
            self.shell = Shell.instance(config=config, user_module=module, user_ns=vars(module))
            self.shell.events.register("post_execute", FIGURES.end_cell)
            FIGURES.show = importlib.import_module("IPython.display").display

        def start(self, module):
            pass

        def warm(self, values):
            shell = self.shell
            shell.run_cell("None", silent=True)
            for value in values:
                shell.display_formatter.format(value)
            try:
                raise ValueError
            except ValueError:
                shell.InteractiveTB.structured_traceback(*sys.exc_info())

        @property
        def count(self):
            return self.shell.execution_count

        async def run(self, code):
            """Runs a cell and returns its exception, if any."""
            shell, errors = self.shell, RUN.errors
            try:
                failure = None
                try:
                    transformed = shell.transform_cell(code)
                except Exception:
                    transformed, failure = code, sys.exc_info()
                cell = {"transformed_cell": transformed, "preprocessing_exc_tuple": failure}
                if INTERRUPTS.task is not None and shell.should_run_async(code, **cell):
                    result = None
                    try:
                        result = await shell.run_cell_async(code, store_history=True, **cell)
                    finally:
                        shell.events.trigger("post_execute")
                        shell.events.trigger("post_run_cell", result)
                else:
                    result = shell.run_cell(code, store_history=True)
                error = result.error_before_exec or result.error_in_exec
                if error is None and INTERRUPTS.count and code.lstrip().startswith("%%"):
                    error = KeyboardInterrupt()  # magics for other languages swallow it
            except BaseException as e:
                sys.settrace(None)
                sys.setprofile(None)
                restore_interpreter()
                error = e
            if error is not None and errors == RUN.errors and not isinstance(error, SystemExit):
                if isinstance(error, UsageError):  # the user of a magic needs no frames
                    RUN.error("UsageError", text_of(error), "UsageError: " + text_of(error))
                else:
                    RUN.exception(interrupted_error(error))
            return error

    return IPythonShell()


def make_shell():
    sys.meta_path.insert(0, FIGURES)
    try:
        import IPython  # noqa: F401
    except ImportError:
        return PlainShell()
    return ipython_shell()


class StdinNotImplementedError(EOFError, NotImplementedError):
    """Raised by input and getpass in a context."""


def no_input(*_, **__):
    raise StdinNotImplementedError("input is not available: nobody answers")


class Context:
    """A context: an event loop that reads requests between cells and runs the tasks that cells leave."""

    def __init__(self, shell, requests):
        import asyncio
        import contextvars

        self.shell = shell
        self.requests = requests
        self.buffer = b""
        self.ended = False
        self.home = working_directory()
        self.variables = contextvars.copy_context()
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)

    def serve(self):
        """Serves requests until there are no more."""
        self.loop.add_reader(self.requests, self.read)
        while not self.ended:
            try:
                self.loop.run_forever()
            except (KeyboardInterrupt, SystemExit):
                pass  # of a task that a cell left, or that an interrupt reached; the loop goes on
        self.loop.remove_reader(self.requests)

    def read(self):
        data = os.read(self.requests, 1 << 20)
        self.buffer += data
        if not data:
            self.ended = True
            self.loop.stop()
            return
        self.next()

    def next(self):
        line, newline, rest = self.buffer.partition(b"\n")
        if not newline:
            self.loop.add_reader(self.requests, self.read)
            return
        self.loop.remove_reader(self.requests)
        self.buffer = rest
        # The variables of module contextvars that a cell sets are there in the next.
        options = {"context": self.variables} if sys.version_info >= (3, 11) else {}
        task = self.loop.create_task(self.run(loads(line)), **options)
        INTERRUPTS.task = task
        task.add_done_callback(lambda _: self.next())

    async def run(self, request):
        RUN.begin(request["run"])
        variables = request.get("env") or {}
        former = {name: os.environ.get(name) for name in variables}
        directory = working_directory()
        before = regular_files(directory)
        forget_missing_modules()
        count, error = self.shell.count, None
        INTERRUPTS.count = 0
        INTERRUPTS.install()
        try:
            try:
                INTERRUPTS.running = True
                os.environ.update(variables)
                error = await self.shell.run(request["code"])
                if os.getpid() == RUN.pid:
                    RUN.frames.flush()
            finally:
                INTERRUPTS.running = False
        except BaseException as e:
            error = e
            RUN.exception(interrupted_error(e))
        if os.getpid() != RUN.pid:
            exit_fork(error)
        INTERRUPTS.pending = False
        INTERRUPTS.install()
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        files = []
        for name, state in sorted(regular_files(directory).items()):
            if before.get(name) != state and len(files) < MAX_FILES:
                path = name if directory == self.home else os.path.join(directory, name)
                files.append({"path": os.fsencode(path).decode("utf-8", "replace"), "size": state[1]})
        RUN.end(interrupted_error(error), count, files)


def close_loop(loop):
    """Ends the tasks that were left in an event loop."""
    import asyncio

    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def exit_fork(error):
    """Ends a fork that a cell made and that reached the cell's end."""
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def forget_missing_modules():
    """Makes modules importable that were installed or written since the last search."""
    for path in {*sys.path, working_directory()}:
        finder = sys.path_importer_cache.get(path, "unknown")
        if finder is None:
            del sys.path_importer_cache[path]
        elif hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()


def add_user_site():
    """Puts the user's site on the path even before anything is installed there."""
    site = sys.modules.get("site")
    if site is None or not site.ENABLE_USER_SITE:
        return
    site.USER_BASE = site.USER_SITE = None  # the home may have changed
    user = site.getusersitepackages()
    if user not in sys.path:
        system = site.getsitepackages()
        first = next((i for i, path in enumerate(sys.path) if path in system), len(sys.path))
        sys.path.insert(first, user)


def start_context(shell, nonce):
    """Runs a context on descriptors 0 to 2."""
    global RUN
    requests = private_fd(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    RUN = Run(Frames(nonce))
    os.register_at_fork(after_in_child=lambda: close_all(requests, RUN.frames.out, RUN.frames.err))
    INTERRUPTS.install()
    builtins.input = no_input
    BUILTINS["input"] = no_input
    import getpass

    getpass.getpass = no_input
    start_shell(shell)
    sys.path.insert(0, "")
    sys.argv[:] = [""]
    context = Context(shell, requests)
    version = ".".join(map(str, sys.version_info[:3]))
    RUN.frames.send('"type":"ready","version":"%s","name":%s}' % (version, to_json(shell.name)))
    context.serve()
    close_loop(context.loop)


def start_shell(shell):
    module = sys.modules["__main__"]
    if not isinstance(shell, PlainShell):
        module = shell.shell.user_module
        shell.shell.starting_dir = working_directory()
    else:
        module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    shell.start(module)
    add_user_site()
    return module


def close_all(*descriptors):
    for fd in descriptors:
        try:
            os.close(fd)
        except OSError:
            pass


def run_program(shell, nonce, path, arguments):
    """Runs a program as one cell and returns its exit code, or raises SystemExit."""
    global RUN, PROGRAM
    RUN = Run(Frames(nonce))
    PROGRAM = path
    RUN.begin(1)
    os.register_at_fork(after_in_child=lambda: close_all(RUN.frames.out, RUN.frames.err))
    INTERRUPTS.install()
    module = start_shell(shell)
    module.__file__ = path
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    directory = working_directory()
    before = regular_files(directory)
    error = None
    try:
        try:
            INTERRUPTS.running = True
            from importlib.util import decode_source

            with open(path, "rb") as f:
                code = decode_source(f.read())
            try:
                shell.run(code).send(None)  # outside an event loop, so that the program may run its own
            except StopIteration as e:
                error = e.value
        finally:
            INTERRUPTS.running = False
    except BaseException as e:
        error = e
        RUN.exception(e)
    if os.getpid() != RUN.pid:
        exit_fork(error)
    changed = [(name, state) for name, state in sorted(regular_files(directory).items()) if before.get(name) != state]
    files = [{"path": os.fsencode(n).decode("utf-8", "replace"), "size": s[1]} for n, s in changed[:MAX_FILES]]
    leaving = isinstance(error, SystemExit)
    RUN.end(None if leaving and error.code in (None, 0) else error, 1, files)
    if leaving:
        raise error
    return 1 if error is not None or RUN.errors else 0


# The fork parent.


def serve():
    """Forks contexts on request. Returns in each fork, with its shell and nonce."""
    import array  # noqa: F401
    import ctypes
    import socket
    import warnings

    os.chdir("/")
    guest = socket.socket(fileno=private_fd(0))
    libc = ctypes.CDLL(None, use_errno=True)
    set_dumpable = 4  # PR_SET_DUMPABLE
    libc.prctl(set_dumpable, 0, 0, 0, 0)
    threads = {}
    count = thread_count()
    shell = make_shell()
    failed = {}
    modules = [name.strip() for name in os.environ.pop("BULLPEN_PRELOAD", "").split(",") if name.strip()]
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as e:
            failed[name] = "%s: %s" % (type(e).__name__, text_of(e))
        if thread_count() > count:
            threads[name] = count = thread_count()
    values = [1]
    if "pandas" in sys.modules:
        values.append(sys.modules["pandas"].DataFrame({"a": [1]}))
    if "matplotlib.pyplot" in sys.modules:
        importlib.import_module(FIGURES.BACKEND)
        figure = sys.modules["matplotlib.figure"].Figure()
        figure.subplots().plot([1, 2])
        values.append(figure)
    shell.warm(values)
    del values
    import asyncio  # noqa: F401
    import getpass  # noqa: F401

    # Libraries such as OpenBLAS end their threads before a fork and start them when they need them.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about forks of processes with threads
        if (pid := os.fork()) == 0:
            os._exit(0)
    os.waitpid(pid, 0)
    if thread_count() > 1:
        names = ", ".join(threads or [shell.name])
        guest.send(dumps({"error": "threads run after the import of " + names}).encode())
        os._exit(1)
    gc.collect()
    gc.freeze()
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(guest, select.POLLIN)
    poll.register(ended, select.POLLIN)
    guest.send(dumps({"ready": True, **({"failed": failed} if failed else {})}).encode())
    while True:
        events = dict(poll.poll())
        if ended in events:
            os.read(ended, 4096)
            reap(guest)
        if guest.fileno() not in events:
            continue
        message, descriptors, flags, _ = socket.recv_fds(guest, 1 << 20, 3, socket.MSG_CMSG_CLOEXEC)
        if not message:
            raise ConnectionResetError
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(descriptors) != 3:
                raise ValueError("a message needs three descriptors and at most 1 MiB")
            order = loads(message)
            pid = os.fork()
        except Exception as e:
            close_all(*descriptors)
            guest.send(dumps({"error": "%s: %s" % (type(e).__name__, e)}).encode())
            continue
        if pid:
            close_all(*descriptors)
            guest.send(dumps({"pid": pid}).encode())
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        guest.close()
        close_all(ended, wake)
        libc.prctl(set_dumpable, 1, 0, 0, 0)
        become(order, descriptors)
        return shell, order["nonce"]


def thread_count():
    return len(os.listdir("/proc/self/task"))


def reap(guest):
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        guest.send(dumps({"exited": pid, "status": status}).encode())


def become(order, descriptors):
    """Makes a fork a process of its own."""
    os.setsid()
    for number, fd in enumerate(descriptors):
        os.dup2(fd, number)
    close_all(*descriptors)
    open_streams()
    environment = order.get("env") or {}
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(order.get("cwd") or "/")
    if "numpy" in sys.modules:  # module random seeds itself anew after a fork
        sys.modules["numpy"].random.seed()


def open_streams():
    """Opens the standard streams anew on descriptors 0 to 2."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    text = {"encoding": "utf-8", "closefd": False, "buffering": 1}
    sys.stdout = sys.__stdout__ = open(1, "w", errors="surrogateescape", **text)
    sys.stderr = sys.__stderr__ = open(2, "w", errors="backslashreplace", **text)


def main():
    global INTERRUPTS
    arguments = sys.argv[1:]
    # Neither the directory of this file nor the working directory may provide modules to it.
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        del sys.path[0]
    if arguments[:1] == ["--serve"]:
        try:
            shell, nonce = serve()
        except ConnectionError:
            os._exit(0)  # the guest closed the socket
        start_context(shell, nonce)
        return
    nonce = os.environ.pop("BULLPEN_CELL", None)
    if not nonce:
        sys.exit("BULLPEN_CELL is not set")
    sys.stdout.reconfigure(line_buffering=True, errors="surrogateescape")
    shell = make_shell()
    if arguments[:1] == ["--cell"]:
        sys.exit(run_program(shell, nonce, arguments[1], arguments[2:]))
    start_context(shell, nonce)


main()
