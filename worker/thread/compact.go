package thread

import "github.com/bullpen-run/bullpen/proto"

const (
	// maxChain is how many layers a version may have before one takes their place.
	maxChain = 48
	// maxWaste is how many bytes of layers are never too many.
	maxWaste = 16 << 20
)

// Long reports whether the layers of a version should be replaced by one: there are more than 48, or they take more than twice what the
// home does, and 16 MiB.
func Long(version *proto.Version) bool {
	var size int64
	for i := range version.Layers {
		size += version.Layers[i].Size
	}
	return len(version.Layers) > maxChain || size > 2*version.Bytes+maxWaste
}
