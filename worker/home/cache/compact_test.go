package cache

import (
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

func TestNeedsCompaction(t *testing.T) {
	layers := func(n int, size int64) []proto.Layer {
		all := make([]proto.Layer, n)
		for i := range all {
			all[i].Size = size
		}
		return all
	}
	const mib = 1 << 20
	for _, test := range []struct {
		version proto.Version
		want    bool
	}{
		{proto.Version{}, false},
		{proto.Version{Layers: layers(48, 100)}, false},
		{proto.Version{Layers: layers(49, 100)}, true},
		{proto.Version{Layers: layers(16, mib)}, false},
		{proto.Version{Layers: layers(17, mib)}, true},
		{proto.Version{Layers: layers(36, mib), Bytes: 10 * mib}, false},
		{proto.Version{Layers: layers(37, mib), Bytes: 10 * mib}, true},
		// A single layer of a home that consists of names and attributes is not compacted again.
		{proto.Version{Layers: layers(1, 300*mib), Files: 65_536}, false},
		{proto.Version{Layers: layers(40, 30*mib), Files: 65_536}, true},
	} {
		if got := needsCompaction(&test.version); got != test.want {
			t.Errorf("%d layers of a home of %d bytes: %v", len(test.version.Layers), test.version.Bytes, got)
		}
	}
}
