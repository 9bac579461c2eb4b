package thread

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// A multipart upload has an empty blob, whose key contains its size, and a blob per part, whose key
// contains the number, a random text and the digest. Keys are used once, so that replacing a part
// cannot delete a newer one. Collect removes all of them when they are old.
const (
	markerPrefix = "upload-"
	partPrefix   = "part-"
	// maxPending limits the total size in bytes of an organisation's incomplete multipart uploads.
	maxPending = 16 * proto.MaxFileBytes
	// maxUploads is how many of them there may be.
	maxUploads = 1000
	// renewAfter is the age at which an upload in use is renewed, so that Collect spares it.
	renewAfter = time.Hour
)

func markerKey(org, id string, size int64) string {
	return fmt.Sprintf("%s%s/%s%s-%d", uploadsPrefix, org, markerPrefix, id, size)
}

func partsPrefix(org, id string) string { return uploadsPrefix + org + "/" + partPrefix + id + "-" }

// BeginUpload begins a multipart upload of size bytes, and returns its id. It returns a
// [*proto.PendingUploadsError] if the organisation has too many pending uploads. Each concurrent
// call beyond the first can exceed the limits by its upload.
func (v *Versions) BeginUpload(ctx context.Context, org string, size int64) (id string, err error) {
	pending, count := size, 1
	for e, err := range v.Blobs.List(ctx, uploadsPrefix+org+"/"+markerPrefix) {
		if err != nil {
			return "", fmt.Errorf("list uploads in parts: %w", err)
		}
		_, text, _ := strings.Cut(strings.TrimPrefix(e.Key, uploadsPrefix+org+"/"+markerPrefix), "-")
		n, _ := strconv.ParseInt(text, 10, 64) // 0 for a foreign key
		pending, count = pending+n, count+1
		if pending > maxPending || count > maxUploads {
			return "", &proto.PendingUploadsError{Uploads: maxUploads, Bytes: maxPending}
		}
	}
	id = random()
	if err := v.Blobs.Put(ctx, emptyBlob(markerKey(org, id, size)), bytes.NewReader(nil)); err != nil {
		return "", fmt.Errorf("begin an upload in parts: %w", err)
	}
	return id, nil
}

// findUpload returns [proto.ErrNotFound] if there is no such upload, and keeps Collect from
// removing it.
func (v *Versions) findUpload(ctx context.Context, org, id string, size int64) error {
	key := markerKey(org, id, size)
	e, err := v.Blobs.Stat(ctx, key)
	if err == nil && time.Since(e.Modified) > renewAfter {
		err = v.Blobs.Put(ctx, emptyBlob(key), bytes.NewReader(nil))
	}
	if err != nil {
		return fmt.Errorf("find an upload in parts: %w", err)
	}
	return nil
}

// PutPart stores a part of an upload of size bytes, replacing an earlier one with its number. It
// returns [proto.ErrNotFound] if there is no such upload.
func (v *Versions) PutPart(ctx context.Context, org, id string, size int64, number int, content []byte) error {
	if err := v.findUpload(ctx, org, id, size); err != nil {
		return err
	}
	prefix := fmt.Sprintf("%s%d-", partsPrefix(org, id), number)
	// Only parts that existed before are deleted: another request may store this part at the same
	// time, and each would delete the other's.
	var old []string
	for e, err := range v.Blobs.List(ctx, prefix) {
		if err != nil {
			return fmt.Errorf("list earlier parts %d of an upload: %w", number, err)
		}
		old = append(old, e.Key)
	}
	sum := sha256.Sum256(content)
	b := proto.Blob{Key: fmt.Sprintf("%s%s-%x", prefix, random(), sum), Size: int64(len(content)), Digest: DigestName(sum)}
	if err := v.Blobs.Put(ctx, b, bytes.NewReader(content)); err != nil {
		return fmt.Errorf("store part %d of an upload: %w", number, err)
	}
	for _, key := range old {
		if err := v.Blobs.Delete(ctx, key); err != nil {
			return fmt.Errorf("replace part %d of an upload: %w", number, err)
		}
	}
	return nil
}

type storedPart struct {
	proto.UploadedPart
	blob     proto.Blob
	modified time.Time
}

func (v *Versions) storedParts(ctx context.Context, org, id string) (parts []storedPart, err error) {
	prefix := partsPrefix(org, id)
	for e, err := range v.Blobs.List(ctx, prefix) {
		if err != nil {
			return nil, fmt.Errorf("list the parts of an upload: %w", err)
		}
		text, rest, _ := strings.Cut(strings.TrimPrefix(e.Key, prefix), "-")
		sum := rest[strings.LastIndexByte(rest, '-')+1:]
		number, err := strconv.Atoi(text)
		if err != nil {
			continue // foreign
		}
		parts = append(parts, storedPart{
			proto.UploadedPart{Number: number, Size: e.Size},
			proto.Blob{Key: e.Key, Size: e.Size, Digest: "sha256:" + sum},
			e.Modified,
		})
	}
	// Of parts stored concurrently, the newest counts.
	slices.SortFunc(parts, func(a, b storedPart) int {
		return cmp.Or(cmp.Compare(a.Number, b.Number), b.modified.Compare(a.modified),
			strings.Compare(a.blob.Key, b.blob.Key))
	})
	return slices.CompactFunc(parts, func(a, b storedPart) bool { return a.Number == b.Number }), nil
}

// UploadedParts returns the parts of an upload of size bytes by number. It returns
// [proto.ErrNotFound] if there is no such upload.
func (v *Versions) UploadedParts(ctx context.Context, org, id string, size int64) ([]proto.UploadedPart, error) {
	if err := v.findUpload(ctx, org, id, size); err != nil {
		return nil, err
	}
	stored, err := v.storedParts(ctx, org, id)
	parts := make([]proto.UploadedPart, len(stored))
	for i, p := range stored {
		parts[i] = p.UploadedPart
	}
	return parts, err
}

// OpenUpload returns the parts of an upload, joined in the order of their numbers.
func (v *Versions) OpenUpload(ctx context.Context, org, id string) (io.ReadCloser, error) {
	parts, err := v.storedParts(ctx, org, id)
	if err != nil {
		return nil, err
	}
	return &joined{ctx: ctx, versions: v, parts: parts}, nil
}

// RemoveUpload removes an upload of size bytes with its parts.
func (v *Versions) RemoveUpload(ctx context.Context, org, id string, size int64) error {
	// Without the marker, no further part is accepted.
	if err := v.Blobs.Delete(ctx, markerKey(org, id, size)); err != nil {
		return fmt.Errorf("remove an upload in parts: %w", err)
	}
	for e, err := range v.Blobs.List(ctx, partsPrefix(org, id)) {
		if err == nil {
			err = v.Blobs.Delete(ctx, e.Key)
		}
		if err != nil {
			return fmt.Errorf("remove the parts of an upload: %w", err)
		}
	}
	return nil
}

// joined reads parts one after another.
type joined struct {
	ctx      context.Context // of the request that reads
	versions *Versions
	parts    []storedPart // those that are not open yet
	open     io.ReadCloser
}

// Read implements [io.Reader].
func (j *joined) Read(p []byte) (int, error) {
	for {
		if j.open == nil {
			if len(j.parts) == 0 {
				return 0, io.EOF
			}
			var err error
			if j.open, err = j.versions.Blobs.Get(j.ctx, j.parts[0].blob); err != nil {
				return 0, hideNotFound(err)
			}
			j.parts = j.parts[1:]
		}
		n, err := j.open.Read(p)
		if errors.Is(err, io.EOF) {
			err = j.Close()
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

// Close implements [io.Closer].
func (j *joined) Close() error {
	if j.open == nil {
		return nil
	}
	err := j.open.Close()
	j.open = nil
	return err
}
