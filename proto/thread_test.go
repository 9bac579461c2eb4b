package proto

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

func TestStagedSpace(t *testing.T) {
	deep := strings.Repeat("d/", 500)
	for name, test := range map[string]struct {
		sizes map[string]int64
		want  Space
	}{
		"nothing":            {nil, Space{}},
		"an empty file":      {map[string]int64{"a": 0}, Space{0, 1}},
		"whole blocks":       {map[string]int64{"a": 1, "b": 4096, "c": 4097}, Space{4 * 4096, 3}},
		"directories":        {map[string]int64{"a/b/c": 1}, Space{3 * 4096, 3}},
		"shared ones":        {map[string]int64{"a/b/c": 0, "a/b/d": 0, "a/e": 0}, Space{2 * 4096, 5}},
		"similar names":      {map[string]int64{"ab/c": 0, "ab-/c": 0, "a/c": 0, "abc/d": 0}, Space{4 * 4096, 8}},
		"in each other":      {map[string]int64{"a": 0, "a/b": 0, "a-b": 0, "a/b/c": 0}, Space{2 * 4096, 6}},
		"many directories":   {map[string]int64{"1/" + deep + "a": 0, "2/" + deep + "a": 0}, Space{2 * 501 * 4096, 2 * 502}},
		"more than there is": {map[string]int64{"a": 1 << 40, "b": 1 << 40}, Space{1 << 41, 2}},
	} {
		var files []StagedFile
		for path, size := range test.sizes {
			files = append(files, StagedFile{Path: path, Blob: Blob{Size: size}})
		}
		if got := StagedSpace(files); got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}

// A save of a running sandbox replaces the layer of the last save of the same execution, and no other.
func TestCommitOfLiveSave(t *testing.T) {
	commit := func(number int64, trace TraceID, replaces string, supersedes int64) *Commit {
		return &Commit{Replaces: replaces, Fence: 1, Version: Version{
			Number: number, Trace: trace, Supersedes: supersedes,
			Layers: []Layer{{Blob: Blob{Key: fmt.Sprint("layer", number)}, Version: number}},
		}}
	}
	head := &Thread{Fence: 1}
	for _, c := range []struct {
		*Commit
		layers string
	}{
		{commit(1, "before", "", 0), "[layer1]"},
		{commit(2, "live", "layer1", 1), ""}, // of another execution
		{commit(2, "live", "", 1), ""},
		{commit(2, "live", "", 0), "[layer1 layer2]"},
		{commit(3, "live", "layer1", 1), ""},
		{commit(3, "live", "layer2", 0), ""},
		{commit(3, "live", "layer2", 2), ""},
		{commit(3, "live", "layer2", 1), "[layer1 layer3]"},
		{commit(4, "live", "layer2", 2), ""},
		{commit(4, "live", "layer3", 2), "[layer1 layer4]"},
		{commit(5, "after", "layer4", 3), ""},
		{commit(5, "after", "", 0), "[layer1 layer4 layer5]"},
		{commit(6, "live", "layer4", 3), ""},
	} {
		next, err := head.Commit(c.Commit)
		if c.layers == "" {
			if !errors.Is(err, ErrFenced) {
				t.Errorf("%+v: %v", c.Commit, err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		head = next
		var keys []string
		for _, l := range head.Version.Layers {
			keys = append(keys, l.Key)
		}
		if got := fmt.Sprint(keys); got != c.layers {
			t.Errorf("version %d has %s, want %s", head.Number(), got, c.layers)
		}
	}
	for number, want := range map[int64]bool{1: false, 2: true, 3: true, 4: false, 5: false} {
		if got := head.Superseded(number); got != want {
			t.Errorf("version %d is superseded: %v", number, got)
		}
	}
	if next, err := (&Thread{Fence: 1}).Commit(commit(1, "live", "layer0", 1)); !errors.Is(err, ErrFenced) {
		t.Errorf("%+v, %v", next, err)
	}
}
