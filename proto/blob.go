package proto

// Blob names an object of a blob store: bytes that never change.
type Blob struct {
	Key    string `json:"key"`
	Size   int64  `json:"size"`   // bytes
	Digest string `json:"digest"` // SHA-256, as "sha256:" and 64 hexadecimal digits
}
