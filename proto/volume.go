package proto

// The limits of the quota of a volume. The operator may set a lower maximum.
const (
	MinVolume = MiB
	MaxVolume = 1000 * GiB
)

const (
	// A volume may have one file or directory per bytesPerFile of its quota, but always
	// minVolumeFiles. Homes may have as many as maxVolumeFiles.
	bytesPerFile   = 16 << 10
	minVolumeFiles = 1 << 16
	maxVolumeFiles = 1 << 24
)

// VolumeThread returns the id of the thread behind the volume with that slug. The lock, versions
// and layers of a volume are its thread's.
func VolumeThread(slug string) string { return OwnerVolume.Thread(slug) }

// VolumeOf returns the slug of the volume behind a thread. ok is false for any other thread.
func VolumeOf(thread string) (slug string, ok bool) { return OwnerVolume.NameOf(thread) }

// VolumeSpace returns the limits of a volume with a quota in bytes.
func VolumeSpace(quota int64) Space {
	return Space{Bytes: quota, Files: min(max(quota/bytesPerFile, minVolumeFiles), maxVolumeFiles)}
}

// VolumeCommit is the change of a volume by an execution whose program has ended.
type VolumeCommit struct {
	Volume string `json:"volume"` // the slug
	Commit
}
