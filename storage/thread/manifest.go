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
	// maxManifest is the maximal size of a manifest in bytes. A layer takes less than 500.
	maxManifest  = 4 << 20
	numberDigits = 10
	// maxOwnLayers is how many layers a manifest may add to its base.
	maxOwnLayers = 4
)

func random() string { return rand.Text() }

// WriteManifest stores the manifest of a version, whose layers must be stored already, and returns
// the version with a reference to it. It must be called before a head refers to the version.
// previous is the version before as the head records it, or nil.
func (v *Versions) WriteManifest(
	ctx context.Context, org, thread string, version proto.Version, previous *proto.Version,
) (proto.Version, error) {
	version.Manifest, version.Chain, version.Base = proto.Blob{}, proto.Chain(version.Layers),
		baseOf(version.Layers, previous)
	m := &proto.Manifest{Form: manifestForm, Org: org, Thread: thread, Version: version}
	if err := checkManifest(m); err != nil {
		return version, fmt.Errorf("write a manifest: %w", err)
	}
	if previous != nil {
		m.Parent = &previous.Manifest
	}
	if version.Base != nil {
		m.Version.Layers = version.Layers[version.Base.Layers:]
	}
	content, err := json.Marshal(m)
	if err == nil && len(content) > maxManifest {
		err = fmt.Errorf("it has %d bytes, more than %d: compact its %d layers", len(content), maxManifest,
			len(version.Layers))
	}
	if err != nil {
		return version, fmt.Errorf("write the manifest of version %d of thread %s: %w", version.Number, thread, err)
	}
	digest := sha256.Sum256(content)
	b := proto.Blob{
		Key: manifestPrefix(org, thread) + fmt.Sprintf("%0*d-%s", numberDigits, version.Number,
			hex.EncodeToString(digest[:])),
		Size: int64(len(content)), Digest: DigestName(digest),
	}
	if err := v.Blobs.Put(ctx, b, bytes.NewReader(content)); err != nil {
		return version, fmt.Errorf("write the manifest of version %d of thread %s: %w", version.Number, thread, err)
	}
	version.Manifest = b
	return version, nil
}

// baseOf returns the base of the manifest of a version with the given layers, or nil if it has
// none. A manifest omits the layers of its base, so that small changes have small manifests.
func baseOf(layers []proto.Layer, previous *proto.Version) *proto.Base {
	if previous == nil {
		return nil
	}
	fits := func(b *proto.Base) bool { return b.Layers < len(layers) && proto.Chain(layers[:b.Layers]) == b.Chain }
	if b := previous.Base; b != nil && len(layers)-b.Layers <= maxOwnLayers && fits(b) {
		return b
	}
	if n := len(previous.Layers); n >= maxOwnLayers && previous.Chain == proto.Chain(previous.Layers) {
		if b := (&proto.Base{Manifest: previous.Manifest, Layers: n, Chain: previous.Chain}); fits(b) {
			return b
		}
	}
	return nil
}

// ReadManifest reads and validates a manifest. The returned version has its Manifest field set and
// all layers, including those of the base.
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
		return nil, fmt.Errorf("invalid key, or invalid size of %d bytes", b.Size)
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
		return nil, fmt.Errorf("unsupported format %d, perhaps of a newer release", m.Form)
	}
	if m.Org != key.org || m.Thread != key.thread || m.Version.Number != key.number {
		return nil, fmt.Errorf("it describes version %d of thread %s of %s", m.Version.Number, m.Thread, m.Org)
	}
	m.Version.Manifest = b
	if base := m.Version.Base; base != nil {
		from, ok := parseManifestKey(base.Manifest.Key)
		if !ok || from.org != m.Org || from.thread != m.Thread || from.number >= m.Version.Number {
			return nil, fmt.Errorf("invalid base %q", base.Manifest.Key)
		}
		first, err := v.readManifest(ctx, base.Manifest)
		if err != nil {
			return nil, fmt.Errorf("its base %q: %w", base.Manifest.Key, err)
		}
		if len(first.Version.Layers) != base.Layers || first.Version.Chain != base.Chain {
			return nil, fmt.Errorf("its base %q has different layers", base.Manifest.Key)
		}
		m.Version.Layers = append(first.Version.Layers, m.Version.Layers...)
	}
	if chain := proto.Chain(m.Version.Layers); chain != m.Version.Chain {
		return nil, fmt.Errorf("its layers have digest %s, want %s", chain, m.Version.Chain)
	}
	return m, checkManifest(m)
}

func checkManifest(m *proto.Manifest) error {
	if !proto.ValidOrg(m.Org) || m.Thread == "" || strings.Contains(m.Thread, "/") || m.Version.Number < 1 {
		return fmt.Errorf("invalid version %d of thread %q of %q", m.Version.Number, m.Thread, m.Org)
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

// manifestKey is a parsed key of a manifest.
type manifestKey struct {
	org, thread string
	number      int64
	digest      string // see DigestName
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

// manifestBlob returns the manifest of an entry in a listing. ok is false if the entry is foreign.
func manifestBlob(e proto.BlobEntry) (b proto.Blob, key manifestKey, ok bool) {
	key, ok = parseManifestKey(e.Key)
	return proto.Blob{Key: e.Key, Size: e.Size, Digest: key.digest}, key, ok
}
