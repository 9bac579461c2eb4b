package proto

import "time"

// Blob names an object of a blob store: bytes that never change.
type Blob struct {
	Key    string `json:"key"`
	Size   int64  `json:"size"`   // bytes
	Digest string `json:"digest"` // SHA-256, as "sha256:" and 64 hexadecimal digits
}

// BlobEntry describes an object of a blob store without its content.
type BlobEntry struct {
	Key      string
	Size     int64     // bytes
	Modified time.Time // when it was stored, by the store's clock
}
