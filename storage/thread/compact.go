package thread

import (
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/thread/layer"
)

const (
	// maxChain is how many layers a version may have before one takes their place.
	maxChain = 48
	// maxWaste is how many bytes of layers are never too many.
	maxWaste = 16 << 20
	// maxEntry is about what a file takes in an index at most, in bytes.
	maxEntry = layer.MaxName + layer.MaxXattrs + layer.MaxTarget
)

// Long reports whether the layers of a version should be replaced by one: there are more than 48, or they take 16 MiB more than twice what the
// home could take as one layer. So one that was made of all is never long itself, whatever names and attributes the home has.
func Long(version *proto.Version) bool {
	var size int64
	for i := range version.Layers {
		size += version.Layers[i].Size
	}
	return len(version.Layers) > maxChain || size > 2*(version.Bytes+version.Files*maxEntry)+maxWaste
}
