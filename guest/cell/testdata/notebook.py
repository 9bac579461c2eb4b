# %%
readings = [3, 1, 2]
# %%
readings
# %%
print("sorted:", sorted(readings))
sum(readings)
# %%
import sys
print("to stdout")
print("to stderr", file=sys.stderr)
# %%
sum(readings) / len(readings);
# %%
# a comment only
# %%
None
# %%
_1, Out[2], In[1]
# %%
def mean(values):
    """Returns the mean of values."""
    return sum(values) / len(values)


mean(readings)
# %%
mean([])
# %%
mean(
# %%
undefined_name
# %%
try:
    mean([])
except ZeroDivisionError as error:
    raise ValueError("no readings") from error
# %%
raise RuntimeError("first line\nsecond line é漢🙂")
# %%
assert mean(readings) == 3, "the mean is off"
# %%
{"name": "sensor", "readings": readings * 12, "place": ("north", None)}
# %%
list(range(1500))
# %%
"x" * 2000
# %%
class Shown:
    def _repr_html_(self):
        return "<b>shown</b>"

    def _repr_latex_(self):
        return "$s$"

    def __repr__(self):
        return "Shown()"


Shown()
# %%
class Broken:
    def __repr__(self):
        return 1 / 0


Broken()
# %%
class Bundle:
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": "plain", "application/vnd.example+json": {"a": [1, 2]}}


Bundle()
# %%
from IPython.display import HTML, JSON, Javascript, Latex, Markdown, SVG, clear_output, display
display(HTML("<i>h</i>"), Markdown("*m*"), Latex("$x^2$"))
# %%
JSON({"a": [1, 2, {"b": None}]})
# %%
Javascript("1 + 1")
# %%
SVG('<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>')
# %%
display({"text/plain": "raw", "text/latex": "$r$"}, raw=True)
# %%
print("before")
display(7)
print("after")
# %% differs: Jupyter changes this display later, by the next cell
handle = display("one", display_id="shown-once")
# %% differs: an update is a display of its own: output that was sent is not changed
handle.update("two")
# %% differs: nothing is cleared: output that was sent is not taken back
print("gone")
clear_output()
# %%
import numpy
numpy.arange(12).reshape(3, 4)
# %%
numpy.array([1, 2]) @ numpy.array([3])
# %%
import pandas
frame = pandas.DataFrame({"city": ["A", "B", None], "count": [1, 2, 3]})
frame
# %%
frame.describe()
# %%
frame["count"]
# %%
frame.groupby("count").size()
# %%
frame["nothing"]
# %%
import matplotlib.pyplot as plt
plt.plot([1, 2, 3])
# %%
figure, axes = plt.subplots()
axes.bar(["a", "b"], [1, 2]);
# %%
figure
# %%
plt.scatter([1, 2], [3, 4])
plt.show()
print("shown")
# %% differs: a figure without axes is not shown
plt.figure()
1 / 0
# %%
%matplotlib inline
plt.pie([1, 2], labels=["a", "b"])
plt.title("Parts");
# %%
%config InlineBackend.figure_format = "svg"
plt.plot([2, 1]);
# %%
pandas.Series([1, 3, 2]).plot();
# %%
%%html
<p>a paragraph</p>
# %%
%%bash
echo from bash
echo error >&2
# %%
!echo from a shell
# %%
lines = !printf 'a\nb\n'
lines
# %% differs: a magic that is used wrongly fails its cell, and does not only print so
%nosuchmagic
# %%
%%time
total = sum(range(10))
# %%
import asyncio


async def later():
    await asyncio.sleep(0)
    return "later"


await later()
# %%
import warnings
warnings.warn("careful")
# %%
import logging
logging.getLogger("notebook").warning("logged")
# %% differs: help is printed, since there is no pager
len?
# %%
%%writefile written.txt
a line
# %%
open("written.txt").read()
# %%
sys.exit("ends only the cell")
# %% differs: input fails with a message and a traceback of our own
input("name? ")
# %%
get_ipython().execution_count
