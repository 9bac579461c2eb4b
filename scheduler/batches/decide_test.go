package batches

import (
	"slices"
	"testing"
)

func TestDivide(t *testing.T) {
	for _, c := range []struct {
		name    string
		left    int
		demands []demand
		want    []int
	}{
		{"none", 10, nil, []int{}},
		{"one", 10, []demand{{0, 100}}, []int{10}},
		{"one that wants less", 10, []demand{{0, 3}}, []int{3}},
		{"evenly", 10, []demand{{0, 100}, {0, 100}}, []int{5, 5}},
		{"what one does not need is for the other", 10, []demand{{0, 100}, {0, 2}}, []int{8, 2}},
		{"by priority", 10, []demand{{5, 100}, {0, 100}}, []int{10, 0}},
		{"the rest for the lower priority", 10, []demand{{5, 4}, {0, 100}, {0, 100}}, []int{4, 3, 3}},
		{"more batches than items", 2, []demand{{0, 9}, {0, 9}, {0, 9}}, []int{1, 1, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := divide(c.left, c.demands); !slices.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}
