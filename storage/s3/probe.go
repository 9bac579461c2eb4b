package s3

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"io"

	"github.com/bullpen-run/bullpen/proto"
)

// probePrefix precedes the random name of the object that [Bucket.Test] writes and deletes.
const probePrefix = ".bullpen-test-"

// Test uses the bucket like a mount: it lists objects and, unless readOnly, writes an object, reads
// it back and deletes it. It returns a [*proto.StorageTestError] if any of this fails.
func (b *Bucket) Test(ctx context.Context, readOnly bool) error {
	failed := func(step string, err error) error {
		return &proto.StorageTestError{Step: step, Why: err.Error()}
	}
	if _, err := b.HasObjects(ctx); err != nil {
		return failed("list the objects", err)
	}
	if readOnly {
		return nil
	}
	content := make([]byte, 16)
	_, _ = rand.Read(content) // crypto/rand.Read never returns an error since Go 1.24
	name := probePrefix + hex.EncodeToString(content)
	o, err := b.Put(ctx, name, int64(len(content)), bytes.NewReader(content))
	if err != nil {
		return failed("write an object", err)
	}
	read, err := b.readAll(ctx, o)
	errDelete := b.Delete(ctx, name) // in any case
	switch {
	case err != nil:
		return failed("read the object that it wrote", err)
	case !bytes.Equal(read, content):
		return &proto.StorageTestError{Step: "read the object that it wrote", Why: "the server returned other content"}
	case errDelete != nil:
		return failed("delete the object "+name+" that it wrote", errDelete)
	}
	return nil
}

func (b *Bucket) readAll(ctx context.Context, o proto.StoredObject) ([]byte, error) {
	body, err := b.Open(ctx, o, 0, o.Size)
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }()
	return io.ReadAll(io.LimitReader(body, o.Size+1))
}

// HasObjects reports whether there is an object in the bucket's prefix.
func (b *Bucket) HasObjects(ctx context.Context) (bool, error) {
	objects, dirs, _, err := b.List(ctx, "", "", 1)
	return len(objects)+len(dirs) > 0, err
}
