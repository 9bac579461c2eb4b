package proto

import (
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
