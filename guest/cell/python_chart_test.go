package cell_test

import (
	"encoding/json"
	"maps"
	"reflect"
	"testing"
)

// chartDefaults are the fields of charts by type where nothing else is expected.
var chartDefaults = func() map[string]string {
	const (
		labels = `"title": null, "x_label": null, "y_label": null, "x_unit": null, "y_unit": null`
		points = `{` + labels + `, "x_scale": "linear", "y_scale": "linear", "x_ticks": [1], "x_tick_labels": ["1"],
			"y_ticks": [1], "y_tick_labels": ["1"]}`
	)
	return map[string]string{
		"line": points, "scatter": points, "bar": `{` + labels + `}`, "box_and_whisker": `{` + labels + `}`,
		"pie": `{"title": null}`, "superchart": `{"title": null}`, "unknown": `{"title": null, "elements": []}`,
	}
}()

// complete adds the defaults to an expected chart and the charts in it.
func complete(chart any) any {
	given, ok := chart.(map[string]any)
	kind, _ := given["type"].(string)
	if !ok || kind == "" {
		return chart
	}
	var whole map[string]any
	_ = json.Unmarshal([]byte(chartDefaults[kind]), &whole)
	maps.Copy(whole, given)
	if elements, ok := given["elements"].([]any); ok {
		completed := []any{}
		for _, e := range elements {
			completed = append(completed, complete(e))
		}
		whole["elements"] = completed
	}
	return whole
}

// chartTests are figures and their charts; "null" is a picture without a chart, "" no picture.
var chartTests = []struct{ code, chart string }{
	{
		"plt.plot([1,2],[3,4]); plt.title('T'); plt.xlabel('Time (s)'); plt.ylabel('f(x) [m/s]'); one()",
		`{"type":"line","title":"T","x_label":"Time (s)","y_label":"f(x) [m/s]","x_unit":"s","y_unit":"m/s",
		"elements":[{"label":"Line 0","points":[[1,3],[2,4]]}]}`,
	},
	{
		"plt.plot([0,1],[1,2],label='a'); plt.plot([0,1],[2,1]); plt.legend(); one()",
		`{"type":"line","elements":[{"label":"a","points":[[0,1],[1,2]]},{"label":"Line 1","points":[[0,2],[1,1]]}]}`,
	},
	{"plt.plot([0,1],[5,5]); plt.axhline(4); plt.axvline(1); plt.grid(True); plt.text(0,5,'t'); one()", // a level line
		`{"type":"line","elements":[{"label":"Line 0","points":[[0,5],[1,5]]}]}`},
	{
		"plt.plot([date(2024,1,1),date(2024,1,2)],[1,2]); one(); plt.xticks([date(2024,1,1)])",
		`{"type":"line","x_scale":"datetime","x_ticks":["2024-01-01T00:00:00"],"x_tick_labels":["2024-01-01"],
		"elements":[{"label":"Line 0","points":[["2024-01-01",1],["2024-01-02",2]]}]}`,
	},
	{
		"plt.plot(np.array(['2024-01-01T10','2024-01-01T12'],dtype='datetime64'),[1,2]); one(); plt.xticks([])",
		`{"type":"line","x_scale":"datetime","x_ticks":[],"x_tick_labels":[],
		"elements":[{"label":"Line 0","points":[["2024-01-01T10:00:00",1],["2024-01-01T12:00:00",2]]}]}`,
	},
	{
		"plt.plot(['a','b'],[1,2]); plt.yticks([1])",
		`{"type":"line","x_scale":"categorical","x_ticks":[0,1],"x_tick_labels":["a","b"],
		"elements":[{"label":"Line 0","points":[["a",1],["b",2]]}]}`,
	},
	{
		"plt.plot([0,1],[3,4]); one(); plt.xticks([0,1],['x','y'])",
		`{"type":"line","x_scale":"categorical","x_ticks":[0,1],"x_tick_labels":["x","y"],
		"elements":[{"label":"Line 0","points":[[0,3],[1,4]]}]}`,
	},
	{
		"plt.plot([1,10],[1,100]); plt.loglog(); plt.xticks([1,10],['one','ten']); plt.yticks([1],['1'])",
		`{"type":"line","x_scale":"log","y_scale":"log","x_ticks":[1,10],"x_tick_labels":["one","ten"],
		"elements":[{"label":"Line 0","points":[[1,1],[10,100]]}]}`,
	},
	{
		"plt.plot([1,2],[1,2]); plt.yscale('symlog'); plt.xscale('asinh'); plt.xticks([1],['1']); plt.yticks([1],['1'])",
		`{"type":"line","x_scale":"asinh","y_scale":"symlog","elements":[{"label":"Line 0","points":[[1,1],[2,2]]}]}`,
	},
	{
		"plt.plot([1,float('nan'),3],[1,2,float('inf')]); one()",
		`{"type":"line","elements":[{"label":"Line 0","points":[[1,1],[null,2],[3,null]]}]}`,
	},
	{"plt.plot([0,1,1,0,0],[0,0,1,1,0]); one()", // a square, not a box
		`{"type":"line","elements":[{"label":"Line 0","points":[[0,0],[1,0],[1,1],[0,1],[0,0]]}]}`},
	{"plt.errorbar([1,2],[3,4],yerr=1); one()", `{"type":"line","elements":[{"label":"Line 0","points":[[1,3],[2,4]]}]}`},
	{
		"pd.DataFrame({'v':[1,2]},index=pd.to_datetime(['2024-01-01','2024-01-02'])).plot(); plt.xticks([]); plt.yticks([1])",
		`{"type":"line","x_scale":"datetime","x_ticks":[],"x_tick_labels":[],
		"elements":[{"label":"v","points":[["2024-01-01T00:00:00",1],["2024-01-02T00:00:00",2]]}]}`,
	},
	{
		"plt.scatter([1,2],[3,4],label='s'); plt.scatter([1],[1]); one()",
		`{"type":"scatter","elements":[{"label":"s","points":[[1,3],[2,4]]},{"label":"Line 1","points":[[1,1]]}]}`,
	},
	{
		"plt.scatter([date(2024,1,1)],[3]); one(); plt.xticks([])",
		`{"type":"scatter","x_scale":"datetime","x_ticks":[],"x_tick_labels":[],
		"elements":[{"label":"Line 0","points":[["2024-01-01T00:00:00",3]]}]}`,
	},
	{
		"plt.scatter(['a','b'],[3,4]); plt.yticks([1]); plt.grid()",
		`{"type":"scatter","x_scale":"categorical","x_ticks":[0,1],"x_tick_labels":["a","b"],
		"elements":[{"label":"Line 0","points":[["a",3],["b",4]]}]}`,
	},
	{
		"plt.scatter([1,2],[3,4],c=[1,2]); plt.colorbar(); one(); plt.axhline(3)",
		`{"type":"scatter","elements":[{"label":"Line 0","points":[[1,3],[2,4]]}]}`,
	},
	{
		"plt.bar(['a','b'],[3,5]); plt.xlabel('Kind'); plt.ylabel('Count (n)')",
		`{"type":"bar","x_label":"Kind","y_label":"Count (n)","y_unit":"n",
		"elements":[{"label":"a","group":"Group 0","value":3},{"label":"b","group":"Group 0","value":5}]}`,
	},
	{"plt.bar(['a','b'],[3,3],label='same'); plt.xlabel('Kind')", // equal heights
		`{"type":"bar","x_label":"Kind",
		"elements":[{"label":"a","group":"same","value":3},{"label":"b","group":"same","value":3}]}`},
	{
		"plt.barh(['a','b'],[3,5]); plt.xlabel('Count'); plt.ylabel('Kind')",
		`{"type":"bar","x_label":"Kind","y_label":"Count",
		"elements":[{"label":"a","group":"Group 0","value":3},{"label":"b","group":"Group 0","value":5}]}`,
	},
	{"plt.barh(['a','b'],[3,3]); plt.xlabel('Count')", // equal widths
		`{"type":"bar","y_label":"Count",
		"elements":[{"label":"a","group":"Group 0","value":3},{"label":"b","group":"Group 0","value":3}]}`},
	{
		"plt.bar([2020,2021],[3,-5])",
		`{"type":"bar","elements":[
		{"label":"2020","group":"Group 0","value":3},{"label":"2021","group":"Group 0","value":-5}]}`,
	},
	{
		"x=np.arange(2); plt.bar(x-.2,[1,2],.4,label='m'); plt.bar(x+.2,[3,4],.4,label='w'); plt.xticks(x,['p','q'])",
		`{"type":"bar","elements":[{"label":"p","group":"m","value":1},{"label":"q","group":"m","value":2},
		{"label":"p","group":"w","value":3},{"label":"q","group":"w","value":4}]}`,
	},
	{
		"plt.bar(['a'],[1]); plt.bar(['a'],[3],bottom=[1]); plt.axhline(2); plt.grid(axis='y')",
		`{"type":"bar","elements":[{"label":"a","group":"Group 0","value":1},{"label":"a","group":"Group 1","value":3}]}`,
	},
	{
		"plt.bar([date(2024,1,1)],[1])",
		`{"type":"bar","elements":[{"label":"2024-01-01T00:00:00","group":"Group 0","value":1}]}`,
	},
	{
		"plt.bar(['a','b'],[3,5],yerr=[1,1])",
		`{"type":"bar","elements":[{"label":"a","group":"Group 0","value":3},{"label":"b","group":"Group 0","value":5}]}`,
	},
	{
		"pd.DataFrame({'v':[1],'w':[3]},index=['a']).plot.bar()",
		`{"type":"bar","elements":[{"label":"a","group":"v","value":1},{"label":"a","group":"w","value":3}]}`,
	},
	{
		"plt.hist([1,1,2,3],bins=2); plt.title('H')",
		`{"type":"bar","title":"H","elements":[
		{"label":"1.5","group":"Group 0","value":2},{"label":"2.5","group":"Group 0","value":2}]}`,
	},
	{
		"plt.pie([1,3],labels=['a','b'],autopct='%d'); plt.title('P')",
		`{"type":"pie","title":"P","elements":[{"label":"a","angle":90,"radius":1},{"label":"b","angle":270,"radius":1}]}`,
	},
	{
		"plt.pie([1,2],explode=[.1,0],radius=2)",
		`{"type":"pie","elements":[{"label":"","angle":120,"radius":2},{"label":"","angle":240,"radius":2}]}`,
	},
	{
		"plt.boxplot([[1,2,3,4,20,30],[2,3,4]]); plt.xticks([1,2],['a','b']); plt.ylabel('V (kg)')",
		`{"type":"box_and_whisker","y_label":"V (kg)","y_unit":"kg","elements":[
		{"label":"a","min":1,"first_quartile":2.25,"median":3.5,"third_quartile":16,"max":30,"outliers":[]},
		{"label":"b","min":2,"first_quartile":2.5,"median":3,"third_quartile":3.5,"max":4,"outliers":[]}]}`,
	},
	{
		"plt.boxplot([[1,2,3,4,20,21]+[2,3]*4],patch_artist=True)",
		`{"type":"box_and_whisker","elements":[
		{"label":"1","min":1,"first_quartile":2,"median":3,"third_quartile":3,"max":4,"outliers":[20,21]}]}`,
	},
	{
		"plt.boxplot([[1,2,3,4,20]],patch_artist=True,**horizontal); plt.xlabel('V'); plt.grid()",
		`{"type":"box_and_whisker","y_label":"V","elements":[
		{"label":"1","min":1,"first_quartile":2,"median":3,"third_quartile":4,"max":4,"outliers":[20]}]}`,
	},
	{
		"plt.boxplot([[1,2,3,4],[5,5,5,5]],notch=True,showmeans=True)",
		`{"type":"box_and_whisker","elements":[
		{"label":"1","min":1,"first_quartile":1.75,"median":2.5,"third_quartile":3.25,"max":4,"outliers":[]},
		{"label":"2","min":5,"first_quartile":5,"median":5,"third_quartile":5,"max":5,"outliers":[]}]}`,
	},
	{
		"fig,axs=plt.subplots(1,2); fig.suptitle('S'); axs[0].bar(['a'],[1]); axs[1].pie([1],labels=['p'])",
		`{"type":"superchart","title":"S","elements":[
		{"type":"bar","elements":[{"label":"a","group":"Group 0","value":1}]},
		{"type":"pie","elements":[{"label":"p","angle":360,"radius":1}]}]}`,
	},
	{
		"fig,ax=plt.subplots(); ax.bar(['a'],[1]); ax.twinx().imshow([[1]])",
		`{"type":"superchart","elements":[
		{"type":"bar","elements":[{"label":"a","group":"Group 0","value":1}]},{"type":"unknown"}]}`,
	},
	{"plt.figure().add_subplot(projection='3d').plot([1,2],[1,2],[1,2])", `{"type":"unknown"}`},
	{"plt.imshow([[1,2],[3,4]]); plt.title('I')", `{"type":"unknown","title":"I"}`},
	{"plt.fill_between([1,2],[1,2]); plt.plot([1,2],[1,2])", `{"type":"unknown"}`},
	{"plt.bar(['a'],[1]); plt.plot(['a'],[1])", `{"type":"unknown"}`},
	{"plt.axvspan(1, 2)", `{"type":"unknown"}`},
	{"plt.subplots()", `null`},
	{"plt.figure()", ``},
	{"plt.ioff(); plt.plot([1]); plt.ion()", ``},
}

func TestCharts(t *testing.T) {
	t.Parallel()
	r := startRunner(t, python(t, "IPython, matplotlib, pandas"))
	if o := r.run(`import inspect, matplotlib.pyplot as plt, numpy as np, pandas as pd
from datetime import date
def one(): plt.xticks([1]); plt.yticks([1])
new = "orientation" in inspect.signature(plt.boxplot).parameters
horizontal = {"orientation": "horizontal"} if new else {"vert": False}`); o.end.Status != "ok" {
		t.Fatalf("%+v", o)
	}
	for _, c := range chartTests {
		o := r.run(c.code)
		if o.end.Status != "ok" || o.stderr != "" {
			t.Errorf("%s: %+v", c.code, o)
		}
		var pictures []frame
		for _, f := range o.frames {
			if f.Data["image/png"] != nil {
				pictures = append(pictures, f)
			}
		}
		if c.chart == "" {
			if len(pictures) != 0 {
				t.Errorf("%s showed %d pictures, want none", c.code, len(pictures))
			}
			r.run("plt.close('all')")
			continue
		}
		var want any
		if err := json.Unmarshal([]byte(c.chart), &want); err != nil {
			t.Fatalf("%s: %v", c.code, err)
		}
		if len(pictures) != 1 {
			t.Errorf("%s showed %d pictures, want 1", c.code, len(pictures))
		} else if want = complete(want); !reflect.DeepEqual(pictures[0].Chart, want) {
			got, _ := json.Marshal(pictures[0].Chart)
			wanted, _ := json.Marshal(want)
			t.Errorf("%s\n got %s\nwant %s", c.code, got, wanted)
		}
	}
}
