package thread

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	manifestForm = 1
	// maxManifest is how large a manifest may be, in bytes. A layer takes less than 500.
	maxManifest  = 4 << 20
	numberDigits = 10
)

func random() string { return rand.Text() }

// WriteManifest stores what describes a version, whose Manifest is left out, and returns its name. Layers are there before it, and it is
// there before the head that names it. Parent is the manifest of the version before, nil for the first.
func (v *Versions) WriteManifest(
	ctx context.Context, org, thread string, version proto.Version, parent *proto.Blob,
) (proto.Blob, error) {
	version.Manifest = proto.Blob{}
	m := &proto.Manifest{Form: manifestForm, Org: org, Thread: thread, Version: version, Parent: parent}
	if err := checkManifest(m); err != nil {
		return proto.Blob{}, fmt.Errorf("write a manifest: %w", err)
	}
	content, err := json.Marshal(m)
	if err == nil && len(content) > maxManifest {
		err = fmt.Errorf("it has %d bytes, more than %d: make one layer of its %d", len(content), maxManifest, len(version.Layers))
	}
	if err != nil {
		return proto.Blob{}, fmt.Errorf("write the manifest of version %d of thread %s: %w", version.Number, thread, err)
	}
	digest := sha256.Sum256(content)
	b := proto.Blob{
		Key:  manifestPrefix(org, thread) + fmt.Sprintf("%0*d-%s", numberDigits, version.Number, hex.EncodeToString(digest[:])),
		Size: int64(len(content)), Digest: DigestName(digest),
	}
	if err := v.Blobs.Put(ctx, b, bytes.NewReader(content)); err != nil {
		return proto.Blob{}, fmt.Errorf("write the manifest of version %d of thread %s: %w", version.Number, thread, err)
	}
	return b, nil
}

// ReadManifest reads and checks the manifest of a version. The version in it has its Manifest.
func (v *Versions) ReadManifest(ctx context.Context, b proto.Blob) (*proto.Manifest, error) {
	m, err := v.readManifest(ctx, b)
	if err != nil {
		return nil, fmt.Errorf("read manifest %q: %w", b.Key, err)
	}
	return m, nil
}

func (v *Versions) readManifest(ctx context.Context, b proto.Blob) (*proto.Manifest, error) {
	key, ok := parseManifestKey(b.Key)
	if !ok || b.Size > maxManifest {
		return nil, fmt.Errorf("it has %d bytes and this key, and can be none", b.Size)
	}
	r, err := v.Blobs.Get(ctx, b)
	if err != nil {
		return nil, err
	}
	content, err := io.ReadAll(io.LimitReader(r, maxManifest+1))
	if err := errors.Join(err, r.Close()); err != nil {
		return nil, err
	}
	m := &proto.Manifest{}
	if err := json.Unmarshal(content, m); err != nil {
		return nil, err
	}
	if m.Form != manifestForm {
		return nil, fmt.Errorf("it has form %d, which a newer version of this program may know", m.Form)
	}
	if m.Org != key.org || m.Thread != key.thread || m.Version.Number != key.number {
		return nil, fmt.Errorf("it is that of version %d of thread %s of %s", m.Version.Number, m.Thread, m.Org)
	}
	m.Version.Manifest = b
	return m, checkManifest(m)
}

func checkManifest(m *proto.Manifest) error {
	if !proto.ValidOrg(m.Org) || m.Thread == "" || strings.Contains(m.Thread, "/") || m.Version.Number < 1 {
		return fmt.Errorf("version %d of thread %q of %q cannot be", m.Version.Number, m.Thread, m.Org)
	}
	var last int64
	for i := range m.Version.Layers {
		l := &m.Version.Layers[i]
		if err := checkLayer(m.Org, l); err != nil {
			return err
		}
		if l.Version < max(1, last) || l.Version > m.Version.Number {
			return fmt.Errorf("version %d has a layer of version %d after one of %d", m.Version.Number, l.Version, last)
		}
		last = l.Version
	}
	return nil
}

func manifestPrefix(org, thread string) string { return threadsPrefix + org + "/" + thread + "/" }

// manifestKey is what the key of a manifest says.
type manifestKey struct {
	org, thread string
	number      int64
	digest      string // as blobs have it
}

func parseManifestKey(key string) (manifestKey, bool) {
	parts := strings.Split(strings.TrimPrefix(key, threadsPrefix), "/")
	if !strings.HasPrefix(key, threadsPrefix) || len(parts) != 3 || !proto.ValidOrg(parts[0]) {
		return manifestKey{}, false
	}
	number, sum, _ := strings.Cut(parts[2], "-")
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n < 1 || len(number) != numberDigits || !proto.ValidImageDigest("sha256:"+sum) {
		return manifestKey{}, false
	}
	return manifestKey{org: parts[0], thread: parts[1], number: n, digest: "sha256:" + sum}, true
}

// manifestBlob names the manifest that a list gave.
func manifestBlob(e proto.BlobEntry) (proto.Blob, manifestKey, bool) {
	key, ok := parseManifestKey(e.Key)
	return proto.Blob{Key: e.Key, Size: e.Size, Digest: key.digest}, key, ok
}
