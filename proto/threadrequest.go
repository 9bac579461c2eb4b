package proto

import "time"

// How old blobs of threads must be to be collected. What is younger may belong to an execution or upload that is still about to refer to it.
const (
	DefaultSafeAge = 24 * time.Hour
	MinSafeAge     = 2 * time.Hour
)

// Fork is a wish for a new thread from a version of another.
type Fork struct {
	ID      string // of the new thread
	Version int64  // 0 for the newest
}

// DecodeFork reads the body of a request for a fork. What is wrong with it is a [*FieldError].
func DecodeFork(body []byte) (Fork, error) {
	var f Fork
	members, err := decodeObject(body, "id", "version")
	if err != nil {
		return f, err
	}
	d := &memberDecoder{members: members}
	d.need("id", func(raw []byte) (err error) {
		if f.ID, err = decodeString("id", raw); err != nil {
			return err
		}
		return CheckThreadID("id", f.ID)
	})
	d.read("version", func(raw []byte) error {
		n, err := decodeInt(raw)
		if f.Version = int64(n); err != nil || n < 1 {
			return FieldErrorf("version", "must be a whole number, at least 1")
		}
		return nil
	})
	return f, d.err
}

// DecodeCollect reads the body of a request to collect blobs, and gives how old they must be. What is wrong with it is a [*FieldError].
func DecodeCollect(body []byte) (safeAge time.Duration, err error) {
	names := []string{"safe_age"}
	members, err := decodeObject(body, names...)
	if err == nil {
		err = onlyKnown(body, names)
	}
	if err != nil {
		return 0, err
	}
	age := Seconds(DefaultSafeAge)
	if raw := members[names[0]]; raw != nil {
		age, err = readSeconds(names[0], raw, Seconds(MinSafeAge), Seconds(365*24*time.Hour))
	}
	return time.Duration(age), err
}

// Collected tells what a collection of the blobs of threads removed, of all organisations.
type Collected struct {
	Layers    Swept `json:"layers"`
	Objects   Swept `json:"objects"`
	Manifests Swept `json:"manifests"`
	Uploads   Swept `json:"uploads"`
}

// Swept is what was removed of one kind.
type Swept struct {
	Blobs int64 `json:"blobs"`
	Bytes int64 `json:"bytes"`
}

// Rebuilt tells what a rebuild of threads from the store came to, in threads of all organisations.
type Rebuilt struct {
	Made int64 `json:"made"` // have a head again
	Kept int64 `json:"kept"` // had one
	Lost int64 `json:"lost"` // have manifests, but no version that is whole
}
