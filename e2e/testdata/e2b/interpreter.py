"""The tests of E2B's code interpreter, python/tests of e2b-dev/code-interpreter, as a table of short cases of our own, with
their names, which cases.py runs. Each stands for the test of the synchronous client and its twin of the asynchronous one:
CLIENT says which one runs. Names in more/ are not E2B's.
"""

import asyncio
import datetime
import inspect
import json
import os

from e2b import InvalidArgumentException, NotFoundException, TimeoutException
from e2b_code_interpreter import AsyncSandbox, Sandbox

import cases
from cases import check, main

CLIENT = {"sync": Sandbox, "async": AsyncSandbox}[os.environ.get("CLIENT", "sync")]
loop = asyncio.new_event_loop()


async def settled(value):
    return await value if inspect.isawaitable(value) else value


class Box:
    """A sandbox whose methods can be awaited with either client."""

    def __init__(self, box):
        self.box, self.commands = box, box.commands

    def __getattr__(self, name):
        return lambda *args, **options: settled(getattr(self.box, name)(*args, **options))

    async def run(self, code, **options):
        return await self.run_code(code, **options)

    async def printed(self, code, **options):
        """Runs code and returns what it printed to standard output."""
        return "".join((await self.run(code, **options)).logs.stdout)

    async def shown(self, code, **options):
        """Runs code and returns its first result."""
        execution = await self.run(code, **options)
        assert execution.error is None, execution.error
        return execution.results[0]


    def kill(self):
        """Kills the sandbox for main, which awaits nothing."""
        return loop.run_until_complete(settled(self.box.kill()))


def create(case, **options):
    """Creates a sandbox without naming a template, as most programs do."""
    return Box(loop.run_until_complete(settled(CLIENT.create(**{"timeout": 600, **options}))))


def passes(name, **options):
    return lambda run: cases.passes(name, **options)(lambda box: loop.run_until_complete(run(box)))


def differs(name, **options):
    return lambda run: cases.differs(name, **options)(lambda box: loop.run_until_complete(run(box)))


async def raises(kind, call):
    try:
        got = await call
    except kind as error:
        return str(error)
    raise AssertionError(f"got {got!r}, want {kind.__name__}")


PRIVATE = {"secure": True, "network": {"allow_public_traffic": False}}
NO_LANGUAGE = {"why": "R and Java are not among the languages",
               "signal": "SandboxException: 400 Bad Request: "
               '{"code":400,"message":"language must be one of python, javascript, typescript, bash"}'}
NO_TYPESCRIPT = {"why": "TypeScript needs Node 22.13, and the image of `bullpen init --e2b` has Node 20",
                 "signal": "TypeScript needs Node 22.13"}
NO_SERVICES = {"why": "no process of the sandbox answers the port; a lost context is in more/test_crash.py",
               "signal": "CommandExitException: Command exited with code 1"}


# Environment variables, in each language.
for file, language, get, get_or in [
    ("test_bash.py", "bash", "printf %s $NAME", "printf %s ${NAME:-default}"),
    ("test_js.py", "javascript", "process.env.NAME", "process.env.NAME || 'default'"),
    ("test_python.py", "python", "import os; os.getenv('NAME')", "import os; os.getenv('NAME', 'default')"),
]:
    async def value(box, code, language=language, **options):
        execution = await box.run(code, language=language, **options)
        return execution.text or "".join(execution.logs.stdout)

    @passes(f"sync/env_vars/{file}::test_env_vars_on_sandbox", own={"envs": {"NAME": "outer"}})
    async def _(box, value=value, get=get):
        check(await value(box, get), "outer")

    @passes(f"sync/env_vars/{file}::test_env_vars_per_execution")
    async def _(box, value=value, get=get, get_or=get_or):
        check(await value(box, get, envs={"NAME": "inner"}), "inner")
        check(await value(box, get_or), "default")

    @passes(f"sync/env_vars/{file}::test_env_vars_overwrite", own={"envs": {"NAME": "outer"}})
    async def _(box, value=value, get=get):
        check(await value(box, get, envs={"NAME": "inner"}), "inner")
        check(await value(box, get), "outer")

for file, language in [("test_java.py", "java"), ("test_r.py", "r")]:
    for test in ["on_sandbox", "per_execution", "overwrite"]:
        @differs(f"sync/env_vars/{file}::test_env_vars_{test}", **NO_LANGUAGE)
        async def _(box, language=language):
            await box.run("1", language=language, envs={"NAME": "inner"})


@passes("sync/test_bash.py::test_bash")
async def _(box):
    check((await box.printed("!pwd")).strip(), "/home/user")


@passes("sync/test_basic.py::test_basic")
async def _(box):
    check((await box.run("n = 6; n * 7")).text, "42")


@passes("sync/test_basic.py::test_secure_access", own=PRIVATE)
async def _(box):
    check((await box.run("n = 6; n * 7")).text, "42")


@passes("sync/test_callbacks.py::test_resuls")
async def _(box):
    seen = []
    execution = await box.run("6 * 7", on_result=seen.append)
    check(([r.text for r in seen], [r.text for r in execution.results]), (["42"], ["42"]))
    check([r.is_main_result for r in seen], [True])


@passes("sync/test_callbacks.py::test_error")
async def _(box):
    seen = []
    execution = await box.run("nowhere", on_error=seen.append)
    check([e.name for e in seen] + [execution.error.name], ["NameError", "NameError"])


@passes("sync/test_callbacks.py::test_stdout")
async def _(box):
    seen = []
    execution = await box.run("print('a line')", on_stdout=seen.append)
    check((len(seen), execution.logs.stdout, execution.logs.stderr), (1, ["a line\n"], []))


@passes("sync/test_callbacks.py::test_stderr")
async def _(box):
    seen = []
    execution = await box.run("import sys; print('a line', file=sys.stderr)", on_stderr=seen.append)
    check((len(seen), execution.logs.stdout, execution.logs.stderr), (1, [], ["a line\n"]))


async def created_context(box, **options):
    context = await box.create_code_context(**options)
    last = (await box.list_code_contexts())[-1]
    check((last.id, last.language, last.cwd), (context.id, context.language, context.cwd))
    return context


async def removed_context(box):
    context = await box.create_code_context()
    await box.remove_code_context(context.id)
    assert context.id not in [c.id for c in await box.list_code_contexts()]


async def listed_contexts(box):
    check({"python", "javascript"} - {c.language for c in await box.list_code_contexts()}, set())


async def restarted_context(box):
    context = await box.create_code_context()
    await box.run("n = 1", context=context)
    await box.restart_code_context(context.id)
    error = (await box.run("n", context=context)).error
    check((error.name, error.value), ("NameError", "name 'n' is not defined"))


for test, run in [("create_context", created_context), ("remove_context", removed_context),
                  ("list_contexts", listed_contexts), ("restart_context", restarted_context)]:
    passes(f"sync/test_contexts.py::test_{test}" + ("_with_no_options" if "create" in test else ""))(run)
    passes(f"sync/test_contexts.py::test_{test}_secure_traffic", own=PRIVATE)(run)


@passes("sync/test_contexts.py::test_create_context_with_options")
async def _(box):
    check((await created_context(box, language="python", cwd="/tmp")).cwd, "/tmp")


@passes("sync/test_custom_repr_object.py::test_bash")
async def _(box):
    check((await box.shown("display({'text/latex': '$x$'}, raw=True)")).formats(), ["latex"])


@passes("sync/test_cwd.py::test_cwd_python")
async def _(box):
    check(await box.printed("import os; print(os.getcwd())"), "/home/user\n")


@passes("sync/test_cwd.py::test_cwd_javascript")
async def _(box):
    check((await box.run("process.cwd()", language="js")).text, "/home/user")


async def typescript(box, code):
    """Runs code, and returns the signal if this sandbox has a newer Node."""
    execution = await box.run(code, language="ts")
    check(execution.error, None)
    return NO_TYPESCRIPT["signal"]


@differs("sync/test_cwd.py::test_cwd_typescript", **NO_TYPESCRIPT)
async def _(box):
    return await typescript(box, "process.cwd()")


@differs("sync/test_cwd.py::test_cwd_r", **NO_LANGUAGE)
async def _(box):
    await box.run("getwd()", language="r")


@differs("sync/test_cwd.py::test_cwd_java", **NO_LANGUAGE)
async def _(box):
    await box.run("1", language="java")


@passes("sync/test_cwd.py::test_cwd_bash")
async def _(box):
    check(await box.printed("pwd", language="bash"), "/home/user\n")


@passes("sync/test_data.py::test_data")
async def _(box):
    shown = await box.shown("""
        import pandas
        pandas.DataFrame({"n": [1, 2, 3], "name": ["x", "y", None]})
    """)
    check(shown.data, {"n": [1, 2, 3], "name": ["x", "y", None]})


@passes("sync/test_default_kernels.py::test_js_kernel")
async def _(box):
    check((await box.run("console.log('a line')", language="js")).logs.stdout, ["a line\n"])


@differs("sync/test_default_kernels.py::test_r_kernel", **NO_LANGUAGE)
async def _(box):
    await box.run("print(1)", language="r")


@differs("sync/test_default_kernels.py::test_java_kernel", **NO_LANGUAGE)
async def _(box):
    await box.run("1", language="java")


@passes("sync/test_default_kernels.py::test_js_esm_imports")
async def _(box):
    check(await box.printed("import { sep } from 'path'\nconsole.log(sep)", language="js"), "/\n")


@passes("sync/test_default_kernels.py::test_js_top_level_await")
async def _(box):
    check((await box.run("await Promise.resolve('later')", language="js")).text, "later")


@differs("sync/test_default_kernels.py::test_ts_kernel", **NO_TYPESCRIPT)
async def _(box):
    return await typescript(box, "const line: string = 'a line'; console.log(line)")


LINE = """
import matplotlib.pyplot as plt
import numpy
x = numpy.linspace(0, 9, 100)
plt.plot(x, numpy.cos(x))
plt.show()
"""


@passes("sync/test_display_data.py::test_display_data")
async def _(box):
    shown = await box.shown(LINE)
    assert shown.png and shown.text and not shown.extra, shown.formats()


@passes("sync/test_execution_count.py::test_execution_count", own={})
async def _(box):
    await box.run("1")
    check((await box.run("!true")).execution_count, 2)


@passes("sync/test_interrupt.py::test_subsequent_execution_works_after_client_timeout")
async def _(box):
    await box.run("kept = 7")
    await raises(TimeoutException, box.run("import time; time.sleep(600)", timeout=2))
    check((await box.run("kept", timeout=60)).text, "7")


@passes("sync/test_kernels.py::test_create_new_kernel")
async def _(box):
    check((await box.create_code_context()).language, "python")


@passes("sync/test_kernels.py::test_independence_of_kernels")
async def _(box):
    context = await box.create_code_context()
    await box.run("only_here = 1")
    check((await box.run("only_here", context=context)).error.value, "name 'only_here' is not defined")


@passes("sync/test_kernels.py::test_pass_context_and_language")
async def _(box):
    context = await box.create_code_context(language="python")
    await raises(InvalidArgumentException, box.run("1", language="js", context=context))


@passes("sync/test_killed.py::test_run_code_raises_when_sandbox_is_killed_during_execution", own={})
async def _(box):
    loop_of = asyncio.to_thread if CLIENT is Sandbox else lambda call, *args, **options: call(*args, **options)
    started, run = asyncio.Event(), asyncio.get_running_loop()
    running = asyncio.ensure_future(loop_of(
        box.box.run_code, "print('begun', flush=True); import time; time.sleep(600)", timeout=600,
        on_stdout=lambda _: run.call_soon_threadsafe(started.set)))
    await started.wait()
    await settled(box.box.kill())
    message = await raises(TimeoutException, running)
    assert "sandbox was killed while the request was in progress" in message, message


@passes("sync/test_reconnect.py::test_reconnect")
async def _(box):
    again = Box(await settled(CLIENT.connect(box.box.sandbox_id)))
    check((await again.run("6 * 7")).text, "42")


@passes("sync/test_statefulness.py::test_stateful")
async def _(box):
    await box.run("total = 41")
    check((await box.run("total += 1; total")).text, "42")


@passes("sync/test_streaming.py::test_streaming_output")
async def _(box):
    seen = []
    await box.run("print(1)", on_stdout=seen.append)
    check([(m.line, m.error) for m in seen], [("1\n", False)])


@passes("sync/test_streaming.py::test_streaming_error")
async def _(box):
    seen = []
    await box.run("import sys; print(1, file=sys.stderr)", on_stderr=seen.append)
    check([(m.line, m.error) for m in seen], [("1\n", True)])


@passes("sync/test_streaming.py::test_streaming_result")
async def _(box):
    seen = []
    await box.run(LINE + "\nx", on_result=seen.append)
    check([r.is_main_result for r in seen], [False, True])


for test in ["jupyter", "code_interpreter"]:
    @differs(f"sync/test_systemd.py::test_restart_after_{test}_kill", **NO_SERVICES)
    async def _(box):
        await settled(box.commands.run("pgrep -f 'jupyter serve[r]|uvicorn main:ap[p]'", user="root"))


# Charts.
async def chart(box, code):
    """Runs code that draws, and returns the chart and its kind."""
    shown = await box.shown("import datetime\nimport matplotlib.pyplot as plt\nimport numpy\nplt.close('all')\n" + code +
                            "\nplt.show()")
    assert shown.png, shown.formats()
    return shown.chart


def of_type(values, kind):
    return bool(values) and all(isinstance(value, kind) for value in values)


@passes("charts/test_bar.py::test_chart_bar")
async def _(box):
    got = await chart(box, "plt.bar(['a', 'b', 'c'], [10, 20, 20], label='sold'); plt.title('Shop'); "
                      "plt.xlabel('Kind'); plt.ylabel('Count')")
    check((type(got).__name__, got.type, got.title, got.x_label, got.y_label, got.x_unit, got.y_unit),
          ("BarChart", "bar", "Shop", "Kind", "Count", None, None))
    check([(e.label, e.group, e.value) for e in got.elements], [("a", "sold", 10), ("b", "sold", 20), ("c", "sold", 20)])


@passes("charts/test_box_and_whiskers.py::test_box_and_whiskers")
async def _(box):
    got = await chart(box, "plt.boxplot([[1, 2, 3, 4, 5], [1, 2, 3, 4, 50]], patch_artist=True); "
                      "plt.xticks([1, 2], ['a', 'b']); plt.title('Spread'); plt.xlabel('Kind'); plt.ylabel('Score')")
    check((type(got).__name__, got.type, got.title, got.x_label, got.y_label, got.x_unit, got.y_unit),
          ("BoxAndWhiskerChart", "box_and_whisker", "Spread", "Kind", "Score", None, None))
    check([(e.label, e.min, e.first_quartile, e.median, e.third_quartile, e.max, e.outliers) for e in got.elements],
          [("a", 1, 2, 3, 4, 5, []), ("b", 1, 2, 3, 4, 4, [50])])


@passes("charts/test_json.py::test_scatter_chart")
async def _(box):
    execution = await box.run("import matplotlib.pyplot as plt\nplt.scatter([1, 2], [3, 4])\nplt.show()")
    check(json.loads(execution.to_json())["results"][0]["chart"]["type"], "scatter")


@passes("charts/test_line.py::test_line_chart")
async def _(box):
    got = await chart(box, """
days = [datetime.date(2024, 2, 1) + datetime.timedelta(days=n) for n in range(50)]
plt.plot(days, numpy.linspace(0, 1, 50), label='up')
plt.plot(days, numpy.linspace(1, 0, 50), label='down')
plt.xlabel('Day (d)'); plt.ylabel('Level [dB]'); plt.title('Levels')""")
    check((type(got).__name__, got.title, got.x_label, got.y_label, got.x_unit, got.y_unit, got.x_scale, got.y_scale),
          ("LineChart", "Levels", "Day (d)", "Level [dB]", "d", "dB", "datetime", "linear"))
    assert of_type(got.x_ticks, str) and of_type(got.y_ticks, float), (got.x_ticks, got.y_ticks)
    assert of_type(got.x_tick_labels, str) and of_type(got.y_tick_labels, str), got.x_tick_labels
    datetime.datetime.fromisoformat(got.x_ticks[0])
    check([(e.label, len(e.points)) for e in got.elements], [("up", 50), ("down", 50)])
    day, level = got.elements[0].points[0]
    check((datetime.datetime.fromisoformat(day).date(), level), (datetime.date(2024, 2, 1), 0.0))


@passes("charts/test_log_chart.py::test_log_chart")
async def _(box):
    got = await chart(box, "plt.plot([1, 2, 3], [1., 10., 100.], label='p'); plt.yscale('log'); plt.grid(True); "
                      "plt.legend(); plt.xlabel('n'); plt.ylabel('Power (log scale)')")
    check((type(got).__name__, got.x_label, got.x_unit, got.y_unit, got.x_scale, got.y_scale),
          ("LineChart", "n", None, "log scale", "linear", "log"))
    assert of_type(got.x_ticks, float) and of_type(got.y_ticks, float), (got.x_ticks, got.y_ticks)
    check([(e.label, [tuple(p) for p in e.points]) for e in got.elements], [("p", [(1, 1), (2, 10), (3, 100)])])


@passes("charts/test_pie.py::test_pie_chart")
async def _(box):
    got = await chart(box, "plt.pie([3, 1], labels=['most', 'rest'], autopct='%1.0f%%'); plt.axis('equal'); "
                      "plt.title('Parts'); plt.xlabel('x')")
    check((type(got).__name__, got.title, [(e.label, e.angle, e.radius) for e in got.elements]),
          ("PieChart", "Parts", [("most", 270, 1), ("rest", 90, 1)]))


@passes("charts/test_scale.py::test_datetime_scale")
async def _(box):
    got = await chart(box, "plt.plot([datetime.date(2024, 2, 1), datetime.date(2024, 2, 2)], [1, 2])")
    check((type(got).__name__, got.x_scale, got.y_scale), ("LineChart", "datetime", "linear"))


@passes("charts/test_scale.py::test_categorical_scale")
async def _(box):
    got = await chart(box, "plt.plot([1, 2, 3], ['a', 'b', 'c'])")
    check((type(got).__name__, got.x_scale, got.y_scale), ("LineChart", "linear", "categorical"))


@passes("charts/test_scatter.py::test_scatter_chart")
async def _(box):
    got = await chart(box, "plt.scatter([1, 2], [3, 4], label='one'); plt.scatter([5, 6, 7], [1, 1, 1], label='two'); "
                      "plt.xlabel('A'); plt.ylabel('B')")
    check((type(got).__name__, got.title, got.x_label, got.y_label, got.x_scale, got.y_scale),
          ("ScatterChart", None, "A", "B", "linear", "linear"))
    check([(e.label, [tuple(p) for p in e.points]) for e in got.elements],
          [("one", [(1, 3), (2, 4)]), ("two", [(5, 1), (6, 1), (7, 1)])])


@passes("charts/test_superchart.py::test_super_chart")
async def _(box):
    got = await chart(box, """
figure, (left, right) = plt.subplots(1, 2)
figure.suptitle('Both')
left.plot([1, 2, 3], [4, 5, 7], 'r'); left.set_title('Line'); left.grid(True)
right.scatter([1, 2], [3, 4]); right.set_title('Points'); right.set_xlabel('X'); right.grid(True)""")
    check((type(got).__name__, got.type, got.title), ("SuperChart", "superchart", "Both"))
    check([(type(c).__name__, c.title, c.x_label, [len(e.points) for e in c.elements]) for c in got.elements],
          [("LineChart", "Line", None, [3]), ("ScatterChart", "Points", "X", [2])])


@passes("charts/test_unknown.py::test_unknown_charts")
async def _(box):
    got = await chart(box, "plt.gca().add_artist(plt.Circle((0, 0), 1)); plt.grid(True); plt.title('Round')")
    check((type(got).__name__, got.type, got.title, got.elements), ("Chart", "unknown", "Round", []))


# Pictures.
IMAGE = "from PIL import Image\nimage = Image.new('RGB', (16, 16), 'red')\n"


@passes("images/test_images.py::test_show_image")
async def _(box):
    assert (await box.shown(IMAGE + "image.show()")).png


@passes("images/test_images.py::test_image_as_last_command")
async def _(box):
    assert (await box.shown(IMAGE + "image")).png


@differs("images/test_images.py::test_get_image_on_save", why="saving a picture does not show it: read the file",
         signal="0 results, and a file")
async def _(box):
    execution = await box.run(IMAGE + "image.save('saved.png')")
    assert await settled(box.box.files.exists("saved.png"))
    return f"{len(execution.results)} results, and a file"


# What E2B's tests do not cover.
@passes("more/test_crash.py::the interpreter ends, and the next run finds a new one")
async def _(box):
    context = await box.create_code_context()
    await box.run("n = 1", context=context)
    check((await box.run("import os; os._exit(3)", context=context)).error.name, "ContextRestarting")
    check((await box.run("n", context=context)).error.name, "ContextRestarting")
    check((await box.run("n", context=context)).error.name, "NameError")


@passes("more/test_errors.py::the traceback names the line, without colours")
async def _(box):
    error = (await box.run("def f():\n    return 1 / 0\n\nf()")).error
    assert "1 / 0" in error.traceback and "\x1b" not in error.traceback, error.traceback
    check((error.name, error.value), ("ZeroDivisionError", "division by zero"))


@passes("more/test_errors.py::what was printed before an error is there")
async def _(box):
    execution = await box.run("print('é漢🙂')\nnowhere")
    check((execution.logs.stdout, execution.error.name), (["é漢🙂\n"], "NameError"))


@passes("more/test_pause.py::contexts end with a pause, files stay", own={})
async def _(box):
    context = await box.create_code_context()
    await box.run("n = 1; open('kept', 'w').write('here')", context=context)
    await box.pause()
    again = Box(await settled(CLIENT.connect(box.box.sandbox_id)))
    check((await again.run("n")).error.name, "NameError")
    check((await again.run("open('kept').read()")).text, "here")
    await raises(NotFoundException, again.run("n", context=context))
    await again.restart_code_context(context.id)
    check((await again.run("n", context=context)).error.name, "NameError")


main("e2b-code-interpreter", create)
