package filestore

import (
	"context"
	"errors"
	"io"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// PartUploads are multipart uploads to some files. All methods except BeginUpload return
// [proto.ErrNotFound] if there is no such upload.
type PartUploads interface {
	// BeginUpload begins a multipart upload of a file, and returns its id.
	BeginUpload(ctx context.Context, path string, size int64) (id string, err error)
	// PutPart stores a part, replacing an earlier one with its number.
	PutPart(ctx context.Context, path, id string, number int, content []byte) error
	// UploadedParts returns the parts of an upload by number.
	UploadedParts(ctx context.Context, path, id string) ([]proto.UploadedPart, error)
	// CompleteUpload joins the parts into the file if check, called with the parts, returns nil.
	CompleteUpload(ctx context.Context, path, id string, check func([]proto.UploadedPart) error) error
	// AbortUpload removes an upload.
	AbortUpload(ctx context.Context, path, id string) error
}

// Parts stores the parts of multipart uploads in the blob store. All methods except BeginUpload
// return [proto.ErrNotFound] if there is no such upload.
type Parts interface {
	// BeginUpload begins an upload of size bytes, and returns its id. It returns a
	// [*proto.PendingUploadsError] if the organisation has too many pending uploads.
	BeginUpload(ctx context.Context, org string, size int64) (id string, err error)
	// PutPart stores a part of an upload of size bytes, replacing an earlier one with its number.
	PutPart(ctx context.Context, org, id string, size int64, number int, content []byte) error
	// UploadedParts returns the parts of an upload of size bytes by number.
	UploadedParts(ctx context.Context, org, id string, size int64) ([]proto.UploadedPart, error)
	// OpenUpload returns all parts, joined in the order of their numbers.
	OpenUpload(ctx context.Context, org, id string) (io.ReadCloser, error)
	// RemoveUpload removes an upload of size bytes.
	RemoveUpload(ctx context.Context, org, id string, size int64) error
}

// PartsInBlobs reports that the parts of uploads are stored in the blob store.
func (f *Store) PartsInBlobs() bool { return f.bucket == nil }

// Uploads returns the multipart uploads of a file of size bytes. Buckets store the parts
// themselves; otherwise they are in the blob store and joined in the end.
func (f *Store) Uploads(size int64) PartUploads {
	if !f.PartsInBlobs() {
		return f.bucket
	}
	return &blobUploads{parts: f.opener.Parts, beginning: &f.opener.beginning, files: f.files, org: f.Org, size: size}
}

// blobUploads are uploads with parts in the blob store.
type blobUploads struct {
	parts     Parts
	beginning *web.Transfers
	files     MountFiles
	org       string
	size      int64
}

// BeginUpload implements [PartUploads]. Gateways do not wait for each other: each beyond the first
// can exceed the limits by one upload.
func (b *blobUploads) BeginUpload(ctx context.Context, _ string, size int64) (string, error) {
	done, err := b.beginning.Acquire(ctx, b.org, 1)
	if err != nil {
		return "", err
	}
	defer done()
	return b.parts.BeginUpload(ctx, b.org, size)
}

// PutPart implements [PartUploads].
func (b *blobUploads) PutPart(ctx context.Context, _, id string, number int, content []byte) error {
	return b.parts.PutPart(ctx, b.org, id, b.size, number, content)
}

// UploadedParts implements [PartUploads].
func (b *blobUploads) UploadedParts(ctx context.Context, _, id string) ([]proto.UploadedPart, error) {
	return b.parts.UploadedParts(ctx, b.org, id, b.size)
}

// CompleteUpload implements [PartUploads].
func (b *blobUploads) CompleteUpload(
	ctx context.Context, path, id string, check func([]proto.UploadedPart) error,
) error {
	parts, err := b.UploadedParts(ctx, path, id)
	if err == nil {
		err = check(parts)
	}
	if err != nil {
		return err
	}
	body, err := b.parts.OpenUpload(ctx, b.org, id)
	if err != nil {
		return err
	}
	err = b.files.Put(ctx, path, b.size, body)
	if err := errors.Join(err, body.Close()); err != nil {
		return err
	}
	return b.AbortUpload(ctx, path, id) // the file has its own copy
}

// AbortUpload implements [PartUploads].
func (b *blobUploads) AbortUpload(ctx context.Context, _, id string) error {
	return b.parts.RemoveUpload(ctx, b.org, id, b.size)
}
